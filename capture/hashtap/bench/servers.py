"""A server as a child process that is always cleaned up, and stands still while another one is measured."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from hashtap.config import child_environment

__all__ = ["Server", "ServerFailed", "client_for_threads", "cpu_environment", "pss_bytes", "sglang_command"]

BOOT_S = 150.0
STOP_S = 60.0
BOOTS = 2
"""A start was once seen to hang, for a reason that its lost log would have told: print the log and start again."""


def client_for_threads(url: str, timeout_s: float = 5.0) -> httpx.Client:
    """A client that threads may share: it keeps as many connections as there were requests at a time.

    To keep fewer, httpcore 1.0.9 may close one that a thread is about to use, whose request then fails or waits until
    its time-out (encode/httpcore#1110). Use httpx's own limits again when that is mended.
    """
    return httpx.Client(base_url=url, timeout=timeout_s, limits=httpx.Limits(keepalive_expiry=2.0))


class ServerFailed(Exception):
    """The server ended, or never came up. ``exit_status`` is None when it still ran."""

    def __init__(self, exit_status: int | None, log_tail: str) -> None:
        super().__init__(
            f"{log_tail}\nthe server did not come up (exit status {exit_status}); its last lines are above"
        )
        self.exit_status = exit_status


def sglang_command(model: str | Path, *flags: object) -> list[str]:
    """What starts SGLang on ``model``; paths and numbers among the flags are turned into text."""
    return [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *map(str, flags)]


def cpu_environment(threads: int | None = None) -> dict[str, str]:
    """What a server on a CPU needs besides, with so many OpenMP threads; all cores if None."""
    return {
        "OMP_NUM_THREADS": str(threads or os.cpu_count() or 2),
        # Threads that wait asleep: spinning ones make the server many times slower when anything else runs.
        "OMP_WAIT_POLICY": "PASSIVE",
        # Huge pages: with small ones two equal servers differed by 6 % for as long as they lived.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }


class Server:
    """A command that serves HTTP on ``--port``, in a process group and a folder of its own.

    Args:
        command: without ``--port``, which is added.
        environment: added to this process's environment, of which capture options are left out.
        log: where its output goes; a new temporary file by default.
        boot_s: how long a start may take.

    As a context manager it starts, waits until it answers, and is stopped at the end. One that hangs while it
    starts is killed and started once more; the stacks of its processes then stand in its log, and that on stderr.

    Raises:
        ServerFailed: when it ends before it answers, or hangs twice.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: dict[str, str] | None = None,
        log: Path | None = None,
        boot_s: float = BOOT_S,
    ) -> None:
        # SGLang imports a module named "kernels": start where no folder of that name is.
        self._home = Path(tempfile.mkdtemp(prefix="server-"))
        weakref.finalize(self, shutil.rmtree, self._home, ignore_errors=True)
        self.log = log or self._home / "server.log"
        self.boot_s = boot_s
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [*command, "--port", str(self.port)]
        self.environment = child_environment({"PYTHONFAULTHANDLER": "1"} | (environment or {}))
        self.process: subprocess.Popen[bytes] | None = None
        # One client for all questions: making one takes longer than most answers.
        self.http = client_for_threads(self.url)

    def __enter__(self) -> Self:
        try:
            for boots_left in reversed(range(BOOTS)):
                self.start()
                try:
                    self.wait_until_ready()
                except ServerFailed as failure:
                    if failure.exit_status is not None or not boots_left:
                        raise
                    self._dump_stacks()
                    print(f"{self.log_tail(400)}\nthe server hung while it started; trying again", file=sys.stderr)
                else:
                    break
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()

    def start(self) -> None:
        """Start the process; returns at once."""
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                cwd=self._home,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait_until_ready(self, timeout_s: float | None = None) -> None:
        """Wait until ``/health`` answers, which runs a forward pass; ``boot_s`` at most if no time is given."""
        assert self.process is not None
        deadline = time.monotonic() + (timeout_s or self.boot_s)
        while self.process.poll() is None and time.monotonic() < deadline:
            try:
                if self.http.get("/health", timeout=20.0).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.25)
        raise ServerFailed(self.process.poll(), self.log_tail())

    def wait(self, timeout_s: float = BOOT_S) -> int:
        """Wait until it ends by itself; its exit status."""
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        finally:
            self.kill()

    def terminate(self, timeout_s: float = STOP_S) -> int:
        """SIGTERM, which lets it seal what it has; what is left after ``timeout_s`` is killed. Its exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.resume()
            self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
        return self.kill()

    def kill(self) -> int:
        """SIGKILL to its whole process group, as a lost machine would. Its exit status."""
        assert self.process is not None
        self._signal(signal.SIGKILL)
        self.http.close()
        return self.process.wait()

    def pause(self) -> None:
        """Take its processes off the CPU (an idle SGLang keeps a core busy)."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on after :meth:`pause`."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _dump_stacks(self) -> None:
        """End a hanging server with the stacks of all its threads in its log, which PYTHONFAULTHANDLER brings."""
        assert self.process is not None
        self._signal(signal.SIGABRT)
        time.sleep(2.0)
        self._signal(signal.SIGKILL)
        self.process.wait()

    def processes(self) -> list[psutil.Process]:
        """It and its children."""
        assert self.process is not None
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def pss_bytes(self) -> int:
        """Memory of all its processes, see :func:`pss_bytes`."""
        return pss_bytes(self.processes())

    def cpu_s(self) -> float:
        """CPU seconds that its processes have used so far."""
        times = (process.cpu_times() for process in self.processes())
        return float(sum(each.user + each.system for each in times))

    def log_text(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def log_tail(self, lines: int = 30) -> str:
        """The last lines of it."""
        return "\n".join(self.log_text().splitlines()[-lines:])

    def get(self, path: str) -> Any:
        """The JSON that ``GET path`` answers."""
        return self.http.get(path, timeout=60.0).raise_for_status().json()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def pss_bytes(processes: Iterable[psutil.Process]) -> int:
    """Memory of some processes, shared pages counted once (PSS); without files, which others may map too."""
    rollups = (Path(f"/proc/{process.pid}/smaps_rollup").read_text() for process in processes)
    fields = (line.split() for rollup in rollups for line in rollup.splitlines())
    return sum(int(field[1]) for field in fields if field[0] in ("Pss_Anon:", "Pss_Shmem:")) * 1024
