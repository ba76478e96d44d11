"""What the writers were told of passes: which of them knows which pass, and of which no record can come any more."""

import weakref
from collections.abc import Callable
from functools import partial

from hashtap import writer_messages as messages
from hashtap.flight import Record
from hashtap.writer_child import WriterChild

__all__ = ["ToldPasses"]


class ToldPasses:
    """Belongs to the thread that talks to the writers; :meth:`fail` may be called from any.

    Args:
        later: has a step taken by that thread; called when a record is no longer referred to, so it must not wait.
    """

    def __init__(self, later: Callable[[Callable[[], None]], None]) -> None:
        self._later = later
        self._records: weakref.WeakValueDictionary[int, Record] = weakref.WeakValueDictionary()
        self._writers: dict[int, WriterChild] = {}
        self._lost: set[int] = set()  # serials of passes that a writer died with

    def introduce(self, record: Record, writer: WriterChild) -> list[messages.NewPass]:
        """What the writer has to be told of a pass before its next frame: nothing but before the first one."""
        serial = record.serial
        if serial in self._writers:
            return []
        self._writers[serial] = writer
        self._records[serial] = record
        weakref.finalize(record, self._later, partial(self._forget, serial)).atexit = False
        donor = None if record.donor is None else record.donor.serial
        ids = record.token_ids.tobytes()
        return [messages.NewPass(serial, record.key, ids, record.salt, record.shared_tokens, donor)]

    def writer_of(self, record: Record) -> WriterChild | None:
        """The writer that has the first rows of a pass; None before them."""
        return self._writers.get(record.serial)

    def abandon(self, serial: int) -> None:
        """Tell the writer that knows of it, if one does, that a pass will bring no record."""
        if serial in self._writers:
            self._writers[serial].tell(messages.Abandon(serial))

    def is_lost(self, record: Record) -> bool:
        """Whether no record can come of a pass: it failed, a writer died with its first rows, or its donor failed."""
        if record.serial in self._lost or (record.donor is not None and record.donor.failed):
            record.failed = True
        return record.failed

    def lose(self, writer: WriterChild) -> None:
        """A writer died: no record comes of the passes that it knew."""
        serials = [serial for serial, knows in self._writers.items() if knows is writer]
        self._lost.update(serials)
        for serial in serials:
            del self._writers[serial]
            self.fail(serial)

    def fail(self, serial: int) -> None:
        """No record comes of a pass."""
        record = self._records.get(serial)
        if record is not None:
            record.failed = True

    def _forget(self, serial: int) -> None:
        """Nobody speaks of a pass any more, not as a donor either."""
        self._lost.discard(serial)
        writer = self._writers.pop(serial, None)
        if writer is not None:
            writer.forgotten.append(serial)
