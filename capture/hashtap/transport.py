"""How rows get from the device that computed them into the ring.

The session asks a transport to write the frames of one forward into a range of the ring and gets back
a function that waits until they are there. On a CPU the reference writes them in place.
"""

import mmap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hashtap.config import CaptureConfig
from hashtap.errors import SetupError
from hashtap_kernels import gather_reference
from hashtap_kernels.layout import Geometry
from hashtap_kernels.plan import FramePlan

__all__ = ["HostTransport", "Transport", "open_transport"]

Bytes = npt.NDArray[np.uint8]


class Transport(Protocol):
    """Writes frames into host memory that it owns."""

    memory: Bytes
    """The ring's memory, uint8 ``[ring_bytes]``."""

    def ready(self) -> bool:
        """Whether another forward can be sent without waiting for the device."""

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
        """Write the plan's frames to ``memory[offset:]``; returns a function that waits until they are there.

        Args:
            sources: L tensors ``[>= rows, H]``, the boundaries in order and then the final state.
            input_ids, positions: int64 ``[>= rows]``, what the forward pass consumed.
            plan: which rows go to which frames.
            offset: where the frames start in ``memory``, in bytes.
            table: reference exponents uint8 ``[L, H]``, or None for RAW payloads.
            forward: number of the forward pass.

        Raises:
            TypeError, ValueError: before anything is written, when the tensors do not fit the plan, see
                :mod:`hashtap_kernels.contract`, or the frames the memory.
        """


class HostTransport:
    """For states that lie in host memory: the reference copies them straight into the ring."""

    def __init__(self, geometry: Geometry, ring_bytes: int, seed: tuple[int, int]) -> None:
        self.memory = _resident_memory(ring_bytes)
        self._geometry = geometry
        self._seed = seed

    def ready(self) -> bool:
        return True

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
        out = self.memory[offset : offset + plan.bytes]
        gather_reference(
            sources,
            input_ids,
            positions,
            plan,
            out,
            geometry=self._geometry,
            seed=self._seed,
            table=table,
            forward=forward,
        )
        return _already_there


def open_transport(
    device: str, geometry: Geometry, config: CaptureConfig, max_forward_tokens: int, seed: tuple[int, int]
) -> Transport:
    """The transport for states on ``device``, ``cpu`` or ``cuda[:n]``. Call it before the KV cache is sized.

    Raises:
        SetupError: when the device is not supported or memory cannot be had.
    """
    if device == "cpu":
        return HostTransport(geometry, config.ring_bytes, seed)
    if device.split(":")[0] != "cuda":
        raise SetupError(f"states on {device!r} cannot be captured: hashtap knows cuda and cpu")
    from hashtap.staging import open_staged

    return open_staged(device, geometry, config.ring_bytes, config.stage_bytes, max_forward_tokens, seed)


def _already_there() -> None:
    """The reference is done when it returns."""


def _resident_memory(size_bytes: int) -> Bytes:
    """Memory that is there from the start, so that it neither grows while serving nor fails late."""
    free_bytes = _available_bytes()
    if size_bytes > free_bytes:
        raise SetupError(
            f"--capture-ring-gib {size_bytes / 2**30:g} asks for more than the {free_bytes / 2**30:.1f} GiB of memory "
            "that are free: give a smaller ring"
        )
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
    try:
        return np.frombuffer(mmap.mmap(-1, size_bytes, flags=flags), np.uint8)
    except (OSError, ValueError) as error:
        raise SetupError(
            f"--capture-ring-gib {size_bytes / 2**30:g} cannot be had ({error}): give a smaller ring"
        ) from error


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise SetupError("/proc/meminfo does not tell how much memory is free: hashtap captures on Linux only")
