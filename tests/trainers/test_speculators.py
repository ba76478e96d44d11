"""speculators' own reader, collator, norm, head and command line on captures: run by ``make test-trainers``."""

import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("speculators", reason="speculators is not in this environment", exc_type=ImportError)

import torch
from safetensors.torch import load_file, save_file
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset, CollateFn
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
from tests.trainers.smollm2 import BOUNDARIES, HIDDEN, SAMPLES, TOKENS
from torch import Tensor
from transformers import AutoConfig

from hashtap.trainers.export import export
from hashtap.trainers.notes import source_of
from hashtap.trainers.source import Choice, TrainerSource
from hashtap.trainers.speculators import CapturedStates

pytestmark = [pytest.mark.trainer, pytest.mark.filterwarnings("default")]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("speculators")
    export(TrainerSource(CAPTURES / "pre", "speculators"), out)
    return out


@pytest.fixture(scope="module")
def without_states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("speculators-ids")
    export(TrainerSource(CAPTURES / "pre", "speculators"), out, states=False)
    return out


def read(path: Path, transfer: CapturedStates | None = None) -> list[Read]:
    """All samples through ``ArrowDataset``, ``shift_batch`` and ``CollateFn``.

    After its shift, row t holds the auxiliary states of position t and token, mask and final state of t + 1.
    """
    dataset = ArrowDataset(TOKENS, path, transfer=transfer, on_missing="raise")
    collate = CollateFn(TOKENS - 1, HIDDEN, preprocess=shift_batch)
    assert len(dataset) == SAMPLES
    reads = []
    for index in range(SAMPLES):
        batch = collate([dataset[index]])
        assert batch["error_records"] == 0, f"text-{index}: the reader left it out"
        assert batch["document_ids"].unique().tolist() == [0]
        reads.append(
            Read(
                f"text-{index}",
                list(batch["hidden_states"][0].split(HIDDEN, dim=-1)),
                batch["verifier_last_hidden_states"][0],
                batch["input_ids"][0],
                batch["loss_mask"][0],
                first=(0, 1, 1, 1),
            )
        )
    return reads


@pytest.fixture(scope="module")
def model() -> Eagle3DraftModel:
    """The draft with the teacher's norm and whole head, as the command line builds it."""
    config = AutoConfig.from_pretrained(MODEL)
    config.num_hidden_layers = 1
    return Eagle3DraftModel.from_training_args(
        verifier_config=config,
        draft_vocab_size=config.vocab_size,
        norm_before_residual=True,
        ttt_steps=3,
        verifier_name_or_path=str(MODEL),
        target_layer_ids=list(BOUNDARIES),
        draft_attn_impl="sdpa",
    )


def teacher(model: Eagle3DraftModel) -> Any:
    @torch.no_grad()
    def teach(final: Tensor) -> Tensor:
        return torch.as_tensor(model.verifier_lm_head(model.verifier_norm(final.to(model.verifier_norm.weight.dtype))))

    return teach


@pytest.mark.parametrize("form", ["files", "shards"])
def test_every_slot_through_its_reader_and_collator(exported: Path, without_states: Path, form: str) -> None:
    reads = read(exported) if form == "files" else read(without_states, CapturedStates(source_of(without_states)))
    for sample in reads:
        assert_slots(sample, "pre", MASK)
    for sample in reads[:4]:
        assert_layers(sample, [2, 15, 27], added=0)


def test_the_teacher_is_the_model(exported: Path, model: Eagle3DraftModel) -> None:
    assert_teacher(teacher(model), read(exported))


def test_a_norm_that_was_undone_teaches_the_same(tmp_path: Path, model: Eagle3DraftModel) -> None:
    export(TrainerSource(CAPTURES / "post", "speculators", Choice(model=MODEL)), tmp_path)
    assert_teacher(teacher(model), read(tmp_path))


# What a falling training loss would not show.


def test_the_wrong_norm_is_caught(exported: Path, model: Eagle3DraftModel) -> None:
    """States after the norm where those before it belong; and those before it, to a head without the norm."""
    reads = read(exported)
    after = [dataclasses.replace(sample, final=captured(sample.sample_id, "post")[1][1:, -1]) for sample in reads]
    with pytest.raises(AssertionError, match="final state is not what was captured"):
        assert_slots(after[0], "pre", MASK)
    with pytest.raises(AssertionError, match=r"the teacher's loss of the next token is [6-9]\.\d+, the model's own 2"):
        assert_teacher(teacher(model), after)
    bare = model.verifier_lm_head
    with pytest.raises(AssertionError, match=r"the teacher's loss of the next token is \d{3}\.\d+, the model's own 2"):
        assert_teacher(lambda final: bare(final.to(bare.weight.dtype)).detach(), reads)


def test_rows_of_another_sample_are_caught(exported: Path, tmp_path: Path, model: Eagle3DraftModel) -> None:
    """Two files with each other's states and their own ids, which the reader takes."""
    shutil.copytree(exported, tmp_path, dirs_exist_ok=True)
    one, other = (tmp_path / "hidden_states" / f"hs_{row}.safetensors" for row in (0, 1))
    mine, theirs = load_file(one), load_file(other)
    save_file(theirs | {"token_ids": mine["token_ids"]}, one)
    save_file(mine | {"token_ids": theirs["token_ids"]}, other)
    reads = read(tmp_path)
    for sample in reads[:2]:
        with pytest.raises(AssertionError, match=f"{sample.sample_id}: .* is not what was captured"):
            assert_slots(sample, "pre", MASK)
    with pytest.raises(AssertionError, match="the teacher's loss of the next token is"):
        assert_teacher(teacher(model), reads)


def test_swapped_slots_and_neighbouring_layers_are_caught(exported: Path) -> None:
    sample = read(exported)[0]
    swapped = dataclasses.replace(sample, aux=[sample.aux[1], sample.aux[0], sample.aux[2]])
    with pytest.raises(AssertionError, match=r"slot 0 \(boundary 2\) is not what was captured"):
        assert_slots(swapped, "pre", MASK)
    with pytest.raises(AssertionError, match=r"slot 0 is boundary \[15\], and layer id 2 is another"):
        assert_layers(swapped, [2, 15, 27], added=0)
    with pytest.raises(AssertionError, match=r"slot 0 is boundary \[2\], and layer id 3 is another"):
        assert_layers(sample, [3, 16, 28], added=0)
    with pytest.raises(AssertionError, match=r"slot 0 is boundary \[2\], and layer id 2 is another"):
        assert_layers(sample, [2, 15, 27], added=1)


def test_a_row_late_is_caught(exported: Path) -> None:
    sample = read(exported)[0]
    late = dataclasses.replace(sample, aux=[slot.roll(1, 0) for slot in sample.aux])
    with pytest.raises(AssertionError, match=r"slot 0 \(boundary 2\) is not what was captured"):
        assert_slots(late, "pre", MASK)


# Training.


@pytest.mark.timeout(900)
def test_the_released_trainer_learns(without_states: Path, tmp_path: Path) -> None:
    """33 steps of its command line, states read from the shards; then the checkpoint, by its own class."""
    log = train(without_states, tmp_path / "checkpoints", epochs=3)
    losses = [float(value) for value in re.findall(r"train/loss=([\d.e+-]+|nan|inf)", log)]
    validation = [float(value) for value in re.findall(r"val/loss_epoch=([\d.e+-]+|nan|inf)", log)]
    print("train", losses, "val", validation)
    assert_loss_falls(losses, steps=33, to=0.6)
    assert len(validation) == 3
    assert validation == sorted(validation, reverse=True), validation
    draft = Eagle3DraftModel.from_pretrained(tmp_path / "checkpoints" / "checkpoint_best")
    assert draft.target_layer_ids == [2, 15, 27]
    assert int(draft.t2d.sum()) == 2048
    assert draft.fc.weight.shape == (HIDDEN, 3 * HIDDEN)


def train(data: Path, checkpoints: Path, epochs: int) -> str:
    command = [
        *(sys.executable, ROOT / "examples" / "speculators_on_cpu.py", "train", "--speculator-type", "eagle3"),
        *("--verifier-name-or-path", MODEL, "--data-path", data, "--save-path", checkpoints),
        *("--hidden-states-backend", "hashtap", "--on-missing", "raise", "--target-layer-ids", 2, 15, 27),
        *("--draft-vocab-size", 2048, "--num-layers", 1, "--draft-attn-impl", "sdpa", "--loss-implementation", "eager"),
        *(
            "--hidden-states-dtype",
            "float32",
            "--total-seq-len",
            2 * TOKENS,
            "--num-workers",
            0,
            "--optimizer",
            "adamw",
        ),
        *("--optimizer", "adamw", "--lr", 1e-3, "--ttt-steps", 3, "--epochs", epochs, "--checkpoint-freq", epochs),
        "--no-resume-from-checkpoint",
    ]
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        check=False,
        timeout=840,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "COLUMNS": "1000", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr
