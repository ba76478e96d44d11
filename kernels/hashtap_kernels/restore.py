"""Planes back to elements: for a trainer, on its GPU, and in plain NumPy."""

from typing import Any

import torch
import triton

from hashtap_kernels.planes import from_planes
from hashtap_kernels.restore_kernel import restore_kernel

__all__ = ["compile_constants", "restore", "restore_reference"]

NUM_WARPS = 4
_PROGRAMS = 4096
# Groups of four elements that one program loads at once: 12 loads of 16 bytes in flight in each of its 128 threads.
_TILE_GROUPS = 2048


def compile_constants(layers: int, hidden: int) -> dict[str, Any]:
    """What the kernel is compiled for: its compile-time arguments by name."""
    groups = layers * hidden // 4
    return {"W": groups, "BW": min(_TILE_GROUPS, triton.next_power_of_2(groups))}


def restore(exponents: torch.Tensor, rests: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """Write the elements whose planes these are, on the current stream of their device.

    Args:
        exponents: the exponent plane, uint8 ``[n, L, H]``, contiguous.
        rests: the rest plane, uint8 ``[n, L, H]``, contiguous.
        table: reference exponents, uint8 ``[L, H]``, contiguous.
        out: receives the elements, bfloat16 or float16 ``[n, L, H]``, contiguous.

    Raises:
        TypeError: when a dtype is another one.
        ValueError: when shapes or devices differ, a tensor is not contiguous or lies on no multiple of 16 bytes, or
            H is not a multiple of 8; when they lie on the CPU and Triton compiles its kernels.
    """
    _check(exponents, rests, table, out)
    if out.device.type == "cpu" and isinstance(restore_kernel, triton.JITFunction):
        raise ValueError("the restore kernel runs on a GPU; on a CPU use restore_reference, or set TRITON_INTERPRET=1")
    rows, layers, hidden = out.shape
    if rows:
        programs = (min(rows, _PROGRAMS),)
        constants = compile_constants(layers, hidden)
        with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
            restore_kernel[programs](exponents, rests, table, out, rows, **constants, num_warps=NUM_WARPS)


def restore_reference(exponents: torch.Tensor, rests: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """The same as :func:`restore` for CPU tensors, in NumPy: the definition."""
    _check(exponents, rests, table, out)
    if len(out):
        from_planes(exponents.numpy(), rests.numpy(), table.numpy(), out.view(torch.uint16).numpy())


def _check(exponents: torch.Tensor, rests: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    if out.dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"the output is {out.dtype}: only bfloat16 and float16 have planes")
    if out.dim() != 3 or out.shape[2] % 8:
        raise ValueError(f"the output has shape {tuple(out.shape)}: it must be [n, L, H], H a multiple of 8")
    for name, tensor, shape in (
        ("exponent plane", exponents, out.shape),
        ("rest plane", rests, out.shape),
        ("table", table, out.shape[1:]),
    ):
        if tensor.dtype != torch.uint8:
            raise TypeError(f"the {name} is {tensor.dtype}: it must be uint8")
        if tensor.shape != shape:
            raise ValueError(f"the {name} has shape {tuple(tensor.shape)}, not {tuple(shape)}")
        if tensor.device != out.device:
            raise ValueError(f"the {name} lies on {tensor.device}, the output on {out.device}")
    for name, tensor in (("exponent plane", exponents), ("rest plane", rests), ("table", table), ("output", out)):
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            raise ValueError(f"the {name} must be contiguous and start at a multiple of 16 bytes: copy it first")
