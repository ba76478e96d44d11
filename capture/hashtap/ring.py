"""The ring of host memory that rows cross on their way from the device to the writer."""

import threading
from collections import deque
from dataclasses import dataclass

__all__ = ["Ring"]

ALIGN = 4096


@dataclass(slots=True)
class _Taken:
    end: int  # one past the last byte, in bytes ever handed out
    free: bool = False


class Ring:
    """Hands out contiguous byte ranges of a buffer of ``capacity_bytes``; knows no buffer itself.

    Ranges are taken in order by one thread and given back in any order by others. A range that would
    cross the end of the buffer starts at its beginning instead, so each is contiguous.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes - capacity_bytes % ALIGN
        self._head = 0  # bytes ever handed out, skipped ends included
        self._tail = 0  # bytes ever given back
        self._taken: deque[_Taken] = deque()
        self._by_offset: dict[int, _Taken] = {}
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes between the oldest range still out and the newest."""
        with self._lock:
            return self._head - self._tail

    def _start(self, size: int) -> int | None:
        """Where a range of ``size`` bytes would start, counted like ``_head``; None when it does not fit."""
        start, offset = self._head, self._head % self.capacity_bytes
        if offset + size > self.capacity_bytes:
            start += self.capacity_bytes - offset
        return start if start + size - self._tail <= self.capacity_bytes else None

    def fits(self, size_bytes: int) -> bool:
        """Whether :meth:`take` would find ``size_bytes``."""
        with self._lock:
            return self._start(_aligned(size_bytes)) is not None

    def take(self, size_bytes: int) -> int | None:
        """Take a range; its offset in the buffer, or None when there is no room now."""
        size = _aligned(size_bytes)
        with self._lock:
            start = self._start(size)
            if start is None:
                return None
            offset = start % self.capacity_bytes
            self._head = start + size
            self._taken.append(taken := _Taken(self._head))
            self._by_offset[offset] = taken
            return offset

    def give_back(self, offset: int) -> None:
        """Give back the range that starts at ``offset``.

        Raises:
            KeyError: when no range that starts there is out (given back twice).
        """
        with self._lock:
            self._by_offset.pop(offset).free = True
            while self._taken and self._taken[0].free:
                self._tail = self._taken.popleft().end
            if not self._taken:  # start over, so that an empty ring has no end to skip
                self._head = self._tail = 0


def _aligned(size_bytes: int) -> int:
    return max(-(-size_bytes // ALIGN) * ALIGN, ALIGN)
