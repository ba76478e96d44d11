"""Plans against a plain loop over tokens: every captured row stands in one frame, frames lie without gaps."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hashtap_kernels.layout import FRAME_ALIGN, HEADER_BYTES, Dtype, Geometry
from hashtap_kernels.plan import (
    KEY0,
    KEY1,
    OFFSET,
    POSITIONS,
    ROW,
    ROWS_BEFORE,
    SERIAL,
    TOKENS,
    FramePlan,
    Piece,
    plan_frames,
)

KEY = bytes(range(16))
GEOMETRY = Geometry(4, 576)


def piece(row: int = 0, tokens: int = 1, first: int = 0, rest: int = 0, serial: int = 1, key: bytes = KEY) -> Piece:
    return Piece(row, tokens, first, first + tokens + rest, serial, key)


def u64(word: np.int64) -> int:
    return int(word) & ((1 << 64) - 1)


@st.composite
def batches_of_pieces(draw: st.DrawFn) -> list[Piece]:
    pieces, row = [], 0
    for serial in range(draw(st.integers(0, 6))):
        row += draw(st.integers(0, 9))  # rows of a request that is not captured
        tokens = draw(st.one_of(st.integers(1, 5), st.integers(250, 260), st.integers(500, 800)))
        serial_word = serial + (draw(st.booleans()) << 63)
        pieces.append(
            piece(
                row,
                tokens,
                draw(st.integers(0, 1 << 20)),
                draw(st.integers(0, 9)),
                serial_word,
                draw(st.binary(min_size=16, max_size=16)),
            )
        )
        row += tokens
    return pieces


geometries = st.builds(Geometry, st.integers(1, 8), st.integers(1, 2048).map(lambda n: 8 * n), st.sampled_from(Dtype))


@settings(deadline=None, max_examples=80)
@given(batches_of_pieces(), geometries)
def test_frames_are_those_of_a_loop_over_tokens(pieces: list[Piece], geometry: Geometry) -> None:
    plan = plan_frames(pieces, geometry)
    plan.check(geometry)
    expected, rows, offset = [], 0, 0
    for p in pieces:
        for start in range(0, p.tokens, 256):
            n = min(256, p.tokens - start)
            positions = p.first_position + start | p.total_tokens << 32
            keys = (int.from_bytes(p.key[:8], "little"), int.from_bytes(p.key[8:], "little"))
            expected.append([p.row + start, n, rows, offset, positions, p.serial, *keys])
            rows += n
            offset += -(-(128 + n * (geometry.layers * geometry.hidden * geometry.dtype.element_bytes + 8)) // 64) * 64
    assert [[u64(word) for word in frame] for frame in plan.descriptors] == expected
    assert (plan.rows, plan.bytes) == (rows, offset)
    assert plan.bytes == sum(geometry.piece_bytes(p.tokens) for p in pieces)
    assert plan.frame_bytes.sum() == plan.bytes


@settings(deadline=None, max_examples=80)
@given(batches_of_pieces(), st.integers(1, 4))
def test_split_keeps_the_frames_and_their_order(pieces: list[Piece], frames: int) -> None:
    plan = plan_frames(pieces, GEOMETRY)
    limit = frames * GEOMETRY.frame_bytes(256)
    parts = plan.split(limit)
    for part in parts:
        part.check(GEOMETRY)
        assert 0 < part.bytes <= limit
    # As full as can be: the next part's first frame would not have fitted.
    for part, following in pairwise(parts):
        assert part.bytes + following.frame_bytes[0] > limit
    assert sum(part.rows for part in parts) == plan.rows
    moved = [ROW, TOKENS, POSITIONS, SERIAL, KEY0, KEY1]
    joined = np.concatenate([plan.descriptors[:0], *(part.descriptors for part in parts)])
    assert np.array_equal(joined[:, moved], plan.descriptors[:, moved])


def test_golden_frame() -> None:
    plan = plan_frames([piece(row=3, tokens=257, first=10, rest=1, serial=9)], GEOMETRY)
    assert plan.descriptors.tolist() == [
        [3, 256, 0, 0, 10 | 268 << 32, 9, 0x0706050403020100, 0x0F0E0D0C0B0A0908],
        [259, 1, 256, 1181824, 266 | 268 << 32, 9, 0x0706050403020100, 0x0F0E0D0C0B0A0908],
    ]
    assert (plan.rows, plan.bytes) == (257, 1181824 + 4800)
    assert HEADER_BYTES + 256 * (4 * 576 * 2 + 8) == 1181824
    assert 1181824 % FRAME_ALIGN == 0


def test_empty_plan() -> None:
    plan = plan_frames([], GEOMETRY)
    assert (len(plan), plan.rows, plan.bytes, plan.split(1)) == (0, 0, 0, [])
    plan.check(GEOMETRY)


def test_split_refuses_a_frame_larger_than_the_slot() -> None:
    plan = plan_frames([piece(tokens=1), piece(row=1, tokens=256)], GEOMETRY)
    with pytest.raises(ValueError, match="a frame of 1181824 bytes does not fit a limit of 1181823"):
        plan.split(1181823)


@pytest.mark.parametrize(
    "bad",
    [
        piece(tokens=0),
        piece(row=-1),
        piece(first=-1),
        piece(rest=-1),
        piece(rest=1 << 31),
        piece(key=b"short"),
    ],
)
def test_pieces_that_are_no_part_of_a_prompt_are_refused(bad: Piece) -> None:
    with pytest.raises(ValueError, match=r"Piece\("):
        plan_frames([piece(), bad], GEOMETRY)


def test_check_refuses_a_plan_of_another_geometry() -> None:
    with pytest.raises(ValueError, match="not laid out for"):
        plan_frames([piece(tokens=9)], GEOMETRY).check(Geometry(4, 584))


@pytest.mark.parametrize("column", [ROWS_BEFORE, OFFSET, TOKENS])
def test_check_refuses_frames_that_do_not_tile(column: int) -> None:
    plan = plan_frames([piece(tokens=300)], GEOMETRY)
    descriptors = plan.descriptors.copy()
    descriptors[1, column] += 1
    with pytest.raises(ValueError, match="not laid out for"):
        FramePlan(descriptors, plan.rows, plan.bytes).check(GEOMETRY)


@pytest.mark.parametrize("tokens", [0, 257])
def test_check_refuses_frames_of_a_wrong_size(tokens: int) -> None:
    plan = plan_frames([piece(tokens=300)], GEOMETRY)
    descriptors = plan.descriptors.copy()
    descriptors[0, TOKENS] = tokens
    with pytest.raises(ValueError, match="1 to 256"):
        FramePlan(descriptors, plan.rows, plan.bytes).check(GEOMETRY)


def test_check_refuses_rows_before_the_batch() -> None:
    plan = plan_frames([piece(tokens=300)], GEOMETRY)
    descriptors = plan.descriptors.copy()
    descriptors[0, ROW] = -1
    with pytest.raises(ValueError, match="begins at row -1"):
        FramePlan(descriptors, plan.rows, plan.bytes).check(GEOMETRY)


def test_a_plan_stays_as_it_was_made_and_is_for_one_geometry() -> None:
    for plan in (made := plan_frames([piece(tokens=300)], GEOMETRY), *made.split(made.bytes)):
        plan.check(GEOMETRY)
        with pytest.raises(ValueError, match="read-only"):
            plan.descriptors[0, OFFSET] = 64
        with pytest.raises(ValueError, match="is not laid out for"):
            plan.check(Geometry(3, 576))
