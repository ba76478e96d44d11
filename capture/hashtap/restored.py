"""Captured states on a trainer's device: planes are uploaded as they are stored, and joined there by the kernel.

The CPU decodes the exponents, and never touches the single element.
"""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hashtap.frame import StoredFrame, Table
from hashtap_kernels.layout import MAX_FRAME_TOKENS, Geometry, Payload

if TYPE_CHECKING:
    import torch

__all__ = ["Restorer"]


class Restorer:
    """Writes the element values of stored frames to a tensor on its device.

    Args:
        out: receives the states ``[T, L, H]``, contiguous, of the geometry's dtype.
        geometry: L, H and dtype.
    """

    def __init__(self, out: "torch.Tensor", geometry: Geometry) -> None:
        import torch

        self._out, self._row_bytes = out, geometry.row_bytes
        size = MAX_FRAME_TOKENS * geometry.row_bytes
        # Sections of a shard lie in a read-only map at any address: they cross in memory that the device can reach.
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=out.is_cuda)
        self._device = torch.empty(size, dtype=torch.uint8, device=out.device)
        self._tables: dict[int, torch.Tensor] = {}

    def put(self, frame: StoredFrame, start: int, rows: int, table: Table | None) -> None:
        """Write the first ``rows`` rows of ``frame`` to ``out[start : start + rows]``; PLANES need their ``table``.

        Raises:
            FormatError: when the coded section cannot be decoded.
        """
        import torch

        target = self._out[start : start + rows]
        coded = frame.plain()
        if frame.header.payload is Payload.RAW:
            size = rows * self._row_bytes
            self._upload(0, coded[:size])
            target.view(torch.uint8).view(-1).copy_(self._device[:size])
            return
        from hashtap_kernels.restore import restore

        assert table is not None
        size, half = rows * self._row_bytes // 2, len(self._device) // 2
        self._upload(0, coded[:size])
        self._upload(half, frame.rest[:size])
        exponents, rests = (self._device[at : at + size].view(target.shape) for at in (0, half))
        restore(exponents, rests, self._table(frame.header.table, table), target)

    def _upload(self, at: int, section: npt.NDArray[np.uint8]) -> None:
        part = slice(at, at + len(section))
        self._host.numpy()[part] = section
        self._device[part].copy_(self._host[part])  # waits, so that the next section may take the same memory

    def _table(self, identity: int, table: Table) -> "torch.Tensor":
        import torch

        if identity not in self._tables:
            self._tables[identity] = torch.tensor(table, device=self._out.device)
        return self._tables[identity]
