"""The byte layout of a frame: what the kernel writes and everything else reads.

A frame holds at most :data:`MAX_FRAME_TOKENS` consecutive prompt tokens of one request::

    header       128 bytes, :data:`HEADER`
    payload      RAW:    [n, L, H] elements, little endian
                 PLANES: exponents [n, L, H] uint8, then rests [n, L, H] uint8
    row sums     [n] uint64, one checksum a token row (see ``proof.row_sums``)
    padding      zeros, to a multiple of 64 bytes

Pure: imports NumPy and nothing else.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeVar

import numpy as np
import numpy.typing as npt

__all__ = [
    "CHECKED_WORDS",
    "FRAME_ALIGN",
    "FRAME_VERSION",
    "HEADER",
    "HEADER_BYTES",
    "MAGIC",
    "MAX_FRAME_TOKENS",
    "Dtype",
    "Geometry",
    "Payload",
]

MAGIC = int.from_bytes(b"HASHTAP1", "little")
FRAME_VERSION = 1
HEADER_BYTES = 128
FRAME_ALIGN = 64
MAX_FRAME_TOKENS = 256
CHECKED_WORDS = 11
"""Words 0 to 10 of the header are the kernel's and guarded by word 15; words 11 to 14 are the writer's."""


Count = TypeVar("Count", int, npt.NDArray[np.int64])


class Payload(IntEnum):
    """How a frame's payload is laid out. TABLE is a frame with no tokens that holds a reference-exponent table."""

    RAW = 0
    PLANES = 1
    TABLE = 2


class Dtype(IntEnum):
    """Element type of the hidden states. Only BF16 and FP16 have a PLANES form."""

    BF16 = 1
    FP16 = 2
    FP32 = 3
    FP8_E4M3 = 4

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return _ELEMENT_BYTES[self]


_ELEMENT_BYTES = {Dtype.BF16: 2, Dtype.FP16: 2, Dtype.FP32: 4, Dtype.FP8_E4M3: 1}


HEADER = np.dtype(
    [
        ("magic", "<u8"),  # word 0
        ("version", "<u2"),  # word 1
        ("header_bytes", "<u2"),
        ("dtype", "u1"),
        ("payload", "u1"),
        ("layers", "<u2"),
        ("hidden", "<u4"),  # word 2
        ("tokens", "<u4"),
        ("first_position", "<u4"),  # word 3: position of the frame's first token in the prompt
        ("total_tokens", "<u4"),  # the whole prompt's length
        ("serial", "<u8"),  # word 4: one number for one pass of one request, unique in the writing process
        ("key", "<u8", (2,)),  # words 5 and 6: the prompt's key, its 16 bytes as two little-endian words
        ("proof", "<u8", (2,)),  # words 7 and 8: this frame's share of the prompt's proof
        ("table", "<u8"),  # word 9: id of the reference-exponent table, 0 for RAW
        ("forward", "<u8"),  # word 10: number of the forward pass in the writing process
        ("coded_bytes", "<u4"),  # word 11: bytes of the stored first section; the writer's
        ("codec", "u1"),
        ("unused", "u1", (3,)),
        ("stored_bytes", "<u8"),  # word 12: bytes of the stored frame, padding included; the writer's
        ("stored_sum", "<u8"),  # word 13: xxh3_64 of the stored frame with this word zero; the writer's
        ("salt_sum", "<u8"),  # word 14: a hash of the key's salt, 0 for none; the writer's
        ("self_check", "<u8"),  # word 15: proof.header_check of words 0 to 10
    ]
)
assert HEADER.itemsize == HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Geometry:
    """What one token row is made of: ``[L, H]`` elements of one dtype.

    Raises:
        ValueError: when L is not 1 to 8, or H is not a multiple of 8 from 8 to 16,384.
    """

    layers: int
    hidden: int
    dtype: Dtype = Dtype.BF16

    def __post_init__(self) -> None:
        if not 1 <= self.layers <= 8:
            raise ValueError(f"{self.layers} layers: a frame holds 1 to 8")
        if self.hidden % 8 or not 8 <= self.hidden <= 16384:
            raise ValueError(f"hidden size {self.hidden}: it must be a multiple of 8, from 8 to 16384")

    @property
    def row_bytes(self) -> int:
        """Payload bytes of one token row, L x H elements."""
        return self.layers * self.hidden * self.dtype.element_bytes

    def frame_bytes(self, tokens: Count) -> Count:
        """Bytes of a frame of ``tokens`` rows (one number or an array), header, row sums and padding included."""
        return (tokens * (self.row_bytes + 8) + HEADER_BYTES + FRAME_ALIGN - 1) & -FRAME_ALIGN

    def piece_bytes(self, tokens: int) -> int:
        """Bytes of all frames of ``tokens`` consecutive rows of one request."""
        whole, rest = divmod(tokens, MAX_FRAME_TOKENS)
        return whole * self.frame_bytes(MAX_FRAME_TOKENS) + (self.frame_bytes(rest) if rest else 0)
