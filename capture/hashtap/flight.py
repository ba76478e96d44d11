"""What the writer is handed: the frames of one forward, and the records that they belong to."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hashtap.header import Header, salt_sum
from hashtap.shard import record_row
from hashtap_kernels.proof import add_proofs, prompt_proof

__all__ = ["Flight", "Record"]


@dataclass(slots=True, weakref_slot=True)
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
        shared_tokens: k, so many rows at its beginning are those of ``donor``; its own frames begin there.
        donor: a record with the same first k tokens.
    """

    serial: int
    key: bytes
    token_ids: npt.NDArray[np.int64]
    salt: bytes = b""
    captured: bool = False
    shared_tokens: int = 0
    donor: "Record | None" = None
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
        """Whether as many rows came as the prompt has tokens, the shared ones aside."""
        return self._rows >= len(self.token_ids) - self.shared_tokens

    def tiles(self) -> bool:
        """Whether the frames cover the prompt from the shared rows on, without gap or overlap."""
        position = self.shared_tokens
        for first, tokens in sorted(self._first_positions.items()):
            if first != position:
                return False
            position += tokens
        return position == self._rows + self.shared_tokens == len(self.token_ids)

    def row(self, seed: tuple[int, int]) -> tuple[int, ...]:
        """Its row in the ``records`` of a shard whose proofs have this seed."""
        proof, donor_key = self.proof, b""
        if self.donor is not None:
            donor_key = self.donor.key
            proof = add_proofs(proof, prompt_proof(self.token_ids[: self.shared_tokens], 0, seed))
        return record_row(
            self.key,
            self.serial,
            len(self.token_ids),
            proof,
            salt_sum(self.salt),
            shared_tokens=self.shared_tokens,
            donor_key=donor_key,
        )


@dataclass(frozen=True, slots=True)
class Flight:
    """The frames of one forward, on their way.

    Attributes:
        buffer: uint8, the bytes of the frames once they are there.
        wait: returns when they are there.
        frames: ``(offset, frame_bytes, record)`` of each frame; read off the scheduler's thread, once.
        release: called exactly once, when ``buffer`` is not needed any more.
    """

    buffer: npt.NDArray[np.uint8]
    wait: Callable[[], None]
    frames: Iterable[tuple[int, int, Record]]
    release: Callable[[], None]
