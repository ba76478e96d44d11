import numpy as np
import pytest
from tests.capture.build import GEOMETRY, states_of

from hashtap.exponents import TableBuilder
from hashtap_kernels.layout import Geometry
from hashtap_kernels.planes import to_planes
from hashtap_kernels.proof import table_id


def test_each_channel_gets_its_commonest_exponent() -> None:
    rows = np.zeros((5, 2, 8), np.uint16)
    rows[:, 0] = 0x3F80  # 1.0, exponent 127
    rows[:, 1] = 0xC000  # -2.0, exponent 128
    rows[:2, 1, 3] = 0x7F80  # inf, exponent 255, in two of five rows
    rows[:3, 1, 4] = 0x7F80
    builder = TableBuilder(Geometry(2, 8), rows=5)

    builder.observe(rows)

    assert builder.table is not None
    assert builder.table.tolist() == [[127] * 8, [128] * 4 + [255] + [128] * 3]


def test_it_waits_for_enough_rows_and_takes_no_more() -> None:
    rows = states_of(range(64))
    builder, at_once = TableBuilder(GEOMETRY, rows=50), TableBuilder(GEOMETRY, rows=50)

    builder.observe(rows[:20])
    builder.observe(rows[20:49])
    assert builder.table is None
    builder.observe(rows[49:])
    at_once.observe(rows)

    assert builder.table is not None
    assert at_once.table is not None
    assert (builder.table == at_once.table).all()
    builder.observe(np.zeros_like(rows))
    assert (builder.table == at_once.table).all()


def test_a_table_is_found_by_its_id_only() -> None:
    builder = TableBuilder(GEOMETRY, rows=3)
    builder.observe(states_of([1, 2, 3]))
    assert builder.table is not None
    identity = table_id(builder.table)
    assert (builder.by_id(identity) == builder.table).all()
    with pytest.raises(KeyError):
        builder.by_id(identity ^ 1)


def test_what_is_counted_is_what_the_exponent_plane_holds() -> None:
    """Of every bit pattern, so of bfloat16 and of float16: centred on its table, a constant row is all zeros."""
    rows = np.arange(1 << 16, dtype=np.uint16).reshape(1, 2, 1 << 15)
    for half in (rows[..., : 1 << 14], rows[..., 1 << 14 :]):
        builder = TableBuilder(Geometry(2, 16384), rows=1)
        builder.observe(half)
        assert builder.table is not None
        exponents, rests = np.empty((2, *half.shape), np.uint8)
        to_planes(np.ascontiguousarray(half), builder.table, exponents, rests)
        assert not exponents.any()
