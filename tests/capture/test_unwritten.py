"""A forward's memory is given back once, when the last of its readers is done."""

from typing import Any

import pytest

from hashtap.unwritten import UnwrittenForwards

ONE: Any = object()  # stands for a writer, of which only its identity counts
OTHER: Any = object()


def test_the_last_reader_gives_the_memory_back() -> None:
    unwritten, released = UnwrittenForwards(), []
    first, second = (unwritten.add(lambda at=at: released.append(at)) for at in (1, 2))
    unwritten.add_readers(first, [ONE, OTHER])
    for reader in (ONE, None, ONE):
        unwritten.done(first, reader)
    assert (released, len(unwritten)) == ([], 2)
    unwritten.done(second, None)
    unwritten.done(first, OTHER)
    assert (released, len(unwritten)) == ([2, 1], 0)


def test_a_dead_writer_is_done_with_what_it_had(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("no ring")

    unwritten, released = UnwrittenForwards(), []
    numbers = [unwritten.add(fail), *(unwritten.add(lambda at=at: released.append(at)) for at in range(3))]
    for number, writers in zip(numbers, ([ONE], [ONE], [ONE, OTHER], [OTHER]), strict=True):
        unwritten.add_readers(number, writers)
        unwritten.done(number, None)
    assert unwritten.give_up(ONE) == 3
    assert (released, len(unwritten)) == ([0], 2)
    assert "the memory of a forward could not be given back" in caplog.text
    assert unwritten.give_up(OTHER) == 2
    assert (released, len(unwritten)) == ([0, 1, 2], 0)
