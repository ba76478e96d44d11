"""Launching the gather: one kernel, one small upload, no allocation and no wait.

:class:`Gather` is what a server keeps; :func:`gather` is the same for a single call.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton

from hashtap_kernels import gather_kernel as kernel
from hashtap_kernels.contract import check_batch, check_table, row_alignment
from hashtap_kernels.layout import FRAME_VERSION, HEADER_BYTES, Dtype, Geometry, Payload
from hashtap_kernels.plan import FramePlan
from hashtap_kernels.proof import table_id

__all__ = ["NUM_WARPS", "Gather", "compile_constants", "control_words", "gather"]

U8Array = npt.NDArray[np.uint8]
I64Array = npt.NDArray[np.int64]

NUM_WARPS = 4
# Many more than can be resident at once, so that the last of them to finish leave no gap.
_PROGRAMS_PER_PROCESSOR = 32
# Words that one program loads at once: 8 loads of 16 bytes in flight in each of its 128 threads.
_TILE_WORDS = 2048


def compile_constants(geometry: Geometry, payload: Payload) -> dict[str, Any]:
    """What the kernel is compiled for: its compile-time arguments by name."""
    row_words = geometry.hidden * geometry.dtype.element_bytes // 8
    layers_padded = triton.next_power_of_2(geometry.layers)
    return {
        "L": geometry.layers,
        "LP": layers_padded,
        "W": row_words,
        "H": geometry.hidden,
        "SHAPE_WORD": (
            FRAME_VERSION | HEADER_BYTES << 16 | geometry.dtype << 32 | payload << 40 | geometry.layers << 48
        ),
        "PLANES": payload == Payload.PLANES,
        "SOURCE_ALIGN": row_alignment(geometry),
        "BW": min(_TILE_WORDS // layers_padded, triton.next_power_of_2(row_words)),
    }


def control_words(
    sources: Sequence[torch.Tensor],
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    plan: FramePlan,
    *,
    seed: tuple[int, int],
    table_id: int,
    forward: int,
) -> I64Array:
    """The control array of one launch, int64 ``[DESCRIPTORS + F x COLUMNS]``: see ``gather_kernel``."""
    words = np.zeros(kernel.DESCRIPTORS.value + plan.descriptors.size, np.int64)
    bits = words.view(np.uint64)
    words[kernel.FRAMES.value] = len(plan)
    words[kernel.ROWS.value] = plan.rows
    bits[kernel.SEED0.value], bits[kernel.SEED1.value] = seed
    bits[kernel.TABLE.value] = table_id
    bits[kernel.FORWARD.value] = forward
    words[kernel.INPUT_IDS.value] = input_ids.data_ptr()
    words[kernel.POSITIONS.value] = positions.data_ptr()
    for layer, source in enumerate(sources):
        words[kernel.SOURCES.value + layer] = source.data_ptr()
        words[kernel.STRIDES.value + layer] = source.stride(0) * source.element_size() // 8
    words[kernel.DESCRIPTORS.value :] = plan.descriptors.reshape(-1)
    return words


class Gather:
    """Gathers batches of one geometry into frames on one device; all it needs is allocated at once.

    Launches and :meth:`set_table` must come from one stream, in order: they share the control array on the device.
    """

    def __init__(
        self, geometry: Geometry, device: torch.device | str, max_frames: int, *, programs: int = 0, uploads: int = 16
    ) -> None:
        """
        Args:
            geometry: L, H and dtype of every batch.
            device: where the sources lie: a GPU, or the CPU when Triton interprets its kernels.
            max_frames: most frames of one launch.
            programs: most programs of one launch; 0 for 32 on each of the GPU's processors.
            uploads: launches that may be under way before the host has to wait for the first of them.

        Raises:
            ValueError: when ``device`` is the CPU and Triton compiles its kernels.
        """
        self.geometry = geometry
        self.device = _with_index(torch.device(device))
        self.max_frames = max_frames
        if self.device.type == "cpu" and isinstance(kernel.gather_kernel, triton.JITFunction):
            raise ValueError(
                "the gather kernel runs on a GPU; on a CPU use gather_reference, or set TRITON_INTERPRET=1"
            )
        self._programs = programs or _default_programs(self.device)
        self._control = _Upload(kernel.DESCRIPTORS.value + max_frames * kernel.COLUMNS.value, self.device, uploads)
        self._table = _Upload(geometry.layers * geometry.hidden // 8, self.device, 2)
        self._table_id = 0
        self._constants = {payload: compile_constants(geometry, payload) for payload in (Payload.RAW, Payload.PLANES)}

    def set_table(self, table: U8Array | None) -> None:
        """Gather PLANES centred on ``table`` (uint8 ``[L, H]``) from the next launch on; None for RAW, as at first.

        Raises:
            TypeError, ValueError: when the table does not fit the geometry.
        """
        if table is None:
            self._table_id = 0
            return
        check_table(table, self.geometry)
        self._table.send(np.ascontiguousarray(table).reshape(-1).view(np.int64))
        self._table_id = table_id(table)

    def warm_up(self) -> None:
        """Compile and load every form of the kernel, so that no later launch does."""
        self._control.send(np.zeros(kernel.DESCRIPTORS.value, np.int64))
        self._run(Payload.RAW, self._control.bytes, 1)
        if self.geometry.dtype in (Dtype.BF16, Dtype.FP16):
            self._run(Payload.PLANES, self._control.bytes, 1)

    def launch(
        self,
        sources: Sequence[torch.Tensor],
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        plan: FramePlan,
        out: torch.Tensor,
        *,
        seed: tuple[int, int],
        forward: int,
    ) -> None:
        """Start gathering the planned rows into ``out``, on the current stream. It does not wait.

        Args: as of :func:`~.reference.gather_reference`, but tensors on this device (``out`` may be pinned memory).
            They must stay as they are until the launch has run; the same stream sees to that.

        Raises:
            TypeError, ValueError: when the arguments do not fit, see :mod:`~.contract`, or there are too many frames.
        """
        check_batch(sources, input_ids, positions, plan, out, self.geometry)
        if sources[0].device != self.device:
            raise ValueError(f"the sources lie on {sources[0].device}, this gather works on {self.device}")
        if len(plan) > self.max_frames:
            raise ValueError(f"{len(plan)} frames: this gather was made for at most {self.max_frames} a launch")
        if not plan.rows:
            return
        arguments = (sources, input_ids, positions, plan)
        self._control.send(control_words(*arguments, seed=seed, table_id=self._table_id, forward=forward))
        self._run(Payload.PLANES if self._table_id else Payload.RAW, out, min(plan.rows, self._programs))

    def _run(self, payload: Payload, out: torch.Tensor, programs: int) -> None:
        words, table, constants = self._control.words, self._table.bytes, self._constants[payload]
        kernel.gather_kernel[(programs,)](words, table, out, **constants, num_warps=NUM_WARPS)


def gather(
    sources: Sequence[torch.Tensor],
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    plan: FramePlan,
    out: torch.Tensor,
    *,
    geometry: Geometry,
    seed: tuple[int, int],
    table: U8Array | None,
    forward: int,
) -> None:
    """Gather once: :func:`~.reference.gather_reference`, by the kernel. A server keeps a :class:`Gather` instead."""
    once = Gather(geometry, sources[0].device, max(1, len(plan)), uploads=1)
    once.set_table(table)
    once.launch(sources, input_ids, positions, plan, out, seed=seed, forward=forward)


class _Upload:
    """An int64 array on the device, and the pinned buffers that it is written from in turn."""

    def __init__(self, size: int, device: torch.device, buffers: int) -> None:
        self.words = torch.zeros(size, dtype=torch.int64, device=device)
        self.bytes = self.words.view(torch.uint8)
        self._buffers: list[tuple[torch.Tensor, I64Array, torch.cuda.Event]] = []
        if device.type != "cpu":
            for buffer in torch.zeros((buffers, size), dtype=torch.int64, pin_memory=True):
                self._buffers.append((buffer, buffer.numpy(), torch.cuda.Event()))  # type: ignore[no-untyped-call]
        self._turn = 0

    def send(self, words: I64Array) -> None:
        """Write the array's first words, on the current stream, without waiting for it."""
        if not self._buffers:
            self.words.numpy()[: len(words)] = words
            return
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer, writable, sent = self._buffers[self._turn]
        # Only a host that is a whole round of buffers ahead of the device waits here.
        if not sent.query():  # type: ignore[no-untyped-call]
            sent.synchronize()
        writable[: len(words)] = words
        self.words[: len(words)].copy_(buffer[: len(words)], non_blocking=True)
        sent.record()


def _with_index(device: torch.device) -> torch.device:
    """``cuda`` is the current GPU, by its number: so tensors say it."""
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def _default_programs(device: torch.device) -> int:
    if device.type == "cpu":
        return 4
    return _PROGRAMS_PER_PROCESSOR * int(torch.cuda.get_device_properties(device).multi_processor_count)
