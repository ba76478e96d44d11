"""Batches of samples of unequal length: padded on either side, or packed one behind the other.

Whatever the form, masks say which rows are real and which of them count in the loss; what lies elsewhere is zero.
"""

from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

__all__ = ["Batch", "Sample", "pack", "pad_left", "pad_right"]

Batch = dict[str, Any]


class Sample(TypedDict):
    """One sample.

    Attributes:
        sample_id: its name in the manifest; the key's hex digits where there is none.
        input_ids: int64 ``[T]``.
        hidden_states: ``[T, L, H]``, of the captured dtype; layers are the boundaries, then the final state.
        loss_mask: bool ``[T]``, the manifest's; all true where it has none.
    """

    sample_id: str
    input_ids: Tensor
    hidden_states: Tensor
    loss_mask: Tensor


def pad_right(samples: Sequence[Sample]) -> Batch:
    """A batch ``[B, T]`` in which every sample begins at column 0; T is the longest one's.

    Returns:
        ``input_ids`` int64 ``[B, T]``, ``hidden_states`` ``[B, T, L, H]``, ``attention_mask`` bool ``[B, T]`` (which
        rows are real), ``loss_mask`` bool ``[B, T]``, ``position_ids`` int64 ``[B, T]``, ``lengths`` int64 ``[B]``,
        ``sample_ids``.

    Raises:
        ValueError: when there is no sample.
    """
    return _pad(samples, left=False)


def pad_left(samples: Sequence[Sample]) -> Batch:
    """As :func:`pad_right`, but every sample ends in the last column."""
    return _pad(samples, left=True)


def pack(samples: Sequence[Sample]) -> Batch:
    """All samples one behind the other, N tokens in all.

    Returns:
        ``input_ids`` int64 ``[N]``, ``hidden_states`` ``[N, L, H]``, ``loss_mask`` bool ``[N]``, ``position_ids`` int64
        ``[N]`` (from 0 in each sample), ``cu_seqlens`` int32 ``[B + 1]`` (where each begins, and N), ``lengths`` int64
        ``[B]``, ``sample_ids``.

    Raises:
        ValueError: when there is no sample.
    """
    lengths = _lengths(samples)
    return {
        "input_ids": torch.cat([sample["input_ids"] for sample in samples]),
        "hidden_states": torch.cat([sample["hidden_states"] for sample in samples]),
        "loss_mask": torch.cat([sample["loss_mask"] for sample in samples]),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "lengths": torch.tensor(lengths),
        "sample_ids": [sample["sample_id"] for sample in samples],
    }


def _pad(samples: Sequence[Sample], left: bool) -> Batch:
    lengths = _lengths(samples)
    shape = (len(samples), max(lengths))
    first = samples[0]["hidden_states"]
    batch: Batch = {
        "input_ids": torch.zeros(shape, dtype=torch.int64),
        "hidden_states": torch.zeros((*shape, *first.shape[1:]), dtype=first.dtype),
        "attention_mask": torch.zeros(shape, dtype=torch.bool),
        "loss_mask": torch.zeros(shape, dtype=torch.bool),
        "position_ids": torch.zeros(shape, dtype=torch.int64),
    }
    for row, (sample, length) in enumerate(zip(samples, lengths, strict=True)):
        start = shape[1] - length if left else 0
        real = slice(start, start + length)
        for name in ("input_ids", "hidden_states", "loss_mask"):
            batch[name][row, real] = sample[name]
        batch["attention_mask"][row, real] = True
        batch["position_ids"][row, real] = torch.arange(length)
    return batch | {"lengths": torch.tensor(lengths), "sample_ids": [sample["sample_id"] for sample in samples]}


def _lengths(samples: Sequence[Sample]) -> list[int]:
    if not samples:
        raise ValueError("a batch of no samples: leave it out")
    return [len(sample["input_ids"]) for sample in samples]
