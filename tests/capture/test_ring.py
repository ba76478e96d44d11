"""The ring: ranges that never overlap, whatever the order of giving back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hashtap.ring import ALIGN, Ring


@given(st.lists(st.tuples(st.integers(1, 5 * ALIGN), st.integers(0, 5)), max_size=60))
def test_ranges_do_not_overlap(steps: list[tuple[int, int]]) -> None:
    ring = Ring(12 * ALIGN)
    out: list[tuple[int, int]] = []
    for size, give in steps:
        fits = ring.fits(size)
        offset = ring.take(size)
        assert fits == (offset is not None)
        if offset is None:
            assert out, "an empty ring has room for anything up to its size"
        else:
            assert offset % ALIGN == 0
            assert offset + size <= ring.capacity_bytes
            assert all(offset + size <= start or start + length <= offset for start, length in out)
            out.append((offset, size))
        for _ in range(min(give, len(out))):
            ring.give_back(out.pop(give % len(out))[0])
    for offset, _ in out:
        ring.give_back(offset)
    assert ring.used_bytes == 0
    assert ring.take(ring.capacity_bytes) == 0


def test_too_large_never_fits() -> None:
    ring = Ring(10 * ALIGN + 5)
    assert ring.capacity_bytes == 10 * ALIGN
    assert ring.take(10 * ALIGN + 1) is None
    assert ring.used_bytes == 0


def test_given_back_twice() -> None:
    ring = Ring(4 * ALIGN)
    offset = ring.take(1)
    assert offset is not None
    ring.give_back(offset)
    with pytest.raises(KeyError):
        ring.give_back(offset)
