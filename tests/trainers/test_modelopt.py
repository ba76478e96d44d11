"""ModelOpt's own dataset, collator, model class and norm on captures: run by ``make test-trainers``."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("modelopt", reason="nvidia-modelopt is not in this environment", exc_type=ImportError)

import modelopt.torch.opt as mto
import torch
from examples.train_modelopt import drafter
from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset
from modelopt.torch.speculative.plugins.hf_eagle import _maybe_apply_base_final_norm, default_eagle_aux_layer_ids
from modelopt.torch.speculative.utils import load_vlm_or_llm
from safetensors.torch import load_file
from tests.trainers.proofs import (
    CAPTURES,
    MASK,
    MODEL,
    Read,
    assert_layers,
    assert_loss_falls,
    assert_slots,
    assert_teacher,
    captured,
)
from tests.trainers.smollm2 import HIDDEN, MODEL_LAYERS, SAMPLES, TOKENS
from torch import Tensor

from hashtap.trainers.export import export
from hashtap.trainers.modelopt import CapturedDataset
from hashtap.trainers.source import TrainerSource

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.trainer, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module", params=["post", "pre"])
def norm(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def files(norm: str, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    out = tmp_path_factory.mktemp("modelopt")
    export(TrainerSource(CAPTURES / norm, "modelopt"), out)
    return sorted(out.rglob("*.pt"))


def batches(dataset: Any) -> list[dict[str, Any]]:
    collate = EagleOfflineDataCollator(train_len=TOKENS)
    assert len(dataset) == SAMPLES
    return [collate([dataset[index]]) for index in range(SAMPLES)]


def read(dataset: Any) -> list[Read]:
    """All samples through its collator; it shifts nothing but the labels."""
    reads = []
    for index, batch in enumerate(batches(dataset)):
        states = batch["base_model_outputs"]
        reads.append(
            Read(
                f"text-{index}",
                list(states["aux_hidden_states"][0].split(HIDDEN, dim=-1)),
                states["base_model_hidden_states"][0],
                batch["input_ids"][0],
                batch["loss_mask"][0],
            )
        )
        assert batch["labels"][0, :-1].equal(batch["input_ids"][0, 1:])
        assert batch["labels"][0, -1] == -100
    return reads


@pytest.fixture(scope="module")
def model() -> Any:
    return drafter(MODEL)


def teacher(model: Any, prenorm: bool) -> Any:
    """As ``HFEagleModel.forward`` makes logits of offline states."""

    @torch.no_grad()
    def teach(final: Tensor) -> Tensor:
        states = _maybe_apply_base_final_norm(final.float(), {"base_hidden_prenorm": prenorm}, model._base_model_norm)
        return torch.as_tensor(model._base_model_lm_head(states))

    return teach


@pytest.mark.parametrize("form", ["files", "shards"])
def test_every_slot_through_its_dataset_and_collator(files: list[Path], norm: str, form: str) -> None:
    if form == "files":
        dataset = OfflineSupervisedDataset(files, answer_only_loss=True)
    else:
        dataset = CapturedDataset(TrainerSource(CAPTURES / norm, "modelopt"), answer_only_loss=True)
    reads = read(dataset)
    for sample in reads:
        assert_slots(sample, norm, MASK)
    for sample in reads[:4]:
        assert_layers(sample, default_eagle_aux_layer_ids(MODEL_LAYERS), added=1)


@pytest.mark.parametrize("answer_only_loss", [False, True])
def test_shards_give_what_its_own_dataset_gives(files: list[Path], norm: str, answer_only_loss: bool) -> None:
    own = OfflineSupervisedDataset(files, answer_only_loss=answer_only_loss)
    served = CapturedDataset(TrainerSource(CAPTURES / norm, "modelopt"), answer_only_loss=answer_only_loss)
    for index in range(0, SAMPLES, 5):
        mine, theirs = served[index], own[index]
        assert list(mine) == list(theirs)
        for name, value in theirs.items():
            assert torch.equal(mine[name], value) if isinstance(value, Tensor) else mine[name] is value, name


def test_the_teacher_is_the_model(files: list[Path], norm: str, model: Any) -> None:
    dataset = OfflineSupervisedDataset(files)
    assert {batch["base_model_outputs"]["base_hidden_prenorm"] for batch in batches(dataset)} == {norm == "pre"}
    assert_teacher(teacher(model, norm == "pre"), read(dataset))


# What a falling training loss would not show.


def test_the_wrong_norm_is_caught(norm: str, files: list[Path], model: Any) -> None:
    """The flag says one norm and the states are of the other."""
    reads = read(OfflineSupervisedDataset(files))
    loss = r"[6-9]" if norm == "post" else r"\d{3}"
    message = rf"the teacher's loss of the next token is {loss}\.\d+, the model's own 2"
    with pytest.raises(AssertionError, match=message):
        assert_teacher(teacher(model, norm != "pre"), reads)
    other = captured("text-0", "pre" if norm == "post" else "post")[1][:, -1]
    with pytest.raises(AssertionError, match="final state is not what was captured"):
        assert_slots(dataclasses.replace(reads[0], final=other), norm, MASK)


def test_rows_of_another_sample_are_caught(norm: str, files: list[Path], model: Any) -> None:
    reads = read(OfflineSupervisedDataset(files, answer_only_loss=True))
    swapped = [
        dataclasses.replace(reads[0], aux=reads[1].aux, final=reads[1].final),
        dataclasses.replace(reads[1], aux=reads[0].aux, final=reads[0].final),
    ]
    for sample in swapped:
        with pytest.raises(AssertionError, match=f"{sample.sample_id}: slot 0 .* is not what was captured"):
            assert_slots(sample, norm, MASK)
    with pytest.raises(AssertionError, match="the teacher's loss of the next token is"):
        assert_teacher(teacher(model, norm == "pre"), swapped + reads[2:])


def test_swapped_slots_and_neighbouring_layers_are_caught(norm: str, files: list[Path]) -> None:
    sample = read(OfflineSupervisedDataset(files, answer_only_loss=True))[0]
    swapped = dataclasses.replace(sample, aux=[sample.aux[0], sample.aux[2], sample.aux[1]])
    with pytest.raises(AssertionError, match=r"slot 1 \(boundary 15\) is not what was captured"):
        assert_slots(swapped, norm, MASK)
    with pytest.raises(AssertionError, match=r"slot 1 is boundary \[27\], and layer id 14 is another"):
        assert_layers(swapped, [1, 14, 26], added=1)
    with pytest.raises(AssertionError, match=r"slot 0 is boundary \[2\], and layer id 2 is another"):
        assert_layers(sample, [2, 15, 27], added=1)


# Training.


@pytest.mark.timeout(900)
def test_the_released_trainer_learns(norm: str, tmp_path: Path) -> None:
    """The example: 36 steps of transformers' Trainer on ModelOpt's model, served from shards; then what it saved."""
    command = [sys.executable, ROOT / "examples" / "train_modelopt.py", CAPTURES / norm, MODEL, tmp_path]
    done = subprocess.run([*map(str, command), "36"], capture_output=True, text=True, check=False, timeout=840)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = json.loads((tmp_path / "losses.json").read_text())
    print("train", [round(loss, 2) for loss in losses])
    assert_loss_falls(losses, steps=36, to=0.8)
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 14, 26]
    bare = load_vlm_or_llm(str(MODEL), use_offline_training=True, dtype=torch.float32)
    again = mto.restore(bare, tmp_path / "state.pt")
    assert again.eagle_config.eagle_aux_hidden_state_layer_ids == [1, 14, 26]
    exported = load_file(tmp_path / "draft" / "model.safetensors")
    assert exported["fc.weight"].equal(again.eagle_module.fc.weight.to(exported["fc.weight"].dtype))
