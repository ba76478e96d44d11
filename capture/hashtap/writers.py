"""The writers of a capturing rank, each a process of its own, seen from the server.

A thread hands each forward to the writers once its bytes are in the ring, another hears what they say. All passes of
one key go to the same writer, which so finds duplicates by itself and lists a whole record in its own shards.

A writer that dies takes with it the forwards that it had not written. Its passes fail, which their clients find out
when no seal comes; what it left on disk is recovered, and another one takes its place. Until that one is there its keys
go to the others; passes for which there is no other fail.
"""

import os
import threading
import time
import uuid
from collections import Counter
from dataclasses import replace
from functools import partial
from multiprocessing.util import Finalize
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from hashtap import writer_messages as messages
from hashtap.directory import CaptureDirectory
from hashtap.errors import HashtapError
from hashtap.facts import ShardFacts
from hashtap.flight import Flight, Record
from hashtap.frame import Table
from hashtap.logs import log
from hashtap.recover import recover
from hashtap.ring_memory import RingMemory
from hashtap.told_passes import ToldPasses
from hashtap.unwritten import UnwrittenForwards
from hashtap.writer import COUNTS
from hashtap.writer_child import WriterChild

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Writers"]

RESTART_S = 5.0
"""The least time between two tries to start the same writer."""


class Writers:
    """Writes the shards of one rank. :meth:`submit` and :meth:`abandon`, of the scheduler's thread, never wait.

    Args:
        directory: where the shards go.
        facts: what they say about themselves; each writer's shards name a writing run of its own.
        ring: where the frames lie.
        processes: how many writers.
        threads: how many of each compress and write.
        table: the run's exponent table where there is one already.
        options: of each writer: codec, shard_bytes and seal_after_s.

    Raises:
        SetupError: when one cannot be started.

    Attributes:
        table: the run's exponent table, uint8 ``[L, H]``, once it is made: every writer knows it by then.
    """

    def __init__(
        self,
        directory: CaptureDirectory,
        facts: ShardFacts,
        ring: RingMemory,
        *,
        processes: int,
        threads: int,
        table: Table | None = None,
        **options: Any,
    ) -> None:
        self.table = table
        self._directory = directory
        self._facts = facts
        self._ring = ring
        self._options = {"threads": threads, **options}
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards what follows, held for moments only
        self._past: Counter[str] = Counter()  # counted by writers that died, and by the server itself
        self._closing = False
        self._inbox: SimpleQueue[Callable[[], None] | None] = SimpleQueue()  # put() is safe in a finalizer
        self._unwritten = UnwrittenForwards()
        self._passes = ToldPasses(self._inbox.put)
        self._children: list[WriterChild] = []
        self._vacant: dict[int, float] = {}  # places of dead writers, and when the next one may start there
        try:
            for _ in range(processes):
                self._children.append(self._launch())
        except BaseException:
            for child in self._children:
                child.ended = True
                child.kill()
            raise
        self._sender = threading.Thread(target=self._send, name="hashtap-sender", daemon=True)
        self._sender.start()
        # Unlike atexit this also runs at the end of a process that multiprocessing started.
        self._at_exit = Finalize(None, self.close, exitpriority=10)

    def submit(self, flight: Flight) -> None:
        """Hand over the frames of a forward, ``buffer`` being the whole ring; after :meth:`close` they are dropped."""
        with self._lock:
            if not self._closing:
                self._inbox.put(partial(self._send_flight, self._unwritten.add(flight.release), flight))
                return
        log.error("a forward was captured after the writer was closed: it is not stored")
        flight.release()

    def abandon(self, record: Record) -> None:
        """The pass will bring no more frames and no record: forget it. Safe in a finalizer."""
        self._inbox.put(partial(self._passes.abandon, record.serial))

    def drain(self) -> None:
        """Wait until all that was submitted is written and sealed; what a full disk does not take now is lost."""
        self._ask(messages.Drain())

    def set_facts(self, facts: ShardFacts) -> None:
        """The weights changed: say so in new shards. Call it after :meth:`drain`; no record goes across."""
        self._inbox.put(partial(self._tell_facts, facts))

    def close(self) -> None:
        """Write and seal all that was submitted, then stop. Later calls do nothing, nor does one in a forked child."""
        if os.getpid() != self._pid:
            return
        self._at_exit.cancel()
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._ask(messages.Close())
        self._inbox.put(None)
        self._sender.join()
        for child in self._children:
            child.join()

    def counters(self) -> dict[str, int]:
        """Counts since the start, a moment old, see :meth:`hashtap.writer.Writer.counters`; ``queue`` is exact."""
        with self._lock:
            all_counts = [self._past, *(child.counters for child in self._children)]
            counts = {name: sum(counts.get(name, 0) for counts in all_counts) for name in COUNTS}
            return {**counts, "queue": len(self._unwritten)}

    @property
    def pids(self) -> list[int]:
        """The process ids of the writers."""
        return [child.pid for child in self._children]

    @property
    def trouble(self) -> str:
        """Why the disk takes nothing at present; empty while it does."""
        return next((child.trouble for child in self._children if child.trouble), "")

    # Starting and ending.

    def _launch(self) -> WriterChild:
        """Start a writer.

        Raises:
            SetupError: when it does not come up.
        """
        facts = replace(self._facts, writer=uuid.uuid4().hex)
        ring = self._ring.descriptor, len(self._ring.bytes)
        start = messages.Start(
            facts.to_metadata(), facts.writer, str(self._directory.path), *ring, table=self.table, **self._options
        )
        return WriterChild(start, self._hear, lambda child: self._inbox.put(partial(self._bury, child)))

    def _bury(self, child: WriterChild) -> None:
        """A writer died: give up what it had, and have another one take its place."""
        status = child.kill()  # dead or deaf: from here on it reads nothing of the ring
        child.ended, child.trouble = True, "a writer process died"
        self._vacant[self._children.index(child)] = child.started_at + RESTART_S
        with self._lock:
            asked = list(child.asked)
            self._past.update(child.counters)
            self._past["write_errors"] += 1
            child.counters = {}
        self._passes.lose(child)
        unwritten = self._unwritten.give_up(child)
        log.error(
            "a writer process died, with status %d: %d forwards were not written, and prompts of which rows were "
            "not sealed are lost; extract them again",
            *(status, unwritten),
        )
        for _, answer in asked:
            answer.set()
        try:
            recover(self._directory, like=self._facts)  # at once, as the next facts may be of other weights
        except Exception as error:
            _log_failure("what it left is not recovered before the next start, or by hashtap recover", error)

    def _fill_vacancies(self) -> float | None:
        """Start writers in the place of dead ones, each when it is time; in how many seconds the next one's time comes.

        One that cannot be started, for whatever reason, keeps nobody waiting: it is tried again later.
        """
        if self._closing or not self._vacant:
            return None
        for place in [place for place, due_at in self._vacant.items() if due_at <= time.monotonic()]:
            try:
                self._children[place] = self._launch()
                del self._vacant[place]
            except Exception as error:
                self._vacant[place] = time.monotonic() + RESTART_S
                _log_failure("no writer takes the place of the dead one yet", error)
        return max(0.0, min(self._vacant.values()) - time.monotonic()) if self._vacant else None

    # What the sender's thread does.

    def _send(self) -> None:
        while True:
            try:
                step = self._inbox.get(timeout=self._fill_vacancies())
            except Empty:
                continue
            if step is None:
                return
            try:
                step()
            except Exception:
                log.exception("the writers could not be told something")

    def _send_flight(self, number: int, flight: Flight) -> None:
        frames: list[tuple[int, int, Record]] = []
        try:
            frames += flight.frames
            flight.wait()
        except Exception:
            log.exception("the frames of a forward did not arrive: its %d frames are not stored", len(frames))
            with self._lock:
                self._past["bad_frames"] += len(frames)
            for _, _, record in frames:
                record.failed = True
                self._passes.abandon(record.serial)
        parts: dict[WriterChild, messages.Forward] = {}
        for offset, size, record in frames:
            if self._passes.is_lost(record):
                continue
            child = self._writer_for(record)
            if child is None:
                log.error("every writer is dead: a frame is not stored, and no record comes of its prompt")
                record.failed = True
                with self._lock:
                    self._past["bad_frames"] += 1
                continue
            part = parts.setdefault(child, messages.Forward(number, [], [], []))
            part.passes.extend(self._passes.introduce(record, child))
            part.frames.append((offset, size, record.serial))
        self._unwritten.add_readers(number, parts)
        for child, part in parts.items():
            part.forgotten[:], child.forgotten = child.forgotten, []
            child.tell(part)
        self._unwritten.done(number, None)

    def _adopt(self, table: Table) -> None:
        """The first table that a writer made is the run's."""
        if self.table is None:
            for child in self._children:
                child.tell(messages.NewTable(table))
            self.table = table

    def _tell_facts(self, facts: ShardFacts) -> None:
        self._facts = facts
        for child in self._children:
            child.tell(messages.SetFacts(replace(facts, writer=child.writer).to_metadata()))

    def _ask(self, message: messages.Drain | messages.Close) -> None:
        """Ask all writers for something, and wait until it is done and what they said before is taken in."""
        answers, heard = [threading.Event() for _ in self._children], threading.Event()
        self._inbox.put(partial(self._ask_each, message, answers))
        for answer in answers:
            answer.wait()
        self._inbox.put(heard.set)
        heard.wait()

    def _ask_each(self, message: messages.Drain | messages.Close, answers: list[threading.Event]) -> None:
        for child, answer in zip(self._children, answers, strict=True):
            if child.ended:
                answer.set()
                continue
            with self._lock:
                child.asked.append((message, answer))
            child.tell(message)

    def _writer_for(self, record: Record) -> WriterChild | None:
        """Of a pass always the same one, of a key as long as it lives; None when no writer does."""
        first = record.key[0] % len(self._children)
        in_turn = [self._passes.writer_of(record), *self._children[first:], *self._children[:first]]
        return next((child for child in in_turn if child is not None and not child.ended), None)

    # What a listener's thread does.

    def _hear(self, child: WriterChild, message: object) -> None:
        match message:
            case messages.Released(number):
                self._unwritten.done(number, child)
            case messages.State(counters, trouble):
                with self._lock:
                    child.counters, child.trouble = counters, trouble
            case messages.NewTable(table):
                self._inbox.put(partial(self._adopt, table))
            case messages.Failed(serial):
                self._passes.fail(serial)
            case messages.Done():
                with self._lock:
                    asked, answer = child.asked.popleft()
                child.ended = isinstance(asked, messages.Close)
                answer.set()
            case messages.Log(level, text):
                # Past the limit on repeats, which the writer has applied.
                if log.isEnabledFor(level):
                    log.callHandlers(log.makeRecord(log.name, level, __name__, 0, text, (), None))


def _log_failure(what: str, error: Exception) -> None:
    """Say what came of an error; with a traceback where nobody raised it on purpose."""
    log.error("%s: %s", what, error, exc_info=None if isinstance(error, HashtapError) else error)
