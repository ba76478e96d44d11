"""Of each key the first complete record counts, whatever became of those before it and of their donors."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hashtap.shard import RECORD_COLUMNS
from hashtap.sharing import Sharing

Record = tuple[int, int, int, int]
"""A key, T, shared tokens and donor key, in small numbers."""


def key(number: int) -> bytes:
    return np.array([number, 0], "<u8").tobytes()


def sharing(records: list[Record]) -> Sharing:
    table = np.zeros((len(records), len(RECORD_COLUMNS)), np.uint64)
    for row, (own, total, shared, donor) in enumerate(records):
        table[row, [0, 3, 6, 7]] = own, total, shared, donor if shared else 0
    return Sharing(np.arange(len(records)), table, [key(own) for own, *_ in records])


def counting(records: list[Record]) -> dict[int, int]:
    return {int.from_bytes(one[:8], "little"): row for one, row in sharing(records).first.items()}


def test_the_first_of_a_key_counts() -> None:
    assert counting([(1, 5, 0, 0), (2, 5, 0, 0), (1, 5, 0, 0)]) == {1: 0, 2: 1}


def test_a_later_record_takes_the_place_of_one_that_lost_its_donor() -> None:
    """FORMAT §7: the first complete one. A sample that was captured anew is not lost with its first donor."""
    records = [(1, 9, 4, 7), (1, 9, 0, 0), (1, 9, 0, 0)]
    assert counting(records) == {1: 1}
    assert sharing(records).orphans == [0]


def test_it_serves_those_that_share_with_its_key() -> None:
    records = [(1, 9, 4, 7), (2, 12, 6, 1), (3, 20, 12, 2), (1, 9, 0, 0)]
    assert counting(records) == {1: 3, 2: 1, 3: 2}
    assert sharing(records).orphans == [0]


def test_a_lost_donor_takes_a_chain_along_and_a_long_one_is_no_trouble() -> None:
    chain = [(number, 10, 9, number - 1) for number in range(1, 5000)]
    assert counting([(0, 10, 0, 0), *chain]) == {number: number for number in range(5000)}
    assert counting(chain) == {}
    assert sorted(sharing(chain).orphans) == list(range(4999))


def test_a_donor_that_is_too_short_is_none() -> None:
    assert counting([(1, 3, 0, 0), (2, 9, 4, 1)]) == {1: 0}


def test_a_circle_is_broken_by_a_record_that_does_not_share() -> None:
    circle = [(1, 9, 4, 2), (2, 9, 4, 1)]
    assert counting(circle) == {}
    assert counting([*circle, (2, 9, 0, 0)]) == {1: 0, 2: 2}
    assert counting([(1, 9, 4, 1)]) == {}


def assert_readable(records: list[Record], found: dict[int, int]) -> None:
    for row in found.values():
        seen = set()
        while records[row][2]:
            assert row not in seen
            seen.add(row)
            _, _, shared, donor = records[row]
            row = found[donor]
            assert records[row][1] >= shared


NUMBERS = [st.integers(0, 4), st.integers(1, 4), st.integers(0, 4)]


@settings(deadline=None)
@given(st.lists(st.tuples(*NUMBERS, st.integers(0, 4)), max_size=12))
def test_what_counts_can_be_read(records: list[Record]) -> None:
    assert_readable(records, counting(records))


@settings(deadline=None)
@given(st.lists(st.tuples(*NUMBERS, st.integers(0, 4)).map(lambda one: (one[0] + one[3] + 1, *one[1:])), max_size=12))
def test_without_circles_the_first_that_can_be_read_counts(several_lengths: list[Record]) -> None:
    """Where all records of a key have one length, as they do: it is the hash of its ids."""
    lengths = {own: total for own, total, *_ in several_lengths}
    records = [(own, lengths[own], shared, donor) for own, _, shared, donor in several_lengths]
    found = counting(records)
    assert_readable(records, found)
    for row, (own, _, shared, donor) in enumerate(records):
        if own not in found or row < found[own]:
            assert shared
            assert donor not in found or records[found[donor]][1] < shared
