"""Four two-byte elements at a time: the steps between elements and planes, on the device, in whole words.

A uint64 holds four elements as 16-bit lanes; a uint32 holds four bytes of a plane. No carry or borrow leaves its lane.
"""

# Triton gives its own meaning to annotations.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

__all__ = ["minus_bytes", "pack_low_bytes", "plus_bytes", "rotate_left", "rotate_right", "spread_bytes"]


@triton.jit
def rotate_left(x):
    """Each lane rotated left by one: the exponent in its high byte, mantissa and sign in its low one."""
    return ((x << 1) & 0xFFFEFFFEFFFEFFFE) | ((x >> 15) & 0x0001000100010001)


@triton.jit
def rotate_right(x):
    return ((x >> 1) & 0x7FFF7FFF7FFF7FFF) | ((x << 15) & 0x8000800080008000)


@triton.jit
def pack_low_bytes(x):
    """The low bytes of the four lanes, uint64 to uint32."""
    x = x & 0x00FF00FF00FF00FF
    x = (x | (x >> 8)) & 0x0000FFFF0000FFFF
    return (x | (x >> 16)).to(tl.uint32)


@triton.jit
def spread_bytes(x):
    """The inverse of ``pack_low_bytes``, uint32 to uint64."""
    x = x.to(tl.uint64)
    x = (x | (x << 16)) & 0x0000FFFF0000FFFF
    return (x | (x << 8)) & 0x00FF00FF00FF00FF


@triton.jit
def minus_bytes(a, b):
    """Each byte of ``a`` minus that of ``b`` modulo 256, uint32."""
    return ((a | 0x80808080) - (b & 0x7F7F7F7F)) ^ ((a ^ b ^ 0x80808080) & 0x80808080)


@triton.jit
def plus_bytes(a, b):
    """Each byte of ``a`` plus that of ``b`` modulo 256, uint32."""
    return ((a & 0x7F7F7F7F) + (b & 0x7F7F7F7F)) ^ ((a ^ b) & 0x80808080)
