"""What can be wrong with values: rows that do not fit their checksums, NaN, inf, all-zero and constant rows."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from hashtap_kernels.layout import Dtype
from hashtap_kernels.proof import row_sums

__all__ = ["Ranges", "odd_rows", "ranges", "wrong_rows"]

Ranges = tuple[tuple[int, int], ...]
"""Half-open ranges of rows, ``(start, stop)``."""

BoolArray = npt.NDArray[np.bool_]

# The bits of a value without its sign, and what they are for inf. float8_e4m3fn has no inf: its one NaN follows 0x7E.
_BITS: dict[Dtype, tuple[type[np.unsignedinteger[Any]], int, int]] = {
    Dtype.BF16: (np.uint16, 0x7FFF, 0x7F80),
    Dtype.FP16: (np.uint16, 0x7FFF, 0x7C00),
    Dtype.FP32: (np.uint32, 0x7FFFFFFF, 0x7F800000),
    Dtype.FP8_E4M3: (np.uint8, 0x7F, 0x7E),
}


def wrong_rows(values: npt.NDArray[np.generic], first_position: int, sums: npt.NDArray[np.uint64]) -> BoolArray:
    """Which rows of ``values`` ``[n, L, H]``, the first at ``first_position``, do not fit their checksums ``[n]``."""
    rows = values.view(np.uint64)
    wrong: BoolArray = row_sums(rows, np.arange(first_position, first_position + len(rows))) != sums
    return wrong


def odd_rows(values: npt.NDArray[np.generic], dtype: Dtype) -> dict[str, BoolArray]:
    """Where rows of a layer look broken: ``[n, L]`` of bool for each of nan, inf, zero_rows and constant_rows.

    ``values`` are ``[n, L, H]``. Kinds that are nowhere are left out. A row of zeros is not called constant as well.
    """
    unsigned, magnitude_bits, inf = _BITS[dtype]
    bits = values.view(unsigned)
    magnitudes = bits & unsigned(magnitude_bits)
    largest = magnitudes.max(axis=2)
    odd: dict[str, BoolArray] = {}
    if (largest >= inf).any():
        # A NaN is larger than inf, so one can hide the other behind the maximum.
        odd["nan"] = largest > inf
        if dtype is not Dtype.FP8_E4M3:
            odd["inf"] = (magnitudes == inf).any(axis=2)
    zero = largest == 0
    odd["zero_rows"] = zero
    odd["constant_rows"] = _constant(bits) & ~zero
    return {kind: where for kind, where in odd.items() if where.any()}


def _constant(bits: npt.NDArray[np.unsignedinteger[Any]]) -> BoolArray:
    """Which rows ``[n, L]`` hold one value H times. Few pass the look at three of their elements."""
    first = bits[..., 0]
    constant: BoolArray = bits[..., 1] == first
    for place in (bits.shape[2] // 2, -1):
        constant &= bits[..., place] == first
    if constant.any():
        constant[constant] = (bits[constant] == first[constant][:, None]).all(axis=1)
    return constant


def ranges(rows: Iterable[int]) -> Ranges:
    """Ascending row numbers as half-open ranges.

    >>> ranges([3, 4, 5, 9])
    ((3, 6), (9, 10))
    """
    found: list[tuple[int, int]] = []
    for row in rows:
        if found and found[-1][1] == row:
            found[-1] = (found[-1][0], row + 1)
        else:
            found.append((row, row + 1))
    return tuple(found)
