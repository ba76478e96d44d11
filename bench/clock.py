"""Wall time as it would be on a machine of one's own: less the time for which a thread waited for a processor.

Whatever else runs on the machine makes a thread wait in the kernel's run queue; the kernel counts how long. Waits for
locks, the interpreter lock among them, and for the disk are no such waits: they stay in.
"""

import threading
import time
from collections.abc import Iterable
from pathlib import Path

__all__ = ["Clock", "cpu_s", "threads_of"]


class Clock:
    """Measures one thread.

    Args:
        thread_id: of a thread, as the kernel numbers it; the calling one when it is left out.
    """

    def __init__(self, thread_id: int | None = None) -> None:
        number = threading.get_native_id() if thread_id is None else thread_id
        self._file = Path(f"/proc/{number}/schedstat")
        self._waited, self._began = self._waited_s(), time.perf_counter()

    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self._began - (self._waited_s() - self._waited)

    def _waited_s(self) -> float:
        return int(self._file.read_text().split()[1]) / 1e9


def threads_of(pid: int) -> list[int]:
    """The threads of a process, as the kernel numbers them, its main one first."""
    return sorted(int(path.name) for path in Path(f"/proc/{pid}/task").iterdir())


def cpu_s(pids: Iterable[int] = ()) -> float:
    """CPU seconds that this process and others, whose threads all live, have taken so far."""
    tasks = [number for pid in pids for number in threads_of(pid)]
    others_ns = sum(int(Path(f"/proc/{number}/schedstat").read_text().split()[0]) for number in tasks)
    return time.process_time() + others_ns / 1e9
