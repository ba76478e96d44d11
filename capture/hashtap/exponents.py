"""The table of reference exponents that PLANES frames are centred by: one a run, from its first captured rows.

The exponent of a Gaussian has about 2.54 bits whatever its scale, so once each channel's own exponent is taken off,
all channels share one distribution and one Huffman table serves them. The high byte of a rotated float16 holds three
bits of its mantissa as well, so there is less to gain; what is taken off is put back, whatever it was.
"""

import threading

import numpy as np
import numpy.typing as npt

from hashtap.frame import Table
from hashtap_kernels.layout import Geometry
from hashtap_kernels.proof import table_id

__all__ = ["TABLE_ROWS", "TableBuilder"]

TABLE_ROWS = 1024
"""Rows that a table is made from; 64 give 1.480 where 256 give 1.491, and more than that hardly gains."""


class TableBuilder:
    """Collects exponents until there are ``rows`` token rows, then keeps each channel's commonest one. Thread safe."""

    def __init__(self, geometry: Geometry, rows: int = TABLE_ROWS) -> None:
        self._seen = np.empty((rows, geometry.layers, geometry.hidden), np.uint8)
        self._seen_rows = 0
        self._made: dict[int, Table] = {}
        self._lock = threading.Lock()
        self.table: Table | None = None
        """The run's table, uint8 ``[L, H]``, once there are enough rows."""

    def observe(self, rows: npt.NDArray[np.uint16]) -> None:
        """Take in 16-bit elements ``[n, L, H]``; they are copied. Ignored once there is a table."""
        if self.table is not None:
            return
        with self._lock:
            room = self._seen[self._seen_rows :]
            exponents = (rows[: len(room)] >> 7).astype(np.uint8)  # the high byte of the bits rotated left by one
            room[: len(exponents)] = exponents
            self._seen_rows += len(exponents)
            if self.table is None and self._seen_rows == len(self._seen):
                self._use(_commonest(self._seen))

    def adopt(self, table: Table) -> None:
        """Make this table, uint8 ``[L, H]``, the run's; one that was made before is still known by its id."""
        with self._lock:
            self._use(table)

    def _use(self, table: Table) -> None:
        self._made[table_id(table)] = table
        self.table = table
        self._seen = self._seen[:0].copy()

    def by_id(self, identity: int) -> Table:
        """The table with this id, uint8 ``[L, H]``.

        Raises:
            KeyError: when this run made no such table.
        """
        return self._made[identity]


def _commonest(exponents: npt.NDArray[np.uint8]) -> Table:
    """The commonest value of each channel, uint8 ``[L, H]``, of ``[n, L, H]``; the lowest one where several tie."""
    layers, hidden = exponents.shape[1:]
    channel = np.arange(hidden, dtype=np.int64) * 256
    table = np.empty((layers, hidden), np.uint8)
    for layer in range(layers):
        counts = np.bincount((exponents[:, layer] + channel).ravel(), minlength=256 * hidden)
        table[layer] = counts.reshape(hidden, 256).argmax(axis=1)
    return table
