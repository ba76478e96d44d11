"""hashtap's logger. A fault that hits every prompt says so, but does not fill the disk with saying it."""

import logging
import time
from collections.abc import Callable

__all__ = ["RepeatLimit", "log"]

MOST = 20
WINDOW_S = 60.0


class RepeatLimit(logging.Filter):
    """Lets a message through so many times in a window, then counts; the next window's first one tells the count.

    Messages are the same when their texts before formatting are.
    """

    def __init__(
        self, most: int = MOST, window_s: float = WINDOW_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._most, self._window_s, self._clock = most, window_s, clock
        self._seen: dict[str, tuple[float, int]] = {}  # begin of the window, messages in it

    def filter(self, record: logging.LogRecord) -> bool:
        now, text = self._clock(), str(record.msg)
        began, count = self._seen.get(text, (now, 0))
        if now - began >= self._window_s:
            if (left_out := count - self._most) > 0:
                record.msg = f"{text} ({left_out:,} more like this since then)"
            began, count = now, 0
        self._seen[text] = began, count + 1
        return count < self._most


log = logging.getLogger("hashtap")
log.addFilter(RepeatLimit())
