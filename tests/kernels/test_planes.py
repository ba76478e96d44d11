"""Planes: what each byte is, and that nothing is lost whatever the values and the table."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hashtap_kernels.planes import from_planes, to_planes


def planes_of(elements: np.ndarray, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    exponents, rests = np.empty(elements.shape, np.uint8), np.empty(elements.shape, np.uint8)
    to_planes(elements, table, exponents, rests)
    return exponents, rests


def test_golden() -> None:
    # bfloat16 of 1.0, -1.0, 0.0, -0.0, NaN with sign and payload, inf, the smallest subnormal
    elements = np.array([[[0x3F80, 0xBF80, 0x0000, 0x8000, 0xFFC1, 0x7F80, 0x0001, 0x1234]]], np.uint16)
    table = np.array([[127, 127, 1, 0, 255, 0, 0, 0]], np.uint8)
    exponents, rests = planes_of(elements, table)
    assert exponents.tolist() == [[[0, 0, 255, 0, 0, 255, 0, 0x24]]]
    assert rests.tolist() == [[[0, 1, 0, 1, 0x83, 0, 2, 0x68]]]


@pytest.mark.parametrize("offset", [0, 1, 127, 255])
def test_every_bit_pattern_comes_back(offset: int) -> None:
    elements = np.arange(1 << 16, dtype=np.uint16).reshape(64, 4, 256)
    table = np.full((4, 256), offset, np.uint8)
    back = np.empty_like(elements)
    from_planes(*planes_of(elements, table), table, back)
    assert np.array_equal(back, elements)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 40), st.integers(1, 8), st.integers(1, 40).map(lambda n: 8 * n), st.integers(0, 1 << 32))
def test_inverse_for_any_shape_and_table(n: int, layers: int, hidden: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    elements = rng.integers(0, 1 << 16, (n, layers, hidden), np.uint16)
    table = rng.integers(0, 256, (layers, hidden), np.uint8)
    back = np.empty_like(elements)
    from_planes(*planes_of(elements, table), table, back)
    assert np.array_equal(back, elements)


def test_blocks_of_rows_meet_without_a_seam() -> None:
    elements = np.random.default_rng(1).integers(0, 1 << 16, (37, 4, 7168), np.uint16)  # more than one block
    table = np.zeros((4, 7168), np.uint8)
    exponents, rests = planes_of(elements, table)
    rotated = (elements.astype(np.uint32) << 1 | elements >> 15) & 0xFFFF
    assert np.array_equal(exponents, rotated >> 8)
    assert np.array_equal(rests, rotated & 0xFF)
