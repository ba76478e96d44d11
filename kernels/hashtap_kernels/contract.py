"""What the kernels ask of their arguments, checked on the host before anything is launched.

A kernel trusts pointers: a wrong stride or a short buffer would be read silently, or fault far away.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hashtap_kernels.layout import Dtype, Geometry
from hashtap_kernels.plan import ROW, TOKENS, FramePlan

__all__ = ["TORCH_DTYPE", "Buffer", "check_batch", "check_table", "row_alignment"]

TORCH_DTYPE = {
    Dtype.BF16: torch.bfloat16,
    Dtype.FP16: torch.float16,
    Dtype.FP32: torch.float32,
    Dtype.FP8_E4M3: torch.float8_e4m3fn,
}

Buffer = torch.Tensor | npt.NDArray[np.uint8]
OUT_ALIGN = 16


def row_alignment(geometry: Geometry) -> int:
    """Bytes that a source row's address must be a multiple of: 16, or 8 where H elements are an odd number of words."""
    return 16 if geometry.hidden * geometry.dtype.element_bytes % 16 == 0 else 8


def check_batch(
    sources: Sequence[torch.Tensor],
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    plan: FramePlan,
    out: Buffer,
    geometry: Geometry,
) -> None:
    """Check that ``plan`` can be gathered from ``sources`` into ``out``.

    Raises:
        TypeError: when a dtype is not the geometry's, or ids, positions or output are of another type than asked for.
        ValueError: when a shape, stride, alignment, device or size does not do, or the plan is for another geometry.
    """
    plan.check(geometry)
    rows = int(plan.descriptors[:, ROW : TOKENS + 1].sum(axis=1).max()) if len(plan) else 0
    if len(sources) != geometry.layers:
        raise ValueError(f"{len(sources)} sources for {geometry.layers} layers: give one tensor a layer")
    align = row_alignment(geometry)
    for layer, source in enumerate(sources):
        _check_source(f"source {layer}", source, rows, geometry, align)
    for name, tensor in (("input_ids", input_ids), ("positions", positions)):
        if tensor.dtype != torch.int64:
            raise TypeError(f"{name} are {tensor.dtype}: they must be int64")
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"{name} have shape {tuple(tensor.shape)}: they must be contiguous and one-dimensional")
        if tensor.shape[0] < rows:
            raise ValueError(f"{name} have {tensor.shape[0]} entries, the plan reads {rows}")
    _check_out(out, plan.bytes)
    device = sources[0].device
    if {tensor.device for tensor in (*sources, input_ids, positions)} != {device}:
        raise ValueError("sources, input_ids and positions lie on different devices")
    _check_reachable(out, device)


def check_table(table: npt.NDArray[np.uint8], geometry: Geometry) -> None:
    """Check a reference-exponent table, uint8 ``[L, H]``.

    Raises:
        TypeError: when it is not uint8, or the geometry's dtype has no PLANES form.
        ValueError: when its shape is not ``[L, H]``.
    """
    if geometry.dtype not in (Dtype.BF16, Dtype.FP16):
        raise TypeError(f"{geometry.dtype.name} has no planes: gather it raw, without a table")
    if table.dtype != np.uint8:
        raise TypeError(f"the table is {table.dtype}: it must be uint8")
    if table.shape != (geometry.layers, geometry.hidden):
        raise ValueError(f"the table has shape {table.shape}, not {(geometry.layers, geometry.hidden)}")


def _check_source(name: str, source: torch.Tensor, rows: int, geometry: Geometry, align: int) -> None:
    if source.dtype != TORCH_DTYPE[geometry.dtype]:
        raise TypeError(f"{name} is {source.dtype}, not {TORCH_DTYPE[geometry.dtype]} as the geometry says")
    shape, strides = source.shape, source.stride()  # asked once: each question to a tensor takes its time
    if len(shape) != 2 or shape[1] != geometry.hidden or (shape[0] and strides[1] != 1):
        raise ValueError(
            f"{name} has shape {tuple(shape)} and strides {strides}: "
            f"it must be [rows, {geometry.hidden}] with stride 1 along a row"
        )
    if shape[0] < rows:
        raise ValueError(f"{name} has {shape[0]} rows, the plan reads {rows}")
    if source.data_ptr() % align or strides[0] * geometry.dtype.element_bytes % align:
        raise ValueError(f"{name}: its address and row stride in bytes must be multiples of {align}; copy it first")


def _check_reachable(out: Buffer, device: torch.device) -> None:
    """A kernel on ``device`` writes to the same device or to pinned host memory."""
    if isinstance(out, torch.Tensor) and out.device == device:
        return
    if isinstance(out, torch.Tensor) and out.device.type != "cpu":
        raise ValueError(f"the output lies on {out.device}, the sources on {device}")
    if device.type != "cpu" and not (isinstance(out, torch.Tensor) and out.is_pinned()):
        raise ValueError(f"the output lies in pageable memory: pin it, or gather into a tensor on {device}")


def _check_out(out: Buffer, size: int) -> None:
    if out.dtype not in (torch.uint8, np.uint8):
        raise TypeError(f"the output is {out.dtype}: it must be uint8")
    contiguous = out.is_contiguous() if isinstance(out, torch.Tensor) else out.flags.c_contiguous
    if out.ndim != 1 or not contiguous:
        raise ValueError(f"the output has shape {tuple(out.shape)}: it must be contiguous and one-dimensional")
    if out.shape[0] < size:
        raise ValueError(f"the output has {out.shape[0]} bytes, the plan writes {size}")
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise ValueError("the output is read-only")
    address = out.data_ptr() if isinstance(out, torch.Tensor) else out.ctypes.data
    if address % OUT_ALIGN:
        raise ValueError(f"the output's address must be a multiple of {OUT_ALIGN}")
