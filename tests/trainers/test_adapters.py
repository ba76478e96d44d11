"""What serves shards without a trainer's package beside it; the packages themselves: ``make test-trainers``."""

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from tests.capture.build import Host, states_of

from hashtap.errors import MismatchError, UsageError
from hashtap.trainers import angelslim, modelopt
from hashtap.trainers.export import export
from hashtap.trainers.notes import source_of
from hashtap.trainers.source import Choice, TrainerSource

PROMPTS = [[7, 8, 9, 10], [3], list(range(40, 340))]
ALL = Choice(loss_on_all=True)


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("captures")
    with Host(path, threads=1) as host:
        host.capture(PROMPTS)
    return path


def states(ids: list[int]) -> torch.Tensor:
    return torch.from_numpy(states_of(ids).view("int16")).view(torch.bfloat16)


def test_modelopt(captures: Path) -> None:
    dataset = pickle.loads(pickle.dumps(modelopt.CapturedDataset(TrainerSource(captures, "modelopt"))))
    assert len(dataset) == 3
    for index, ids in enumerate(PROMPTS):
        sample = dataset[index]
        assert sample["input_ids"].tolist() == ids
        assert sample["labels"].tolist() == [*ids[1:], -100]
        assert sample["loss_mask"].tolist() == sample["attention_mask"].tolist() == [1] * len(ids)
        assert sample["base_model_hidden_states"].equal(states(ids)[:, 3])
        assert sample["aux_hidden_states"].equal(states(ids)[:, :3].flatten(1))
        assert sample["base_hidden_prenorm"] is False
    with pytest.raises(UsageError, match=r"answer_only_loss needs loss masks, and sample '[0-9a-f]{32}' has none"):
        modelopt.CapturedDataset(TrainerSource(captures, "modelopt"), answer_only_loss=True)
    assert len(modelopt.CapturedDataset(TrainerSource(captures, "modelopt", ALL), answer_only_loss=True)) == 3


def test_angelslim(captures: Path) -> None:
    dataset = angelslim.CapturedDataset(TrainerSource(captures, "angelslim", ALL))
    assert len(dataset) == 3
    for index, ids in enumerate(PROMPTS):
        sample = dataset[index]
        assert sample["input_ids"].tolist() == [ids]
        assert sample["attention_mask"].tolist() == sample["loss_mask"].tolist() == [[1] * len(ids)]
        assert sample["hidden_states"].equal(states(ids)[None, :, :3].flatten(2))
        assert sample["target_hiddens"].equal(states(ids)[None, :, 3])


def test_the_source_of_an_export(captures: Path, tmp_path: Path) -> None:
    """Found by the notes, where it was and where it was moved; and refused when it is no longer the same."""
    out = tmp_path / "out"
    choice = Choice(loss_on_all=True, layers=(2, 3, 4))
    assert export(TrainerSource(captures, "specforge", choice), out, states=False).written == 0
    assert not list(out.rglob("*.ckpt"))
    found = source_of(out)
    assert (found.directory, found.choice, len(found)) == (captures.resolve(), choice, 3)
    moved = Path(shutil.copytree(captures, tmp_path / "moved"))
    assert source_of(out, moved).directory == moved
    with Host(moved) as host:
        host.capture([[99, 98]])
    with pytest.raises(
        MismatchError, match=r"are not those that .* they differ in samples, tokens, hash of the samples"
    ):
        source_of(out, moved)
    with pytest.raises(UsageError, match="is no export of hashtap"):
        source_of(tmp_path)
