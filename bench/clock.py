"""Wall time as it would be on a machine of one's own: less the time for which a thread waited for a processor.

Whatever else runs on the machine makes a thread wait in the kernel's run queue; the kernel counts how long. Waits for
locks, the interpreter lock among them, and for the disk are no such waits: they stay in.
"""

import threading
import time
from pathlib import Path

__all__ = ["Clock"]


class Clock:
    """Measures one thread.

    Args:
        thread_id: of a thread of this process, as the kernel numbers it; the calling one when it is left out.
    """

    def __init__(self, thread_id: int | None = None) -> None:
        number = threading.get_native_id() if thread_id is None else thread_id
        self._file = Path(f"/proc/self/task/{number}/schedstat")
        self._waited, self._began = self._waited_s(), time.perf_counter()

    def seconds(self) -> float:
        """Since the beginning."""
        return time.perf_counter() - self._began - (self._waited_s() - self._waited)

    def _waited_s(self) -> float:
        return int(self._file.read_text().split()[1]) / 1e9
