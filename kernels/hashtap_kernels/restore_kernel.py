"""The way back on the device: planes in, elements out. ``restore`` launches it."""

# Triton gives its own meaning to annotations.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from hashtap_kernels.lanes import plus_bytes, rotate_right, spread_bytes

__all__ = ["restore_kernel"]


@triton.jit(do_not_specialize=["rows"])
def restore_kernel(
    exponents,  # uint8 [rows, L, H]
    rests,  # uint8 [rows, L, H]
    table,  # uint8 [L, H]
    out,  # two-byte elements [rows, L, H]
    rows,
    W: tl.constexpr,  # groups of four elements in one row, L * H / 4
    BW: tl.constexpr,  # groups loaded at once
):
    """Write the elements whose planes these are. Any number of programs may run it."""
    exponents = exponents.to(tl.pointer_type(tl.uint32))
    rests = rests.to(tl.pointer_type(tl.uint32))
    table = table.to(tl.pointer_type(tl.uint32))
    out = out.to(tl.pointer_type(tl.uint64))
    PLANE_ALIGN: tl.constexpr = 16 if W % 4 == 0 else 8
    row = tl.program_id(0).to(tl.int64)
    while row < rows:
        exponent_row = tl.multiple_of(exponents + row * W, PLANE_ALIGN)
        rest_row = tl.multiple_of(rests + row * W, PLANE_ALIGN)
        out_row = tl.multiple_of(out + row * W, 16)
        for start in range(0, W, BW):
            group = start + tl.arange(0, BW)
            inside = group < W
            centred = tl.load(exponent_row + group, mask=inside, other=0)
            rest = tl.load(rest_row + group, mask=inside, other=0)
            reference = tl.load(table + group, mask=inside, other=0)
            rotated = (spread_bytes(plus_bytes(centred, reference)) << 8) | spread_bytes(rest)
            tl.store(out_row + group, rotate_right(rotated), mask=inside)
        row += tl.num_programs(0)
