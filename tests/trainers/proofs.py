"""What must hold of samples that a trainer's own reader handed out. Each assertion says which of them is broken.

The captures are those that ``tests.trainers.smollm2`` made. What a trainer reads is compared with what lies in the
shards, and with the model's own states and loss, which never went through hashtap.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from tests.models import smollm2
from tests.trainers.smollm2 import BOUNDARIES, TOKENS, UNCOUNTED
from torch import Tensor

import hashtap

__all__ = [
    "CAPTURES",
    "MODEL",
    "Read",
    "assert_layers",
    "assert_loss_falls",
    "assert_slots",
    "assert_teacher",
    "captured",
]

CAPTURES = Path(__file__).parents[2] / ".cache" / "trainers" / "captures"
MODEL = smollm2()
MASK = [0] * UNCOUNTED + [1] * (TOKENS - UNCOUNTED)


@dataclass(frozen=True, slots=True)
class Read:
    """One sample as a trainer's reader and collator gave it.

    Row 0 of each tensor is to belong to the position of the sample that ``first`` names: where trainers shift.

    Attributes:
        aux: the auxiliary slots, each ``[N, H]``.
        final: ``[N, H]``.
        input_ids, loss_mask: ``[N]``.
        first: positions of the first row of ``aux``, ``final``, ``input_ids`` and ``loss_mask``.
    """

    sample_id: str
    aux: list[Tensor]
    final: Tensor
    input_ids: Tensor
    loss_mask: Tensor
    first: tuple[int, int, int, int] = (0, 0, 0, 0)


def captured(sample_id: str, norm: str) -> tuple[Tensor, Tensor]:
    """Ids ``[T]`` and states ``[T, 4, H]`` of a sample, from the shards."""
    capture = hashtap.open(CAPTURES / norm).by_sample_id(sample_id)
    return torch.from_numpy(capture.token_ids), capture.tensor()


def assert_slots(read: Read, norm: str, mask: list[int]) -> None:
    """Every slot, every row and its place, bit by bit."""
    ids, states = captured(read.sample_id, norm)
    assert len(read.aux) == len(BOUNDARIES), f"{read.sample_id}: {len(read.aux)} auxiliary slots"
    aux_at, final_at, ids_at, mask_at = read.first
    slots = [
        *(
            (f"slot {slot} (boundary {boundary})", read.aux[slot], states[:, slot], aux_at)
            for slot, boundary in enumerate(BOUNDARIES)
        ),
        ("final state", read.final, states[:, -1], final_at),
        ("input ids", read.input_ids, ids, ids_at),
        ("loss mask", read.loss_mask, torch.tensor(mask), mask_at),
    ]
    for name, found, wanted, first in slots:
        same = torch.equal(found, wanted[first : first + len(found)])
        assert same, f"{read.sample_id}: {name} is not what was captured"


def assert_layers(read: Read, layer_ids: list[int], added: int) -> None:
    """Slot i is the model's own state of layer id i, whose boundary is ``added`` higher; and of no other boundary."""
    truth = load_file(CAPTURES / "truth.safetensors")[read.sample_id.removeprefix("text-")]
    for slot, layer_id in enumerate(layer_ids):
        found = read.aux[slot]
        rows = truth[read.first[0] :][: len(found)]
        is_it = [boundary for boundary in range(truth.shape[1]) if torch.equal(rows[:, boundary], found)]
        assert is_it == [layer_id + added], f"slot {slot} is boundary {is_it}, and layer id {layer_id} is another"


def assert_teacher(teach: Callable[[Tensor], Tensor], reads: list[Read]) -> float:
    """The loss of the real next token, by the trainer's own norm and head, is the model's own. Returns it.

    ``teach`` makes logits ``[N, V]`` of final states ``[N, H]``.
    """
    own = load_file(CAPTURES / "truth.safetensors")["losses"]
    found, wanted = [], []
    for read, losses in zip(reads, own, strict=True):
        ids, _ = captured(read.sample_id, "post")
        first = read.first[1]
        targets = ids[first + 1 :][: len(read.final)]
        logits = teach(read.final)[: len(targets)].float()
        found.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
        wanted.append(losses[first:][: len(targets)])
    loss, models = torch.cat(found).mean().item(), torch.cat(wanted).mean().item()
    assert abs(loss - models) < 0.02, (
        f"the teacher's loss of the next token is {loss:.3f}, the model's own {models:.3f}"
    )
    print(f"the teacher's loss of the next token: {loss:.4f}, the model's own {models:.4f}")
    return loss


def assert_loss_falls(losses: list[float], steps: int, to: float) -> None:
    """So many steps, all finite, and the last five on average below ``to`` of the first five."""
    assert len(losses) >= steps, f"{len(losses)} steps of {steps}"
    assert torch.tensor(losses).isfinite().all(), "a loss is not finite"
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    assert last < to * first, f"the loss went from {first:.2f} to {last:.2f}"
