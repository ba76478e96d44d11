"""The mixing functions: golden values (FORMAT.md states them too) and a second computation in Python's integers."""

from random import Random

import batches
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hashtap_kernels.proof import add_proofs, header_check, mix64, prompt_proof, row_sums, table_id, tokens_proof

SEED = (11, 22)
u64 = st.integers(0, (1 << 64) - 1)


def test_mix64_golden() -> None:
    words = np.array([0, 1, (1 << 64) - 1], np.uint64)
    assert [int(x) for x in mix64(words)] == [0, 0x5692161D100B05E5, 0xB4D055FCF2CBBD7B]


@pytest.mark.parametrize(
    ("ids", "first_position", "expected"),
    [
        ([], 0, (0, 0)),
        ([7], 0, (0xFFCB5C99F6AA8871, 0xEB1A59189C1E1EA6)),
        ([1, 2, 3], 0, (0xC2940FCDDDA2A7FF, 0x2AA8F4A5B64E3621)),
        ([2, 1, 3], 0, (0x1CEA02C6BD87E8EF, 0x01B0B44863A033D3)),
        ([1, 2, 3], 5, (0x0BDD49F9A6CAD29A, 0x2BF08CE0A5F79F92)),
        ([(1 << 40) + 5, -1], 1 << 31, (0x5B5A37F408DADA63, 0xCF054FCE9D38AA64)),
    ],
)
def test_proof_golden(ids: list[int], first_position: int, expected: tuple[int, int]) -> None:
    assert prompt_proof(np.array(ids, np.int64), first_position, SEED) == expected


def test_row_sums_golden() -> None:
    rows = np.arange(12, dtype=np.uint64).reshape(2, 3, 2)
    assert row_sums(rows, np.array([4, 5])).tolist() == [0x44716B2C3557A42A, 0x6208B7C391DB1B38]


def test_header_check_golden_covers_words_0_to_10() -> None:
    words = np.arange(16, dtype=np.uint64)
    assert header_check(words) == 0x41A2FC5A26170BD2
    for word in range(16):
        changed = words.copy()
        changed[word] ^= np.uint64(1 << 63)
        assert (header_check(changed) != header_check(words)) == (word < 11)


def test_table_id_golden_names_bytes_and_shape() -> None:
    assert table_id(np.arange(16, dtype=np.uint8).reshape(2, 8)) == 0x97D7939A3D4482FF
    assert table_id(np.zeros((1, 8), np.uint8)) == 0x2284F424C48DBC7E
    assert table_id(np.zeros((8, 16), np.uint8)) == 0x5AEC1DEAA64AEBC6
    assert table_id(np.zeros((16, 8), np.uint8)) == 0x98848D65ECA97C58


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=40), st.integers(0, (1 << 31) - 41), st.tuples(u64, u64)
)
def test_proof_is_the_plain_sum(ids: list[int], first_position: int, seed: tuple[int, int]) -> None:
    positions = range(first_position, first_position + len(ids))
    assert prompt_proof(np.array(ids, np.int64), first_position, seed) == batches.proof(ids, positions, seed)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_proofs_of_chunks_add_up(data: st.DataObject) -> None:
    ids = np.array(data.draw(st.lists(st.integers(0, 200_000), max_size=60)), np.int64)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    total = (0, 0)
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        total = add_proofs(total, prompt_proof(ids[start:end], start, SEED))
    assert total == prompt_proof(ids, 0, SEED)


def test_proof_tells_what_a_mix_up_changes() -> None:
    ids = np.array([5, 5, 9, 5], np.int64)
    good = prompt_proof(ids, 0, SEED)
    assert tokens_proof(ids, np.array([0, 1, 3, 2]), SEED) != good  # two positions exchanged
    assert prompt_proof(ids[:3], 0, SEED) != good  # a row too few
    assert prompt_proof(ids, 1, SEED) != good  # shifted by one
    assert prompt_proof(ids, 0, (SEED[0], SEED[1] + 1)) != good  # another run's seed


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 6), st.integers(1, 8), st.integers(1, 9), st.integers(0, (1 << 31) - 8), st.randoms())
def test_row_sums_are_the_plain_sum(n: int, layers: int, width: int, first_position: int, random: Random) -> None:
    rows = np.random.default_rng(random.getrandbits(32)).integers(0, 1 << 64, (n, layers, width), np.uint64)
    positions = np.arange(first_position, first_position + n)
    expected = [
        batches.row_sum([layer.tobytes() for layer in row], int(p)) for row, p in zip(rows, positions, strict=True)
    ]
    assert row_sums(rows, positions).tolist() == expected


def test_row_sums_tell_swapped_rows_and_layers() -> None:
    rows = np.random.default_rng(3).integers(0, 1 << 64, (4, 3, 5), np.uint64)
    positions = np.arange(10, 14)
    good = row_sums(rows, positions)
    assert (row_sums(rows[[1, 0, 2, 3]], positions) != good).tolist() == [True, True, False, False]
    assert (row_sums(rows[:, [0, 2, 1]], positions) != good).all()
    assert (row_sums(rows, positions + 1) != good).all()
    assert (row_sums(rows[2:3], positions[2:3]) == good[2:3]).all()  # a slice is checked alone
