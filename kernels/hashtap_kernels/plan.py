"""Which frames one capture writes: the plan that the kernel and its reference follow.

Pure NumPy. A :class:`Piece` is what one forward computed of one request; :func:`plan_frames` cuts
pieces into frames of at most ``MAX_FRAME_TOKENS`` and lays those out one behind the other.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hashtap_kernels.layout import MAX_FRAME_TOKENS, Geometry

__all__ = [
    "COLUMNS",
    "KEY0",
    "KEY1",
    "OFFSET",
    "POSITIONS",
    "ROW",
    "ROWS_BEFORE",
    "SERIAL",
    "TOKENS",
    "FramePlan",
    "Piece",
    "plan_frames",
]

ROW = 0  # the frame's first row in the batch
TOKENS = 1  # its rows, 1 to MAX_FRAME_TOKENS
ROWS_BEFORE = 2  # rows of all frames before it
OFFSET = 3  # its first byte in the output
POSITIONS = 4  # position of its first token | length of the whole prompt << 32: header word 3
SERIAL = 5  # header word 4
KEY0 = 6  # header words 5 and 6
KEY1 = 7
COLUMNS = 8

I64Array = npt.NDArray[np.int64]

_DESCRIPTOR = struct.Struct("<4q2IQ16s")  # its columns; two of 32 bits make up POSITIONS


class Piece(NamedTuple):
    """Consecutive rows of a batch that belong to consecutive tokens of one prompt."""

    row: int  # first row in the batch
    tokens: int  # how many rows, at least 1
    first_position: int  # of the first of them in the prompt
    total_tokens: int  # length of the whole prompt
    serial: int  # number of this pass of this request, 64 bits
    key: bytes  # the prompt's key, 16 bytes


@dataclass(frozen=True, slots=True, eq=False)
class FramePlan:
    """The frames of one launch.

    Attributes:
        descriptors: int64 ``[F, COLUMNS]``, one row a frame; SERIAL and the keys are uint64 bit patterns.
        rows: captured rows in all.
        bytes: bytes of all frames; they lie from 0 on without gaps.
        made_for: what :func:`plan_frames` laid it out for, its descriptors read-only since; None if made otherwise.
    """

    descriptors: I64Array
    rows: int
    bytes: int
    made_for: Geometry | None = None

    def __len__(self) -> int:
        return len(self.descriptors)

    @property
    def frame_bytes(self) -> I64Array:
        """Bytes of each frame, int64 ``[F]``."""
        return np.diff(self.descriptors[:, OFFSET], append=self.bytes)

    def check(self, geometry: Geometry) -> None:
        """Raise ValueError unless the frames tile their rows and bytes as ``geometry`` wants it."""
        if self.made_for == geometry and not self.descriptors.flags.writeable:
            return
        tokens = self.descriptors[:, TOKENS]
        if len(tokens):
            first_row, fewest = self.descriptors[:, ROW : TOKENS + 1].min(axis=0).tolist()
            if fewest < 1 or tokens.max() > MAX_FRAME_TOKENS:
                raise ValueError(f"frames of {fewest} to {tokens.max()} tokens: 1 to {MAX_FRAME_TOKENS} are allowed")
            if first_row < 0:
                raise ValueError(f"a frame begins at row {first_row} of the batch")
        places, rows, size = _places(tokens, geometry)
        if rows != self.rows or size != self.bytes or (places != self.descriptors[:, ROWS_BEFORE : OFFSET + 1]).any():
            raise ValueError(f"this plan of {self.rows} rows and {self.bytes} bytes is not laid out for {geometry}")

    def split(self, limit_bytes: int) -> list["FramePlan"]:
        """Plans of at most ``limit_bytes`` each, in order, no frame cut; every one starts at offset 0.

        Raises:
            ValueError: when a single frame is larger than ``limit_bytes``.
        """
        ends = self.descriptors[:, OFFSET] + self.frame_bytes
        plans = []
        first, offset, rows_before = 0, 0, 0
        while first < len(self):
            end = int(np.searchsorted(ends, offset + limit_bytes, side="right"))
            if end == first:
                raise ValueError(f"a frame of {ends[first] - offset} bytes does not fit a limit of {limit_bytes}")
            part = self.descriptors[first:end].copy()
            part[:, OFFSET] -= offset
            part[:, ROWS_BEFORE] -= rows_before
            rows = int(part[-1, ROWS_BEFORE] + part[-1, TOKENS])
            part.flags.writeable = False
            plans.append(FramePlan(part, rows, int(ends[end - 1]) - offset, self.made_for))
            first, offset, rows_before = end, int(ends[end - 1]), rows_before + rows
        return plans


def plan_frames(pieces: Sequence[Piece], geometry: Geometry) -> FramePlan:
    """Cut ``pieces`` into frames and lay them out. The frames of a piece are contiguous, in order.

    Raises:
        ValueError: when a piece is no part of a prompt.
    """
    if not pieces:
        return FramePlan(np.empty((0, COLUMNS), np.int64), 0, 0)
    # A loop over pieces is quicker here than NumPy, whose calls take microseconds each once other code has run between.
    packed = bytearray(len(pieces) * _DESCRIPTOR.size)  # the descriptors, were a frame of any length
    at = longest = 0
    for row, tokens, first, total, serial, key in pieces:
        if row < 0 or tokens < 1 or first < 0 or not first + tokens <= total < 1 << 31 or len(key) != 16:
            raise ValueError(
                f"{Piece(row, tokens, first, total, serial, key)}: a piece is at least one row, lies inside its prompt "
                "of fewer than 2**31 tokens and has a key of 16 bytes"
            )
        _DESCRIPTOR.pack_into(packed, at, row, tokens, 0, 0, first, total, serial, key)
        at += _DESCRIPTOR.size
        longest = max(longest, tokens)
    descriptors = np.frombuffer(packed, "<i8").reshape(-1, COLUMNS)
    if longest > MAX_FRAME_TOKENS:
        descriptors = _cut(descriptors)
    places, captured_rows, size = _places(descriptors[:, TOKENS], geometry)
    descriptors[:, ROWS_BEFORE : OFFSET + 1] = places
    descriptors.flags.writeable = False
    return FramePlan(descriptors, captured_rows, size, geometry)


def _cut(whole: I64Array) -> I64Array:
    """Descriptors of frames of any length, cut into those of frames of at most ``MAX_FRAME_TOKENS``."""
    counts = -(-whole[:, TOKENS] // MAX_FRAME_TOKENS)
    descriptors = np.repeat(whole, counts, axis=0)
    # How many tokens of its piece lie before each frame.
    before = (np.arange(len(descriptors)) - np.repeat(np.cumsum(counts) - counts, counts)) * MAX_FRAME_TOKENS
    descriptors[:, ROW] += before
    descriptors[:, TOKENS] = np.minimum(descriptors[:, TOKENS] - before, MAX_FRAME_TOKENS)
    descriptors[:, POSITIONS] += before
    return descriptors


def _places(tokens: I64Array, geometry: Geometry) -> tuple[I64Array, int, int]:
    """ROWS_BEFORE and OFFSET of frames of ``tokens`` rows, int64 ``[F, 2]``, and the sums of rows and bytes."""
    ends = np.zeros((len(tokens) + 1, 2), np.int64)
    ends[1:, 0] = tokens
    ends[1:, 1] = geometry.frame_bytes(tokens)
    np.cumsum(ends, axis=0, out=ends)
    rows, size = ends[-1].tolist()
    return ends[:-1], rows, size
