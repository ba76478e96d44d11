"""A writer in a process of its own: ``python -m hashtap.writer_process DESCRIPTOR``, started by a capturing server.

It shares the ring with the server, but not the interpreter lock, so the server's scheduler never waits for it. When the
server dies it still writes and seals what it was given. All that it has to say goes to the server.
"""

import logging
import os
import signal
import sys
import time
from functools import partial
from multiprocessing.connection import Connection
from threading import Lock

import numpy as np
import numpy.typing as npt

from hashtap import writer_messages as messages
from hashtap.directory import CaptureDirectory
from hashtap.exponents import TableBuilder
from hashtap.facts import ShardFacts
from hashtap.flight import Flight, Record
from hashtap.frame import Table
from hashtap.logs import log
from hashtap.ring_memory import RingMemory
from hashtap.writer import Writer

__all__ = ["Server", "WriterProcess", "main"]

STATE_EVERY_S = 0.1
"""How old what the server knows of the counters may be."""
NICE = 10
"""The server goes first where processors are short: a writer that lags behind is what the ring is for."""


class Server:
    """The server at the other end of a pipe. Any thread may tell it something."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self._sending = Lock()
        self._pid = os.getppid()

    def tell(self, message: object) -> None:
        """Send a message; it is lost when the server is gone, as then nobody wants to know."""
        try:
            with self._sending:
                self.pipe.send(message)
        except OSError:
            if isinstance(message, messages.Log):
                print(f"hashtap: {message.text}", file=sys.stderr)

    def next_message(self, wait_s: float) -> object:
        """What the server said next; None when that was nothing.

        Raises:
            EOFError, OSError: when it is gone.
        """
        if self.pipe.poll(wait_s):
            return self.pipe.recv()
        if os.getppid() != self._pid:  # a process that the server forked may hold the pipe open
            raise EOFError
        return None


class WriterProcess:
    """Does what the server says.

    Args:
        server: who says it.
        start: its first message.
    """

    def __init__(self, server: Server, start: messages.Start) -> None:
        self._server = server
        self._ring = RingMemory.attach(start.ring_descriptor, start.ring_bytes)
        self._records: dict[int, Record] = {}
        facts = ShardFacts.from_metadata(start.facts)
        self._tables = TableBuilder(facts.geometry)
        self._table_told = False
        if start.table is not None:
            self._use(start.table)
        self._state = messages.State({}, "")
        self._writer = Writer(
            CaptureDirectory.open(start.directory),
            facts,
            threads=start.threads,
            codec=start.codec,
            shard_bytes=start.shard_bytes,
            seal_after_s=start.seal_after_s,
            observe=self._observe,
            tables=self._tables.by_id,
            failed=lambda record: server.tell(messages.Failed(record.serial)),
        )

    def run(self) -> None:
        """Serve until the server closes this writer or is gone."""
        self._tell_state()
        self._server.tell(messages.Ready())
        try:
            told_at = time.monotonic()
            while not isinstance(message := self._server.next_message(STATE_EVERY_S), messages.Close):
                self._take(message)
                if time.monotonic() - told_at >= STATE_EVERY_S:
                    self._tell_state()
                    told_at = time.monotonic()
        except (EOFError, OSError):
            log.warning("the server is gone: what it captured is sealed, then its writer ends")
        self._writer.close()
        self._tell_state()
        self._server.tell(messages.Done())

    def _take(self, message: object) -> None:
        match message:
            case messages.Forward(number, passes, frames, forgotten):
                for serial in forgotten:
                    del self._records[serial]
                self._records |= {each.serial: self._record(each) for each in passes}
                theirs = [(offset, size, self._records[serial]) for offset, size, serial in frames]
                released = partial(self._server.tell, messages.Released(number))
                self._writer.submit(Flight(self._ring.bytes, _there, theirs, released))
            case messages.Abandon(serial):
                self._writer.abandon(serial)
            case messages.NewTable(table):
                self._use(table)
            case messages.SetFacts(facts):
                self._writer.set_facts(ShardFacts.from_metadata(facts))
            case messages.Drain():
                self._writer.drain()
                self._tell_state()
                self._server.tell(messages.Done())

    def _record(self, new: messages.NewPass) -> Record:
        ids = np.frombuffer(new.token_ids, np.int64)
        donor = None if new.donor is None else self._records[new.donor]
        return Record(new.serial, new.key, ids, new.salt, shared_tokens=new.shared_tokens, donor=donor)

    def _use(self, table: Table) -> None:
        self._table_told = True
        self._tables.adopt(table)

    def _observe(self, values: npt.NDArray[np.uint16]) -> None:
        self._tables.observe(values)
        if self._tables.table is not None and not self._table_told:
            self._table_told = True
            self._server.tell(messages.NewTable(self._tables.table))

    def _tell_state(self) -> None:
        state = messages.State(self._writer.counters(), self._writer.trouble)
        if state != self._state:
            self._state = state
            self._server.tell(state)


class _ToServer(logging.Handler):
    """Sends what is logged to the server, whose log it belongs to."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server = server

    def emit(self, record: logging.LogRecord) -> None:
        self._server.tell(messages.Log(record.levelno, self.format(record)))


def _there() -> None:
    """The server speaks of frames when their bytes are there."""


def main() -> None:
    """Run as a program."""
    # The server says when to end, or dies: a key pressed in its terminal is for the server.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    server = Server(Connection(int(sys.argv[1])))
    log.addHandler(_ToServer(server))
    log.propagate = False
    log.setLevel(logging.INFO)
    start = server.pipe.recv()
    WriterProcess(server, start).run()


if __name__ == "__main__":
    main()
