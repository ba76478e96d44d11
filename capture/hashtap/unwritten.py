"""The forwards that are not written yet, and who still reads their bytes in the ring."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Lock

from hashtap.logs import log
from hashtap.writer_child import WriterChild

__all__ = ["UnwrittenForwards"]


@dataclass(slots=True)
class _Forward:
    release: Callable[[], None]
    readers: set[WriterChild | None]


class UnwrittenForwards:
    """Gives a forward's memory back when the last of its readers is done with it. Any thread may call.

    Readers are the writers that have frames of it and, as ``None``, whoever hands it to them.
    """

    def __init__(self) -> None:
        self._lock = Lock()  # held for moments only, never over a release
        self._numbers = itertools.count(1)
        self._forwards: dict[int, _Forward] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._forwards)

    def add(self, release: Callable[[], None]) -> int:
        """The number of a new forward, whose only reader is ``None``; ``release`` gives its memory back."""
        with self._lock:
            number = next(self._numbers)
            self._forwards[number] = _Forward(release, {None})
            return number

    def add_readers(self, number: int, writers: Iterable[WriterChild]) -> None:
        """These writers are about to be told of it."""
        with self._lock:
            self._forwards[number].readers.update(writers)

    def done(self, number: int, reader: WriterChild | None) -> None:
        """A reader needs the bytes no more."""
        with self._lock:
            forward = self._forwards[number]
            forward.readers.discard(reader)
            if forward.readers:
                return
        try:
            forward.release()
        except Exception:
            log.exception("the memory of a forward could not be given back")
        with self._lock:
            del self._forwards[number]

    def give_up(self, writer: WriterChild) -> int:
        """A writer died, and is done with everything; returns how many forwards it had not written."""
        with self._lock:
            numbers = [number for number, forward in self._forwards.items() if writer in forward.readers]
        for number in numbers:
            self.done(number, writer)
        return len(numbers)
