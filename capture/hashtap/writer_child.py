"""One writer process, as the server that started it sees it: its pipe, and what it was told and asked."""

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe

from hashtap.errors import SetupError
from hashtap.logs import log
from hashtap.writer_messages import Close, Drain, Ready, Start

__all__ = ["WriterChild"]

START_S = 60.0
"""A writer process that takes longer to start has failed to; it needs a quarter of a second."""


class WriterChild:
    """Starts a writer process, and hears what it says on a thread of its own.

    Args:
        start: what it is told first.
        heard: is called with this object and each message.
        died: is called with this object when the process is gone before it was :attr:`ended`.

    Raises:
        SetupError: when it does not come up.

    Attributes:
        writer: the writing run that its shards name.
        started_at: ``time.monotonic`` of its start.
        ended: whether it is gone, or about to go as it was told to.
        counters: what it counted, as it told last.
        trouble: why the disk takes nothing; empty while it does.
        forgotten: serials of passes that it is to forget with the next forward.
        asked: what it was asked and has not answered, each with the event that the answer sets.
    """

    def __init__(
        self,
        start: Start,
        heard: Callable[["WriterChild", object], None],
        died: Callable[["WriterChild"], None],
    ) -> None:
        self.writer = start.writer
        self.started_at = time.monotonic()
        self.ended = False
        self.counters: dict[str, int] = {}
        self.trouble = ""
        self.forgotten: list[int] = []
        self.asked: deque[tuple[Drain | Close, threading.Event]] = deque()
        self._heard, self._died = heard, died
        self._listener = threading.Thread(target=self._listen, name="hashtap-listener", daemon=True)
        try:
            self._pipe, theirs = Pipe()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "hashtap.writer_process", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), start.ring_descriptor),
                )
        except OSError as error:
            raise SetupError(f"a writer process cannot be started: {error}") from error
        try:
            self._pipe.send(start)
            self._await_ready()
            self._listener.start()
        except BaseException as error:
            status = self.kill()
            if isinstance(error, EOFError | OSError):
                raise SetupError(
                    f"a writer process ended as it started, with status {status}: its own words stand above"
                ) from error
            if isinstance(error, RuntimeError):
                raise SetupError(
                    f"a writer process cannot be listened to: {error}; raise the limit on threads"
                ) from error
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def tell(self, message: object) -> None:
        """Tell it something; one thread at a time. That it is dead, its listener will notice."""
        with suppress(OSError):
            self._pipe.send(message)

    def kill(self) -> int:
        """End it if it lives; its exit status."""
        self._process.kill()
        status = self._process.wait()
        self._pipe.close()
        return status

    def join(self) -> None:
        """Wait for the end of a process that was told to end."""
        self._listener.join()
        self._process.wait()

    def _await_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while self._pipe.poll(max(0.0, deadline - time.monotonic())):
            message = self._pipe.recv()
            if isinstance(message, Ready):
                return
            self._heard(self, message)
        raise SetupError(f"a writer process did not start within {START_S:g} s")

    def _listen(self) -> None:
        try:
            while True:
                self._heard(self, self._pipe.recv())
        except (EOFError, OSError):
            pass
        except Exception:
            log.exception("a writer process is not understood any more: another one takes its place")
        if not self.ended:
            self._died(self)
