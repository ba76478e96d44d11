"""Which flights are under way, and which records open, complete, failed or abandoned: the writer's bookkeeping.

Not thread safe: the writer holds its lock around every call but :meth:`Ledger.abandon`.
"""

from collections import deque
from collections.abc import Callable

from hashtap.flight import Record
from hashtap.header import Header
from hashtap.logs import log
from hashtap.shard import MAX_FRAMES

__all__ = ["Ledger"]


class Ledger:
    """The records of one writing run.

    Args:
        failed: is told of each record of which nothing comes.

    Attributes:
        flights: numbers of those that are not released yet.
        duplicates: complete records whose key was listed already.
        doubled: records of which rows came twice.
        waste_bytes: stored bytes of frames that will belong to no record.
    """

    def __init__(self, failed: Callable[[Record], None] = lambda _: None) -> None:
        self._failed = failed
        self.flights: set[int] = set()
        self.duplicates = 0
        self.doubled = 0
        self.waste_bytes = 0
        self._submitted = 0  # number of the last flight
        self._open: dict[int, Record] = {}  # by serial: some frames stored, but not all
        self._keys: set[bytes] = set()  # of the records listed in this epoch
        self._listed: dict[int, list[Record]] = {}  # by the number of a shard that is not ended
        self._waiting: dict[bytes, list[Record]] = {}  # by the key of the donor that is not listed yet
        # A finalizer may call abandon() in the middle of anything: it only appends here, which takes no lock.
        self._abandoned_news: deque[int] = deque()
        self._abandoned: dict[int, int] = {}  # serial to the flights submitted before

    def __len__(self) -> int:
        """Passes that are remembered although no shard lists them: open ones and abandoned ones."""
        return len(self._open) + len(self._abandoned)

    def submit(self) -> int:
        """A flight is under way from now on; returns its number."""
        self._submitted += 1
        self.flights.add(self._submitted)
        return self._submitted

    def release(self, flight: int) -> None:
        """All frames of a flight are stored or given up."""
        self.flights.remove(flight)

    def abandon(self, serial: int) -> None:
        """The pass will bring no more frames. Safe in a finalizer, without a lock."""
        self._abandoned_news.append(serial)

    def take_abandoned(self) -> None:
        """Fail the abandoned passes. Each is remembered as long as frames of it may be under way."""
        while self._abandoned_news:
            self._abandoned[self._abandoned_news.popleft()] = self._submitted
        if not self._abandoned:
            return
        oldest = min(self.flights, default=self._submitted + 1)
        for serial, before in list(self._abandoned.items()):
            record = self._open.get(serial)
            if record is not None:
                self.fail(record)
            if before < oldest:
                del self._abandoned[serial]

    def shard_opened(self, number: int) -> None:
        """Records may be listed in this shard from now on."""
        self._listed[number] = []

    def stored(self, record: Record, header: Header, number: int) -> None:
        """A frame of ``record`` was appended to the open shard ``number``; the record may be complete now."""
        record.take(header)
        if record.failed:  # while its frame was written
            self.waste_bytes += header.stored_bytes
            return
        self._open[record.serial] = record
        if not record.all_rows():
            return
        if not record.tiles():
            log.error("the prompt %s is not stored: some of its rows came twice", record.key.hex())
            self.doubled += 1
            self.fail(record)
        else:
            self._complete(record, number)

    def _complete(self, record: Record, number: int) -> None:
        """All rows of its own are stored: list it, now or when its donor is listed."""
        donor = record.donor
        if record.failed:
            return
        if record.key in self._keys:
            self.duplicates += 1
            self.fail(record)
        elif len(self._listed[number]) == MAX_FRAMES:
            log.error("the prompt %s is not stored: its shard lists as many as a reader takes", record.key.hex())
            self.fail(record)
        elif donor is None or donor.key in self._keys:
            del self._open[record.serial]
            self._keys.add(record.key)
            self._listed[number].append(record)
            for sharing in self._waiting.pop(record.key, ()):
                self._complete(sharing, number)
        elif donor.failed:
            self.fail(record)
        else:
            self._waiting.setdefault(donor.key, []).append(record)

    def fail(self, record: Record) -> None:
        """No record comes of it or of those that wait for it: their frames are waste, and later ones are dropped."""
        if not record.failed:
            record.failed = True
            self._failed(record)
            self.waste_bytes += record.stored_bytes
            self._open.pop(record.serial, None)
            waiting = self._waiting.pop(record.key, [])
            if others := [sharing for sharing in waiting if sharing.donor is not record]:
                self._waiting[record.key] = others
            for sharing in waiting:
                if sharing.donor is record:
                    self.fail(sharing)

    def close_epoch(self) -> None:
        """The weights change: no record goes on, and a key may come again."""
        for record in list(self._open.values()):
            self.fail(record)
        self._keys.clear()

    def shard_ends(self, number: int) -> list[Record]:
        """The records listed in a shard, which now ends."""
        return self._listed.pop(number)

    def useful(self, serials: set[int]) -> bool:
        """Whether a shard with frames of these passes, but no record, is of use to one that is open or listed later."""
        later = {record.serial for record in self._later() if not record.failed}
        return not serials.isdisjoint(self._open.keys() | later)

    def lose(self, serials: set[int], listed: list[Record]) -> None:
        """Frames of these passes are gone: so are their records, those of ``listed``, open ones and later ones.

        And so are those that share rows with them, which end up in the same shard or in a later one.
        """
        known = [*listed, *self._open.values(), *self._later()]
        lost = [record for record in known if record.serial in serials]
        while lost:
            for record in lost:
                self.fail(record)
                self._keys.discard(record.key)
            lost = [record for record in known if not record.failed and record.donor and record.donor.failed]

    def _later(self) -> list[Record]:
        return [record for listed in self._listed.values() for record in listed]
