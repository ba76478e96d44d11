"""The PLANES payload in NumPy: two-byte elements as a plane of exponents and a plane of rests.

Each element's bits are rotated left by one, so that the high byte holds the whole exponent of a
bfloat16 and the low byte its mantissa and sign. From the high byte a reference exponent is taken
away, modulo 256: what is left is small, and compresses. Lossless whatever the values.
"""

import threading

import numpy as np
import numpy.typing as npt

__all__ = ["from_planes", "to_planes"]

U8Array = npt.NDArray[np.uint8]
U16Array = npt.NDArray[np.uint16]

# Of elements that are worked on together. Each step takes the interpreter lock anew, and threads wait for it: so steps
# are few and long. Larger blocks would leave the cache.
_BLOCK_BYTES = 1 << 20
_ONE, _BYTE, _TO_TOP = np.uint16(1), np.uint16(8), np.uint16(15)


def to_planes(elements: U16Array, table: U8Array, exponents: U8Array, rests: U8Array) -> None:
    """Write the planes of ``elements`` (uint16 bit patterns ``[n, L, H]``).

    Args:
        table: reference exponents, uint8 ``[L, H]``.
        exponents: receives the exponent plane, uint8 ``[n, L, H]``.
        rests: receives the rest plane, uint8 ``[n, L, H]``.
    """
    step = _block_rows(elements)
    for start in range(0, len(elements), step):
        block = slice(start, start + step)
        rotated = (elements[block] << _ONE) | (elements[block] >> _TO_TOP)
        halves = rotated.view(np.uint8)
        np.subtract(halves[..., 1::2], table, out=exponents[block])
        rests[block] = halves[..., 0::2]


def from_planes(exponents: U8Array, rests: U8Array, table: U8Array, elements: U16Array) -> None:
    """Write back the elements (uint16 ``[n, L, H]``) whose planes these are: the inverse of :func:`to_planes`."""
    step = min(_block_rows(elements), len(elements))
    spare = _scratch.of(step * elements[:1].size)
    for start in range(0, len(elements), step or 1):
        block = elements[start : start + step]
        wide = spare[: block.size].reshape(block.shape)
        exponent = spare.view(np.uint8)[: block.size].reshape(block.shape)
        # Whole casts and nothing in the way of the vector units: mixed types in one step take twice as long.
        block[...] = np.add(exponents[start : start + step], table, out=exponent)
        block <<= _BYTE
        wide[...] = rests[start : start + step]
        block |= wide
        np.left_shift(block, _TO_TOP, out=wide)
        block >>= _ONE
        block |= wide


class _Scratch(threading.local):
    """Memory that a thread keeps: were it given back after each frame, the kernel would map it anew each time."""

    def __init__(self) -> None:
        self._elements = np.empty(0, np.uint16)

    def of(self, count: int) -> U16Array:
        if len(self._elements) < count:
            self._elements = np.empty(count, np.uint16)
        return self._elements[:count]


_scratch = _Scratch()


def _block_rows(elements: U16Array) -> int:
    return max(1, _BLOCK_BYTES // (elements[:1].nbytes or 1))
