"""The mixing behind every checksum of a frame, in NumPy.

One definition for all: the Triton kernel, its reference, the writer and the reader follow it.
Everything is unsigned 64-bit arithmetic that wraps.

None of it is a security hash: the proof is additive, so that chunks add up, and whoever knows the
seed can build a second prompt with the same proof.
"""

import numpy as np
import numpy.typing as npt

from hashtap_kernels.layout import CHECKED_WORDS

__all__ = [
    "M0",
    "M1",
    "P0",
    "P1",
    "add_proofs",
    "header_check",
    "mix64",
    "prompt_proof",
    "row_sums",
    "table_id",
    "tokens_proof",
]

M0 = 0xBF58476D1CE4E5B9
M1 = 0x94D049BB133111EB
P0 = 0x9E3779B97F4A7C15
P1 = 0xD6E8FEB86659FD93
_MASK = (1 << 64) - 1
_M0, _M1 = np.uint64(M0), np.uint64(M1)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_WORD_PLACES = np.arange(CHECKED_WORDS, dtype=np.uint64) * np.uint64(P0) + np.uint64(1)

U64Array = npt.NDArray[np.uint64]
I64Array = npt.NDArray[np.int64]


def mix64(x: U64Array) -> U64Array:
    """Mix every word of ``x`` (uint64, any shape): a bijection in which each bit sways all others."""
    shifted = x >> _SHIFTS[0]
    mixed = x ^ shifted
    mixed *= _M0
    np.right_shift(mixed, _SHIFTS[1], out=shifted)
    mixed ^= shifted
    mixed *= _M1
    np.right_shift(mixed, _SHIFTS[2], out=shifted)
    mixed ^= shifted
    return mixed


def prompt_proof(token_ids: I64Array, first_position: int, seed: tuple[int, int]) -> tuple[int, int]:
    """The proof of consecutive tokens, the first of them at ``first_position``: see :func:`tokens_proof`."""
    positions = np.arange(first_position, first_position + len(token_ids), dtype=np.int64)
    return tokens_proof(token_ids, positions, seed)


def tokens_proof(token_ids: I64Array, positions: I64Array, seed: tuple[int, int]) -> tuple[int, int]:
    """The proof that these tokens stand at these positions.

    Args:
        token_ids: int64 ``[n]``; the low 32 bits of each count.
        positions: int64 ``[n]``, each token's position in the prompt.
        seed: two 64-bit numbers, drawn once a run.

    Returns:
        Two 64-bit lanes. The proofs of a prompt's chunks add up to the whole prompt's, see :func:`add_proofs`.
    """
    x = (positions.astype(np.uint64) << np.uint64(32)) | (token_ids.astype(np.uint64) & np.uint64(0xFFFFFFFF))
    lanes = np.empty((2, len(x)), np.uint64)
    np.add(x, np.uint64(seed[0]), out=lanes[0])
    np.bitwise_xor(x * np.uint64(P1), np.uint64(seed[1]), out=lanes[1])
    lane0, lane1 = np.add.reduce(mix64(lanes), axis=1).tolist()
    return lane0, lane1


def add_proofs(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """The proof of two disjoint sets of tokens taken together; ``(0, 0)`` is the proof of none."""
    return (a[0] + b[0]) & _MASK, (a[1] + b[1]) & _MASK


def row_sums(rows: U64Array, positions: I64Array) -> U64Array:
    """One checksum for each token row, keyed with its position and layer.

    Args:
        rows: uint64 ``[n, L, W]``, the element values of the rows as W = H x element bytes / 8 words
            (of the values themselves, also where the frame holds planes).
        positions: int64 ``[n]``, each row's position in the prompt as its frame states it.

    Returns:
        uint64 ``[n]``. A swap of rows or of layers shows; a permutation inside one layer's row does not.
    """
    layers = np.arange(1, rows.shape[1] + 1, dtype=np.uint64)
    place = positions.astype(np.uint64)[:, None] * np.uint64(8) + layers
    sums = np.add.reduce(rows, axis=2)
    checksums: U64Array = np.add.reduce(mix64(sums ^ (place * np.uint64(P0))), axis=1)
    return checksums


def header_check(words: U64Array) -> int:
    """The self-check (word 15) of a frame header, from its words 0 to 10.

    Args:
        words: uint64, at least the first :data:`~.layout.CHECKED_WORDS` words of the header.
    """
    return int(np.add.reduce(mix64(words[:CHECKED_WORDS] + _WORD_PLACES)))


def table_id(table: npt.NDArray[np.uint8]) -> int:
    """The id of a reference-exponent table: a 64-bit hash of its bytes and shape, never 0.

    Args:
        table: uint8 ``[L, H]``, L x H a multiple of 8.
    """
    words = np.ascontiguousarray(table).reshape(-1).view(np.uint64)
    index = np.arange(1, words.size + 1, dtype=np.uint64)
    total = mix64(words ^ (index * np.uint64(P0))).sum(dtype=np.uint64, keepdims=True)
    layers, hidden = table.shape
    return int(mix64(total + np.uint64(layers << 32 | hidden))[0]) or 1
