"""Turns the frames of forwards into sealed shards, on threads of its own.

A flight (the frames of one forward) is waited for and checked, then its frames are compressed in parallel and appended
under one lock. A record is complete when its frames cover its prompt; it is listed in the shard that its last frame
went to, or that of the donor that it waits for. Nothing here raises into the server: what cannot be stored is counted,
logged and never listed.
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
from hashtap.codec import Codec
from hashtap.directory import CaptureDirectory
from hashtap.errors import FormatError
from hashtap.facts import ShardFacts
from hashtap.flight import Flight, Record
from hashtap.frame import Table, store_frame
from hashtap.header import Header, salt_sum
from hashtap.ledger import Ledger
from hashtap.logs import log
from hashtap.shard_sequence import ShardSequence
from hashtap_kernels.layout import HEADER_BYTES, Payload

__all__ = ["COUNTS", "Flight", "Record", "Writer"]

COUNTS = (
    *("records", "rows", "raw_bytes", "stored_bytes", "shards", "seal_ms", "write_errors"),
    *("failed_proofs", "bad_frames", "duplicates", "waste_bytes", "queue"),
)
"""The names of :meth:`Writer.counters`."""

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
        self._facts = facts
        self._codec = Codec.ZSTD if codec == "zstd" else Codec.STORED
        self._seal_after_s = seal_after_s
        self._observe = observe
        self._has_planes = facts.geometry.dtype.element_bytes == 2
        self._tables = tables
        self._pid = os.getpid()

        # One lock guards all that follows, held for moments only, never over a disk write: submit() takes it. Threads
        # that look for work wait apart from the rest: each flight and each frame wakes one of them, not all.
        lock = threading.RLock()
        self._changed, self._work = threading.Condition(lock), threading.Condition(lock)
        self._flights: deque[tuple[int, Flight]] = deque()
        self._frames: deque[tuple[_Landed, U8Array, Header, Record]] = deque()
        self._closing = False
        self._counts = dict.fromkeys(("failed_proofs", "bad_frames"), 0)
        self._ledger = Ledger(failed)
        self._shards = ShardSequence(
            directory,
            facts,
            changed=self._changed,
            ledger=self._ledger,
            codec=self._codec,
            table=self._table,
            shard_bytes=shard_bytes,
            seal_after_s=seal_after_s,
        )
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
                self._flights.append((self._ledger.submit(), flight))
                self._work.notify()
                return
        log.error("a forward was captured after the writer was closed: it is not stored")
        flight.release()

    def abandon(self, serial: int) -> None:
        """The pass will bring no more frames and no record: forget it. Safe in a finalizer."""
        self._ledger.abandon(serial)

    def drain(self) -> None:
        """Wait until all that was submitted is written and sealed; what a full disk does not take now is lost."""
        with self._shards.hurry():
            with self._changed:
                self._changed.wait_for(lambda: not self._ledger.flights)
                shard = self._shards.take_current()
            if shard is not None:
                self._shards.end(shard)
            self._shards.wait_for_ends()

    def set_facts(self, facts: ShardFacts) -> None:
        """The weights changed: say so in new shards. Call it after :meth:`drain`; no record goes across."""
        with self._changed:
            self._ledger.close_epoch()
            self._facts = self._shards.facts = facts

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
                **self._shards.counts,
                **self._counts,
                "bad_frames": self._counts["bad_frames"] + ledger.doubled,
                "duplicates": ledger.duplicates,
                "waste_bytes": ledger.waste_bytes,
                "queue": len(ledger.flights),
            }

    @property
    def trouble(self) -> str:
        """Why the disk takes nothing at present; empty while it does."""
        return self._shards.trouble

    # The loop of a thread.

    def _run(self) -> None:
        while (work := self._next_work()) is not None:
            work()

    def _next_work(self) -> Callable[[], None] | None:
        """What to do next, waiting for it; None at the end."""
        with self._changed:
            while True:
                self._ledger.take_abandoned()
                if self._frames:
                    return partial(self._store, *self._frames.popleft())
                if self._flights:
                    return partial(self._land, *self._flights.popleft())
                if self._closing:
                    return None
                left_s = None
                shard = self._shards.current
                if shard is not None and not self._ledger.flights:
                    if shard.dirty:
                        return partial(self._shards.flush, shard)
                    left_s = shard.appended_at + self._seal_after_s - time.monotonic()
                    if left_s <= 0:
                        self._shards.take_current()
                        return partial(self._shards.end, shard)
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
        full = None
        if not record.failed:
            with self._refusing(record):
                if self._observe is not None and header.payload is Payload.RAW and self._has_planes:
                    values = frame[HEADER_BYTES : HEADER_BYTES + header.tokens * header.geometry.row_bytes]
                    self._observe(values.view(np.uint16).reshape(header.tokens, header.geometry.layers, -1))
                ids = record.token_ids[header.first_position : header.first_position + header.tokens]
                stored, pieces = store_frame(frame, header, ids, salt_sum(record.salt), self._codec)
                full = self._shards.append(record, stored, pieces)
        with self._changed:
            landed.frames_left -= 1
            last = landed.frames_left == 0
        if last:
            self._release(landed)
        if full is not None:
            self._shards.end(full)

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
            self._ledger.release(landed.number)
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
