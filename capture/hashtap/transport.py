"""How rows get from the device that computed them into the ring.

The session asks a transport to write the frames of one forward into a range of the ring and gets back
a function that waits until they are there. On a CPU the reference writes them in place.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hashtap.errors import SetupError
from hashtap.ring_memory import Bytes
from hashtap_kernels import gather_reference
from hashtap_kernels.layout import Geometry
from hashtap_kernels.plan import FramePlan

__all__ = ["HostTransport", "Transport", "open_transport"]


class Transport(Protocol):
    """Writes frames into the ring."""

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
    """For states that lie in host memory: the reference copies them straight into the ring's ``memory``."""

    def __init__(self, geometry: Geometry, memory: Bytes, seed: tuple[int, int]) -> None:
        self.memory = memory
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
    device: str, geometry: Geometry, memory: Bytes, stage_bytes: int, max_forward_tokens: int, seed: tuple[int, int]
) -> Transport:
    """The transport for states on ``device``, ``cpu`` or ``cuda[:n]``. Call it before the KV cache is sized.

    Args:
        memory: the ring's, uint8 ``[ring_bytes]``.
        stage_bytes: device memory of one staging slot.
        max_forward_tokens: the most prompt rows that one forward can bring.
        seed: of the proofs.

    Raises:
        SetupError: when the device is not supported, or its memory cannot be had.
    """
    if device == "cpu":
        return HostTransport(geometry, memory, seed)
    if device.split(":")[0] != "cuda":
        raise SetupError(f"states on {device!r} cannot be captured: hashtap knows cuda and cpu")
    from hashtap.staging import open_staged

    return open_staged(device, geometry, memory, stage_bytes, max_forward_tokens, seed)


def _already_there() -> None:
    """The reference is done when it returns."""
