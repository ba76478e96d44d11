"""The shards of a writer, one behind the other: one takes frames, while those before it are sealed.

A disk that is full, or on which no file can be made, is waited for, except by whoever waits for the end of all writing.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hashtap.block_file import PASSING
from hashtap.codec import Codec
from hashtap.directory import CaptureDirectory, sync_directory
from hashtap.facts import ShardFacts
from hashtap.flight import Record
from hashtap.frame import Pieces, Table, store_table
from hashtap.header import Header
from hashtap.ledger import Ledger
from hashtap.logs import log
from hashtap.shard import MAX_FRAMES
from hashtap.shard_file import ShardFile

__all__ = ["ShardSequence"]

_OLDEST = 12
"""A shard that goes on getting rows is sealed after so many times ``seal_after_s``: with the defaults, a minute."""
_RETRY_S = 0.5
"""How long to wait before a disk that took nothing is tried again."""


class ShardSequence:
    """Appends stored frames to shards and seals these. Methods may be called from any thread.

    Args:
        directory: where they go.
        facts: what they say about themselves; change it between two shards.
        changed: the writer's lock; it also guards the ledger and the counts.
        ledger: which records the frames complete.
        codec: of the tables.
        table: gives the reference-exponent table of an id that was checked.
        shard_bytes: a shard is full when its frames reach this size.
        seal_after_s: it is old when it has been open for 12 times as long.

    Attributes:
        counts: rows, raw_bytes and stored_bytes of the frames, records and shards sealed, seal_ms, write_errors.
        trouble: why the disk takes nothing at present; empty while it does.
        current: the shard that takes frames; None before its first one.
    """

    def __init__(
        self,
        directory: CaptureDirectory,
        facts: ShardFacts,
        *,
        changed: threading.Condition,
        ledger: Ledger,
        codec: Codec,
        table: Callable[[int], Table],
        shard_bytes: int,
        seal_after_s: float,
    ) -> None:
        self.facts = facts
        self.counts = dict.fromkeys(
            ("records", "rows", "raw_bytes", "stored_bytes", "shards", "seal_ms", "write_errors"), 0
        )
        self.trouble = ""
        self.current: ShardFile | None = None
        self._directory = directory
        self._codec = codec
        self._table = table
        self._shard_bytes = shard_bytes
        self._seal_after_s = seal_after_s
        self._appending = threading.Lock()  # held over disk writes, and always taken before the other one
        self._changed = changed
        self._ledger = ledger
        self._number = 0  # of the next shard
        self._not_ended: deque[ShardFile] = deque()  # the current one is the last of them
        self._told = ""  # what was logged of the disk's trouble
        self._hurries = 0

    def append(self, record: Record, header: Header, pieces: Pieces) -> ShardFile | None:
        """Put a stored frame behind the last one; a frame of a failed record is left out.

        Returns the shard where it takes no more: :meth:`end` it when the frame's memory is given back. What the disk
        does not take fails its record.
        """
        with self._appending:
            shard, ends = self._append(record, header, pieces)
        if shard is not None:
            shard.write_out()
        return shard if ends else None

    def flush(self, shard: ShardFile) -> None:
        """Write what is buffered of the open shard: then the end of this process does not lose it."""
        with self._appending:
            try:
                shard.flush()
                return
            except OSError:
                with self._changed:
                    if self.current is not shard:
                        return
                    self.current = None
        self.end(shard)

    def take_current(self) -> ShardFile | None:
        """Take the open shard away, to :meth:`end` it."""
        with self._changed:
            shard, self.current = self.current, None
            return shard

    def end(self, shard: ShardFile) -> None:
        """Seal a shard, or remove it when nothing in it is of use. Shards end in the order of their opening."""
        with self._changed:
            self._changed.wait_for(lambda: self._not_ended[0] is shard)
            self._ledger.take_abandoned()
            listed = self._ledger.shard_ends(shard.number)
        sealed: list[Record] | None = None
        whole = True
        try:
            try:
                shard.flush()
            except OSError as error:
                whole = False
                with self._changed:
                    self._disk_failed(f"cannot write to {shard.path}", error)
                    self._ledger.lose(shard.give_way(len(listed)), listed)
            try:
                sealed = self._seal(shard, listed)
            except OSError as error:
                if error.errno not in PASSING:
                    raise
                with self._changed:
                    self._disk_failed(f"cannot seal {shard.path}", error)
                    self._ledger.lose(shard.give_way(len(listed)), listed)
                sealed = self._seal(shard, listed)
        except Exception as error:
            shard.discard()
            with self._changed:
                self._disk_failed(f"cannot seal {shard.path}", error)
                self._ledger.lose(shard.serials, listed)
        with self._changed:
            if sealed is not None:
                if whole and self.trouble:
                    log.warning("%s can be written to again", self._directory.path)
                    self.trouble = self._told = ""
                self.counts["shards"] += 1
                self.counts["records"] += len(sealed)
            self._not_ended.popleft()
            self._changed.notify_all()

    def wait_for_ends(self) -> None:
        """Wait until all shards but the open one are sealed or gone."""
        with self._changed:
            self._changed.wait_for(lambda: all(shard is self.current for shard in self._not_ended))

    @contextmanager
    def hurry(self) -> Iterator[None]:
        """Meanwhile a disk is not waited for: what it does not take is lost."""
        with self._changed:
            self._hurries += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._hurries -= 1

    def _append(self, record: Record, header: Header, pieces: Pieces) -> tuple[ShardFile | None, bool]:
        """Returns the shard that the frame went to, and whether it was taken away to be ended now."""
        if record.failed:
            return None, False
        try:
            # Nobody else takes the shard away: that needs all flights to be released, and this frame's is not.
            shard = self.current or self._open()
            if header.table and header.table not in shard.tables:
                table, table_pieces = store_table(self._table(header.table), header.geometry, self._codec)
                shard.append(table, table_pieces)
                with self._changed:
                    self.counts["stored_bytes"] += table.stored_bytes
            shard.append(header, pieces)
        except OSError as error:
            with self._changed:
                if self.current is None:
                    self._disk_failed(f"cannot write to {self._directory.path}", error)
                self._ledger.fail(record)
                return self.take_current(), True
        with self._changed:
            self.counts["rows"] += header.tokens
            self.counts["raw_bytes"] += header.tokens * header.geometry.row_bytes
            self.counts["stored_bytes"] += header.stored_bytes
            self._ledger.stored(record, header, shard.number)
            full = shard.frames_bytes >= self._shard_bytes or shard.frames >= MAX_FRAMES - 1
            old = shard.appended_at - shard.opened_at >= _OLDEST * self._seal_after_s
            if full or old:
                self.current = None
            return shard, full or old

    def _open(self) -> ShardFile:
        while True:
            try:
                self._directory.check_there()
                shard = ShardFile(self._directory, self.facts, self._number, self._wait_for_disk)
                break
            except FileExistsError as error:
                log.warning("%s; the next name is taken", error)
                self._number += 1
            except OSError as error:
                if not self._wait_for_disk(error):
                    raise
        with self._changed:
            self.current = shard
            self._not_ended.append(shard)
            self._ledger.shard_opened(shard.number)
            self._number += 1
        return shard

    def _seal(self, shard: ShardFile, listed: list[Record]) -> list[Record] | None:
        """Seal a shard with those of ``listed`` that did not fail, and return them; None when it was discarded."""
        with self._changed:
            # A record fails after it was listed when an earlier shard with frames of it could not be sealed.
            records = [record for record in listed if not record.failed]
            useful = bool(records) or self._ledger.useful(shard.serials)
        if not useful:
            shard.discard()
            return None
        began = time.monotonic()
        file_bytes = shard.seal([record.row(shard.facts.seed) for record in records])
        try:
            sync_directory(shard.path.parent)
        except OSError as error:  # somebody may count on it by now, so it stays
            with self._changed:
                self.counts["write_errors"] += 1
            log.error("%s is sealed, but a power cut may lose it: cannot sync its directory: %s", shard.path, error)
        now = time.monotonic()
        seal_ms, took_s = round(1000 * (now - began)), max(now - shard.opened_at, 1e-3)
        with self._changed:
            self.counts["seal_ms"] += seal_ms
        log.info(
            "sealed %s: %d records, %d rows, ratio %.3f, %.1f MB/s, %d ms to seal",
            *(shard.path, len(records), shard.rows, shard.raw_bytes / file_bytes, shard.raw_bytes / took_s / 1e6),
            seal_ms,
        )
        return records

    def _wait_for_disk(self, error: OSError) -> bool:
        """A disk took nothing: wait a moment, so that it is tried again; False when there is no time to."""
        with self._changed:
            if self._hurries:
                return False
            what = f"cannot write to {self._directory.path}, and what is captured waits"
            self._disk_failed(what, error, "New prompts wait for the ring, then are dropped, until this is mended")
            self._changed.wait_for(lambda: self._hurries, _RETRY_S)
            return True

    def _disk_failed(
        self, what: str, error: Exception, then: str = "Prompts are lost until this is mended; extract them again"
    ) -> None:
        self.counts["write_errors"] += 1
        self.trouble = getattr(error, "strerror", None) or str(error)
        if self._told != then:
            self._told = then
            log.error("%s: %s. %s", what, error, then)
