"""Which frames one capture writes: the plan that the kernel and its reference follow.

Pure NumPy. A :class:`Piece` is what one forward computed of one request; :func:`plan_frames` cuts
pieces into frames of at most ``MAX_FRAME_TOKENS`` and lays those out one behind the other.
"""

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

_LEAST = np.array([[0], [1], [0], [1]])  # of a piece's row, tokens, first position and total


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
    """

    descriptors: I64Array
    rows: int
    bytes: int

    def __len__(self) -> int:
        return len(self.descriptors)

    @property
    def frame_bytes(self) -> I64Array:
        """Bytes of each frame, int64 ``[F]``."""
        return np.diff(self.descriptors[:, OFFSET], append=self.bytes)

    def check(self, geometry: Geometry) -> None:
        """Raise ValueError unless the frames tile their rows and bytes as ``geometry`` wants it."""
        tokens = self.descriptors[:, TOKENS]
        if len(tokens) and not 1 <= tokens.min() <= tokens.max() <= MAX_FRAME_TOKENS:
            raise ValueError(f"frames of {tokens.min()} to {tokens.max()} tokens: 1 to {MAX_FRAME_TOKENS} are allowed")
        if len(tokens) and self.descriptors[:, ROW].min() < 0:
            raise ValueError(f"a frame begins at row {self.descriptors[:, ROW].min()} of the batch")
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
            plans.append(FramePlan(part, rows, int(ends[end - 1]) - offset))
            first, offset, rows_before = end, int(ends[end - 1]), rows_before + rows
        return plans


def plan_frames(pieces: Sequence[Piece], geometry: Geometry) -> FramePlan:
    """Cut ``pieces`` into frames and lay them out. The frames of a piece are contiguous, in order.

    Raises:
        ValueError: when a piece is no part of a prompt.
    """
    if not pieces:
        return FramePlan(np.empty((0, COLUMNS), np.int64), 0, 0)
    *numbers, serials, keys = zip(*pieces, strict=True)
    columns = np.array(numbers, np.int64)
    rows, tokens, firsts, totals = columns
    wrong = (columns < _LEAST).any(axis=0) | (firsts + tokens > totals) | (totals >= 1 << 31)
    if wrong.any() or any(len(key) != 16 for key in keys):
        raise ValueError(
            f"{pieces[int(wrong.argmax())]}: a piece is at least one row, lies inside its prompt of fewer than 2**31 "
            "tokens and has a key of 16 bytes"
        )
    whole = np.empty((len(pieces), COLUMNS), np.int64)  # the descriptors, were a frame of any length
    whole[:, ROW] = rows
    whole[:, TOKENS] = tokens
    whole[:, POSITIONS] = firsts | totals << 32
    whole[:, SERIAL] = np.array(serials, np.uint64).view(np.int64)
    whole[:, KEY0:] = np.frombuffer(b"".join(keys), "<i8").reshape(-1, 2)
    descriptors = whole if tokens.max() <= MAX_FRAME_TOKENS else _cut(whole)
    places, captured_rows, size = _places(descriptors[:, TOKENS], geometry)
    descriptors[:, ROWS_BEFORE : OFFSET + 1] = places
    return FramePlan(descriptors, captured_rows, size)


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
    extents = np.empty((len(tokens), 2), np.int64)
    extents[:, 0] = tokens
    extents[:, 1] = geometry.frame_bytes(tokens)
    ends = np.zeros((len(tokens) + 1, 2), np.int64)
    np.cumsum(extents, axis=0, out=ends[1:])
    return ends[:-1], int(ends[-1, 0]), int(ends[-1, 1])
