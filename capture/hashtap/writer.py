"""Turns the frames of forwards into sealed shards, on threads of its own.

A flight (the frames of one forward) is waited for and checked, then its frames are compressed in parallel and appended
under one lock. A record is complete when its frames cover its prompt; it is listed in the shard that its last frame
went to. Nothing here raises into the server: what cannot be stored is counted, logged and never listed. A disk that is
full, or on which no file can be made, is waited for: the ring fills up, and new prompts wait or are dropped.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import Finalize
from typing import Literal

import numpy as np
import numpy.typing as npt

from hashtap.arrival import OtherTokens, check_arrival
from hashtap.block_file import FULL
from hashtap.codec import Codec
from hashtap.directory import CaptureDirectory
from hashtap.errors import FormatError
from hashtap.facts import ShardFacts
from hashtap.flight import Flight, Record
from hashtap.frame import Pieces, Table, store_frame, store_table
from hashtap.header import Header, salt_sum
from hashtap.ledger import Ledger
from hashtap.logs import log
from hashtap.shard import MAX_FRAMES
from hashtap.shard_file import ShardFile
from hashtap_kernels.layout import HEADER_BYTES, Payload

__all__ = ["COUNTS", "Flight", "Record", "Writer"]

_COUNTS = (
    *("records", "rows", "raw_bytes", "stored_bytes", "shards", "seal_ms"),
    *("failed_proofs", "bad_frames", "write_errors"),
)
COUNTS = (*_COUNTS, "duplicates", "waste_bytes", "queue")
"""The names of :meth:`Writer.counters`."""

_OLDEST = 12
"""A shard that goes on getting rows is sealed after so many times ``seal_after_s``: with the defaults, a minute."""
_RETRY_S = 0.5
"""How long to wait before a disk that took nothing is tried again."""

U8Array = npt.NDArray[np.uint8]


@dataclass(slots=True)
class _Landed:
    """A flight whose bytes are there, with the frames of it that are still to be stored."""

    flight: Flight
    number: int
    frames_left: int


class Writer:
    """Writes the shards of one rank. Every method may be called from any thread.

    Args:
        directory: where the shards go.
        facts: what they say about themselves.
        threads: how many compress and write.
        codec: ``"zstd"`` or ``"none"``.
        shard_bytes: a shard is sealed when its frames reach this size.
        seal_after_s: … or when so long no row was added, or it has been open for 12 times as long.
        observe: is given the values uint16 ``[n, L, H]`` of each RAW frame of a two-byte type, to make a table from.
        tables: gives the reference-exponent table of an id; KeyError when there is none.
        failed: is told of each record of which nothing comes; it must not wait.
    """

    def __init__(
        self,
        directory: CaptureDirectory,
        facts: ShardFacts,
        *,
        threads: int,
        codec: Literal["zstd", "none"],
        shard_bytes: int,
        seal_after_s: float,
        observe: Callable[[npt.NDArray[np.uint16]], None] | None = None,
        tables: Callable[[int], Table],
        failed: Callable[[Record], None] = lambda _: None,
    ) -> None:
        self._directory = directory
        self._facts = facts
        self._codec = Codec.ZSTD if codec == "zstd" else Codec.STORED
        self._shard_bytes = shard_bytes
        self._seal_after_s = seal_after_s
        self._observe = observe
        self._has_planes = facts.geometry.dtype.element_bytes == 2
        self._tables = tables
        self._pid = os.getpid()

        # Held over disk writes, so never by submit(), which the server's scheduler calls.
        self._appending = threading.Lock()
        # One lock guards all that follows, held for moments only. Threads that look for work wait apart from the rest:
        # each flight and each frame wakes one of them, not all.
        lock = threading.RLock()
        self._changed, self._work = threading.Condition(lock), threading.Condition(lock)
        self._flights: deque[tuple[int, Flight]] = deque()
        self._frames: deque[tuple[_Landed, U8Array, Header, Record]] = deque()
        self._outstanding: set[int] = set()  # numbers of the flights that are not released yet
        self._submitted = 0
        self._shard: ShardFile | None = None
        self._shards_opened = 0
        self._shards_ended = 0
        self._trouble = self._told = ""  # with the disk, and what was logged of it
        self._drains = 0  # calls that wait for the end of all writing: a disk is not waited for then
        self._closing = False
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._ledger = Ledger(failed)
        self._threads = [
            threading.Thread(target=self._run, name=f"hashtap-writer-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()
        # Unlike atexit this also runs at the end of a process that multiprocessing started.
        self._at_exit = Finalize(None, self.close, exitpriority=10)

    def submit(self, flight: Flight) -> None:
        """Hand over a flight. Never blocks, never raises; a closed writer releases it unwritten."""
        with self._changed:
            if not self._closing:
                self._submitted += 1
                self._outstanding.add(self._submitted)
                self._flights.append((self._submitted, flight))
                self._work.notify()
                return
        log.error("a forward was captured after the writer was closed: it is not stored")
        flight.release()

    def abandon(self, serial: int) -> None:
        """The pass will bring no more frames and no record: forget it. Safe in a finalizer."""
        self._ledger.abandon(serial)

    def drain(self) -> None:
        """Wait until all that was submitted is written and sealed; what a full disk does not take now is lost."""
        with self._changed:
            self._drains += 1
            self._changed.notify_all()
            while self._outstanding:
                self._changed.wait()
            shard = self._detach()
        if shard is not None:
            self._end(shard)
        with self._changed:
            while self._shards_ended < self._shards_opened - (self._shard is not None):
                self._changed.wait()
            self._drains -= 1

    def set_facts(self, facts: ShardFacts) -> None:
        """The weights changed: say so in new shards. Call it after :meth:`drain`; no record goes across."""
        with self._changed:
            self._ledger.close_epoch()
            self._facts = facts

    def close(self) -> None:
        """Write and seal all that was submitted, then stop. Later calls do nothing, nor does one in a forked child."""
        if os.getpid() != self._pid:
            return
        self._at_exit.cancel()
        self.drain()
        with self._changed:
            self._closing = True
            self._work.notify_all()
        for thread in self._threads:
            thread.join()

    def counters(self) -> dict[str, int]:
        """Counts since the start, and ``queue``: the forwards that are not written yet.

        ``records`` are sealed ones; ``rows``, ``raw_bytes`` and ``stored_bytes`` are of the frames written,
        ``waste_bytes`` of those among them that belong to no record, ``seal_ms`` the time that sealing took.
        """
        with self._changed:
            ledger = self._ledger
            return {
                **self._counts,
                "bad_frames": self._counts["bad_frames"] + ledger.doubled,
                "duplicates": ledger.duplicates,
                "waste_bytes": ledger.waste_bytes,
                "queue": len(self._outstanding),
            }

    @property
    def trouble(self) -> str:
        """Why the disk takes nothing at present; empty while it does."""
        return self._trouble

    # The loop of a thread.

    def _run(self) -> None:
        while (work := self._next_work()) is not None:
            work()

    def _next_work(self) -> Callable[[], None] | None:
        """What to do next, waiting for it; None at the end."""
        with self._changed:
            while True:
                self._ledger.take_abandoned(self._submitted, self._outstanding)
                if self._frames:
                    return partial(self._store, *self._frames.popleft())
                if self._flights:
                    return partial(self._land, *self._flights.popleft())
                if self._closing:
                    return None
                left_s = None
                if self._shard is not None and not self._outstanding:
                    if self._shard.dirty:
                        return partial(self._flush, self._shard)
                    left_s = self._shard.appended_at + self._seal_after_s - time.monotonic()
                    if left_s <= 0:
                        shard, self._shard = self._shard, None
                        return partial(self._end, shard)
                self._work.wait(left_s)

    def _land(self, number: int, flight: Flight) -> None:
        """Wait for a flight's bytes and check its frames, then offer them to all threads."""
        frames: list[tuple[int, int, Record]] = []
        try:
            frames += flight.frames
            flight.wait()
        except Exception:
            log.exception("the frames of a forward did not arrive: its %d frames are not stored", len(frames))
            with self._changed:
                self._counts["bad_frames"] += len(frames)
                for _, _, record in frames:
                    self._ledger.fail(record)
            frames = []
        # One behind the other: between two compressions the interpreter's own code is no longer in the core's cache.
        checked = [
            (flight.buffer[offset : offset + size], header, record)
            for offset, size, record in frames
            if (header := self._check(flight.buffer[offset : offset + size], record)) is not None
        ]
        landed = _Landed(flight, number, len(checked))
        if not checked:
            self._release(landed)
            return
        with self._changed:
            self._frames.extend((landed, *each) for each in checked)
            self._work.notify(len(checked) - 1)  # this thread takes one

    def _check(self, frame: U8Array, record: Record) -> Header | None:
        """Check a frame that came; returns its header, None when it is not to be stored."""
        if not record.failed:
            with self._refusing(record):
                return check_arrival(frame, record, self._facts, self._table)
        return None

    def _store(self, landed: _Landed, frame: U8Array, header: Header, record: Record) -> None:
        """Compress and append one frame that was checked."""
        shard: ShardFile | None = None
        full = False
        if not record.failed:
            with self._refusing(record):
                if self._observe is not None and header.payload is Payload.RAW and self._has_planes:
                    values = frame[HEADER_BYTES : HEADER_BYTES + header.tokens * header.geometry.row_bytes]
                    self._observe(values.view(np.uint16).reshape(header.tokens, header.geometry.layers, -1))
                ids = record.token_ids[header.first_position : header.first_position + header.tokens]
                stored, pieces = store_frame(frame, header, ids, salt_sum(record.salt), self._codec)
                with self._appending:
                    shard, full = self._append(record, stored, pieces)
                if shard is not None:
                    shard.write_out()
        with self._changed:
            landed.frames_left -= 1
            last = landed.frames_left == 0
        if last:
            self._release(landed)
        if shard is not None and full:
            self._end(shard)

    @contextmanager
    def _refusing(self, record: Record) -> Iterator[None]:
        """What goes wrong with one frame ends its record, and nothing else."""
        try:
            yield
        except OtherTokens as error:
            self._refuse(record, "failed_proofs", str(error))
        except FormatError as error:
            self._refuse(record, "bad_frames", str(error))
        except Exception as error:
            log.exception("a frame could not be stored")
            self._refuse(record, "bad_frames", repr(error))

    def _release(self, landed: _Landed) -> None:
        try:
            landed.flight.release()
        except Exception:
            log.exception("the memory of a forward could not be given back")
        with self._changed:
            self._outstanding.discard(landed.number)
            self._changed.notify_all()

    # Frames.

    def _table(self, identity: int) -> Table:
        try:
            return self._tables(identity)
        except KeyError:
            raise FormatError(f"a frame names the table {identity:016x}, which nobody made") from None

    def _refuse(self, record: Record, count: str, reason: str) -> None:
        with self._changed:
            if not record.failed or count != "failed_proofs":
                self._counts[count] += 1
            self._ledger.fail(record)
        log.error("the prompt %s is not stored: %s", record.key.hex(), reason)

    def _append(self, record: Record, header: Header, pieces: Pieces) -> tuple[ShardFile | None, bool]:
        """Append a stored frame; returns the shard, and whether it has to be ended now. Called under ``_appending``."""
        if record.failed:
            return None, False
        try:
            # Nobody else takes the shard away: that needs all flights to be released, and this one is not.
            shard = self._shard or self._open_shard()
            if header.table and header.table not in shard.tables:
                table, table_pieces = store_table(self._table(header.table), header.geometry, self._codec)
                shard.append(table, table_pieces)
                with self._changed:
                    self._counts["stored_bytes"] += table.stored_bytes
            shard.append(header, pieces)
        except OSError as error:
            with self._changed:
                if self._shard is None:
                    self._disk_failed(f"cannot write to {self._directory.path}", error)
                self._ledger.fail(record)
                return self._detach(), True
        with self._changed:
            self._counts["rows"] += header.tokens
            self._counts["raw_bytes"] += header.tokens * header.geometry.row_bytes
            self._counts["stored_bytes"] += header.stored_bytes
            self._ledger.stored(record, header, shard.number)
            full = shard.frames_bytes >= self._shard_bytes or shard.frames >= MAX_FRAMES - 1
            old = shard.appended_at - shard.opened_at >= _OLDEST * self._seal_after_s
            if full or old:
                self._detach()
            return shard, full or old

    def _flush(self, shard: ShardFile) -> None:
        """Write what is buffered, now that there is time: then the end of this process does not lose it."""
        with self._appending:
            try:
                shard.flush()
                return
            except OSError:
                with self._changed:
                    if self._shard is not shard:
                        return
                    self._detach()
        self._end(shard)

    # Shards.

    def _open_shard(self) -> ShardFile:
        while True:
            try:
                shard = ShardFile(self._directory, self._facts, self._shards_opened, self._wait_for_disk)
                break
            except FileExistsError:
                raise
            except OSError as error:
                if not self._wait_for_disk(error):
                    raise
        with self._changed:
            self._shard = shard
            self._ledger.shard_opened(shard.number)
            self._shards_opened += 1
        return shard

    def _detach(self) -> ShardFile | None:
        """Take the open shard, to end it without the lock."""
        shard, self._shard = self._shard, None
        return shard

    def _end(self, shard: ShardFile) -> None:
        """Seal a shard, or remove it when nothing in it is of use. Shards end in the order of their opening."""
        with self._changed:
            while self._shards_ended != shard.number:
                self._changed.wait()
            self._ledger.take_abandoned(self._submitted, self._outstanding)
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
                    self._ledger.lose(shard.give_way(), listed)
            try:
                sealed = self._seal(shard, listed)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                with self._changed:
                    self._disk_failed(f"cannot seal {shard.path}", error)
                    self._ledger.lose(shard.give_way(), listed)
                sealed = self._seal(shard, listed)
        except Exception as error:
            shard.discard()
            with self._changed:
                self._disk_failed(f"cannot seal {shard.path}", error)
                self._ledger.lose(shard.serials, listed)
        with self._changed:
            if sealed is not None:
                if whole and self._trouble:
                    log.warning("%s can be written to again", self._directory.path)
                    self._trouble = self._told = ""
                self._counts["shards"] += 1
                self._counts["records"] += len(sealed)
            self._shards_ended += 1
            self._changed.notify_all()

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
        now = time.monotonic()
        seal_ms, took_s = round(1000 * (now - began)), max(now - shard.opened_at, 1e-3)
        with self._changed:
            self._counts["seal_ms"] += seal_ms
        log.info(
            "sealed %s: %d records, %d rows, ratio %.3f, %.1f MB/s, %d ms to seal",
            *(shard.path, len(records), shard.rows, shard.raw_bytes / file_bytes, shard.raw_bytes / took_s / 1e6),
            seal_ms,
        )
        return records

    def _wait_for_disk(self, error: OSError) -> bool:
        """A disk took nothing: wait a moment, so that it is tried again; False when there is no time to."""
        with self._changed:
            if self._drains:
                return False
            what = f"cannot write to {self._directory.path}, and what is captured waits"
            self._disk_failed(what, error, "New prompts wait for the ring, then are dropped, until this is mended")
            self._changed.wait_for(lambda: self._drains, _RETRY_S)
            return True

    def _disk_failed(
        self, what: str, error: Exception, then: str = "Prompts are lost until this is mended; extract them again"
    ) -> None:
        self._counts["write_errors"] += 1
        self._trouble = getattr(error, "strerror", None) or str(error)
        if self._told != then:
            self._told = then
            log.error("%s: %s. %s", what, error, then)
