"""What a server and one of its writer processes tell each other over a pipe, pickled."""

from typing import Literal, NamedTuple

from hashtap.frame import Table

__all__ = [
    "Abandon",
    "Close",
    "Done",
    "Drain",
    "Failed",
    "Forward",
    "Log",
    "NewPass",
    "NewTable",
    "Ready",
    "Released",
    "SetFacts",
    "Start",
    "State",
]


# From the server.


class Start(NamedTuple):
    """The first message: what to write and how, see :class:`hashtap.writer.Writer`; the ring comes as a descriptor.

    ``facts`` are their metadata: among the values of a server there are types that would load all of torch.
    """

    facts: dict[str, str]
    writer: str
    directory: str
    ring_descriptor: int
    ring_bytes: int
    threads: int
    codec: Literal["zstd", "none"]
    shard_bytes: int
    seal_after_s: float
    table: Table | None


class NewPass(NamedTuple):
    """A pass whose first frame comes: a :class:`hashtap.flight.Record`, ids as bytes int64, donor by its serial."""

    serial: int
    key: bytes
    token_ids: bytes
    salt: bytes
    shared_tokens: int
    donor: int | None


class Forward(NamedTuple):
    """Frames of one forward, there to be read.

    Attributes:
        number: of the forward.
        passes: those that had no frame before.
        frames: ``(offset in the ring, frame_bytes, serial)`` of each.
        forgotten: serials of which nothing will be said any more, not as a donor either.
    """

    number: int
    passes: list[NewPass]
    frames: list[tuple[int, int, int]]
    forgotten: list[int]


class Abandon(NamedTuple):
    """A pass will bring no more frames and no record."""

    serial: int


class SetFacts(NamedTuple):
    """New shards say this, as metadata. Follows a drain."""

    facts: dict[str, str]


class Drain(NamedTuple):
    """Seal all, then say so."""


class Close(NamedTuple):
    """Seal all, say so and end."""


# Both ways.


class NewTable(NamedTuple):
    """The table that frames may name from now on, uint8 ``[L, H]``."""

    table: Table


# From the writer process.


class Ready(NamedTuple):
    """It listens."""


class Released(NamedTuple):
    """The bytes of a forward are not needed any more."""

    number: int


class Failed(NamedTuple):
    """No record comes of this pass."""

    serial: int


class State(NamedTuple):
    """The counters now, and what is wrong with the disk, see :class:`hashtap.writer.Writer`."""

    counters: dict[str, int]
    trouble: str


class Done(NamedTuple):
    """What was asked for by ``Drain`` or ``Close`` is done; follows the state."""


class Log(NamedTuple):
    """A line for the server's log."""

    level: int
    text: str
