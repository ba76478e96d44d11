"""From a GPU into the ring: one launch on the forward's stream, one copy on a side stream, one event.

The kernel gathers into a staging slot on the device, so the layer tensors are held for the kernel's
time and not for the link's. Nothing here waits: the forward's stream waits on the device when all
slots are still being copied, the thread that hands flights to the writers waits for a flight's event.
"""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hashtap.errors import SetupError
from hashtap.ring_memory import Bytes
from hashtap_kernels.layout import Geometry
from hashtap_kernels.plan import FramePlan

__all__ = ["Cuda", "GatherLaunch", "Slot", "StagedTransport", "open_staged"]

SLOTS = 2
DEVICE_SHARE = 8  # staging may take one part in so many of the device's memory


class Cuda(Protocol):
    """What is used of ``torch.cuda``; tests put a recording one in its place."""

    def Stream(self) -> Any: ...  # noqa: N802
    def Event(self) -> Any: ...  # noqa: N802
    def current_stream(self) -> Any: ...
    def stream(self, stream: Any) -> AbstractContextManager[Any]: ...


class GatherLaunch(Protocol):
    """What is used of :class:`hashtap_kernels.Gather`."""

    def set_table(self, table: Bytes | None) -> None: ...
    def launch(
        self,
        sources: Sequence[Any],
        input_ids: Any,
        positions: Any,
        plan: FramePlan,
        out: Any,
        *,
        seed: tuple[int, int],
        forward: int,
    ) -> None: ...


@dataclass(slots=True)
class Slot:
    """One staging buffer on the device, uint8 ``[stage_bytes]``."""

    bytes: Any
    gathered: Any  # event: the frames are in it
    copied: Any  # event: it may be written again


class StagedTransport:
    """A :class:`hashtap.transport.Transport` for states on a GPU.

    Args:
        gather: launches the kernel on the current stream.
        slots: staging buffers of one size, at least two so that a gather and a copy can overlap.
        ring: the ring's pinned memory, a uint8 tensor ``[ring_bytes]``.
        seed: of the proofs.
        copy: copies a device tensor to a pinned one on the current stream, without waiting.
    """

    def __init__(
        self,
        gather: GatherLaunch,
        slots: Sequence[Slot],
        ring: Any,
        seed: tuple[int, int],
        cuda: Cuda,
        copy: Callable[[Any, Any], Any],
    ) -> None:
        self.memory: Bytes = ring.numpy()
        self._gather, self._slots, self._ring, self._seed = gather, deque(slots), ring, seed
        self._cuda, self._copy = cuda, copy
        self._stage_bytes = len(slots[0].bytes)
        self._side = cuda.Stream()
        self._idle_events: deque[Any] = deque()
        self._table: Bytes | None = None

    def ready(self) -> bool:
        """Whether the next staging slot is free, so that the next forward would not wait on the device."""
        return bool(self._slots[0].copied.query())

    def send(
        self,
        sources: Sequence[Any],
        input_ids: Any,
        positions: Any,
        plan: FramePlan,
        offset: int,
        *,
        table: Bytes | None,
        forward: int,
    ) -> Callable[[], None]:
        if offset < 0 or offset + plan.bytes > len(self.memory):
            raise ValueError(f"{plan.bytes} bytes at {offset} do not lie in a ring of {len(self.memory)}")
        parts = [plan] if plan.bytes <= self._stage_bytes else plan.split(self._stage_bytes)
        if table is not self._table:
            self._gather.set_table(table)
            self._table = table
        stream = self._cuda.current_stream()
        for part in parts:
            slot = self._slots[0]
            self._slots.rotate(-1)
            stream.wait_event(slot.copied)
            self._gather.launch(sources, input_ids, positions, part, slot.bytes, seed=self._seed, forward=forward)
            slot.gathered.record(stream)
            self._side.wait_event(slot.gathered)
            with self._cuda.stream(self._side):
                self._copy(self._ring[offset : offset + part.bytes], slot.bytes[: part.bytes])
            slot.copied.record(self._side)
            offset += part.bytes
        done = self._idle_events.popleft() if self._idle_events else self._cuda.Event()
        done.record(self._side)
        return lambda: self._await(done)

    def _await(self, done: Any) -> None:
        done.synchronize()
        self._idle_events.append(done)


def open_staged(
    device: str, geometry: Geometry, memory: Bytes, stage_bytes: int, max_forward_tokens: int, seed: tuple[int, int]
) -> StagedTransport:
    """Pin the ring, allocate staging and compile the kernels for a GPU; call it before the KV cache is sized.

    The arguments are those of :func:`hashtap.transport.open_transport`.

    Raises:
        SetupError: when the memory cannot be had, or staging would take too much of the device.
    """
    from hashtap_kernels import Gather

    _, total = torch.cuda.mem_get_info(device)
    if SLOTS * stage_bytes > total // DEVICE_SHARE:
        raise SetupError(
            f"--capture-stage-mib {stage_bytes >> 20}: {SLOTS} slots would take more than 1/{DEVICE_SHARE} of the "
            f"device's {total / 2**30:.0f} GiB; give less, a larger forward is then captured in several launches"
        )
    if stage_bytes < geometry.frame_bytes(256):
        raise SetupError(
            f"--capture-stage-mib {stage_bytes >> 20} is less than one frame of {geometry.frame_bytes(256)} bytes: "
            "give more"
        )
    cuda: Cuda = torch.cuda
    with torch.cuda.device(device):
        ring = torch.from_numpy(memory)
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(ring.data_ptr(), ring.nbytes, 0)
        if int(status) != 0:
            raise SetupError(
                f"--capture-ring-gib {ring.nbytes / 2**30:g} of memory cannot be pinned ({status}): give a smaller "
                "ring, or raise the limit on locked memory (ulimit -l)"
            )
        slots = [
            Slot(torch.empty(stage_bytes, dtype=torch.uint8, device=device), cuda.Event(), cuda.Event())
            for _ in range(SLOTS)
        ]
        gather = Gather(geometry, device, max_forward_tokens)
        gather.warm_up()
        torch.cuda.synchronize()
    transport = StagedTransport(gather, slots, ring, seed, cuda, _copy)
    # Memory that is unmapped while it is pinned could not be pinned again.
    weakref.finalize(transport, runtime.cudaHostUnregister, ring.data_ptr()).atexit = False
    return transport


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
