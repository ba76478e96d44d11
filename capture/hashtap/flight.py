"""What the writer is handed: the frames of one forward, and the records that they belong to."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hashtap.header import Header, salt_sum
from hashtap.shard import record_row
from hashtap_kernels.proof import add_proofs

__all__ = ["Flight", "Record"]


@dataclass(slots=True)
class Record:
    """One pass of one request: what its frames must turn out to be. The writer keeps its progress on it.

    Attributes:
        serial: the number of the pass, unique in the process.
        key: the prompt's key, 16 bytes.
        token_ids: the request's own prompt, int64 ``[T]``.
        salt: what went into the key besides.
        stored_bytes: of its frames that were written.
        proof: of these.
        failed: whether no record will come of it.
        captured: whether all its rows were taken, so that it no longer ends with its request.
    """

    serial: int
    key: bytes
    token_ids: npt.NDArray[np.int64]
    salt: bytes = b""
    captured: bool = False
    _first_positions: dict[int, int] = field(init=False, repr=False, default_factory=dict)  # to tokens, of each frame
    _rows: int = field(init=False, repr=False, default=0)
    stored_bytes: int = field(init=False, repr=False, default=0)
    proof: tuple[int, int] = field(init=False, repr=False, default=(0, 0))
    failed: bool = field(init=False, repr=False, default=False)

    def take(self, header: Header) -> None:
        """A stored frame of it was written."""
        self._first_positions[header.first_position] = header.tokens
        self._rows += header.tokens
        self.stored_bytes += header.stored_bytes
        self.proof = add_proofs(self.proof, header.proof)

    def all_rows(self) -> bool:
        """Whether as many rows came as the prompt has tokens."""
        return self._rows >= len(self.token_ids)

    def tiles(self) -> bool:
        """Whether the frames cover the prompt without gap or overlap."""
        position = 0
        for first, tokens in sorted(self._first_positions.items()):
            if first != position:
                return False
            position += tokens
        return position == self._rows == len(self.token_ids)

    def row(self) -> tuple[int, ...]:
        """Its row in the shard's ``records``."""
        return record_row(self.key, self.serial, len(self.token_ids), self.proof, salt_sum(self.salt))


@dataclass(frozen=True, slots=True)
class Flight:
    """The frames of one forward, on their way.

    Attributes:
        buffer: uint8, the bytes of the frames once they are there.
        wait: returns when they are there.
        frames: ``(offset, frame_bytes, record)`` of each frame; read on a writer thread, once.
        release: called exactly once, when ``buffer`` is not needed any more.
    """

    buffer: npt.NDArray[np.uint8]
    wait: Callable[[], None]
    frames: Iterable[tuple[int, int, Record]]
    release: Callable[[], None]
