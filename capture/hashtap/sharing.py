"""Which records count: of each key the first that is complete, the rows that it shares with others included."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["Sharing"]


class Sharing:
    """The records of one epoch whose own frames are all there, and which of them can be read whole.

    Args:
        rows: int64 ``[R]``, where they stand in ``table`` and ``keys``, in order of shard name.
        table: uint64 ``[N, RECORD_COLUMNS]``.
        keys: N of them.

    Attributes:
        first: by key the record that counts.
        orphans: records whose donor is missing, shorter than what they share, or in a circle with them.
    """

    def __init__(self, rows: npt.NDArray[np.int64], table: npt.NDArray[np.uint64], keys: Sequence[bytes]) -> None:
        self._table = table
        self._keys = keys
        backwards = rows[::-1].tolist()
        self.first = {keys[row]: row for row in backwards}  # of equal keys the first stays
        self.orphans: list[int] = []
        self._later: dict[bytes, list[int]] = {}  # by key, the next one last
        self._heirs: dict[bytes, list[int]] = {}  # by donor key
        if len(self.first) < len(backwards):
            for row in backwards:
                if self.first[keys[row]] != row:
                    self._later.setdefault(keys[row], []).append(row)
        sharing = rows[table[rows, 6] > 0].tolist()
        while sharing:
            self._check(sharing)
            sharing = self._break_circles()

    def _check(self, asked: list[int]) -> None:
        """Give up those whose donor does not do, and those that lean on them, until each that counts has one."""
        while asked:
            row = asked.pop()
            if not self._table[row, 6] or self.first.get(self._keys[row]) != row:
                continue
            key = self._donor_key(row)
            donor = self.first.get(key)
            if donor is not None and self._table[donor, 3] >= self._table[row, 6]:
                self._heirs.setdefault(key, []).append(row)
            else:
                asked += self._give_up(row)

    def _break_circles(self) -> list[int]:
        """Give up a record of each circle. Returns whom to ask again."""
        walk_of: dict[int, int] = {}
        found = []
        for walk, start in enumerate(row for rows in self._heirs.values() for row in rows):
            row: int | None = start
            while row is not None and self._table[row, 6] and row not in walk_of:
                walk_of[row] = walk
                row = self.first.get(self._donor_key(row))
            if row is not None and walk_of.get(row) == walk:
                found.append(row)
        return [again for row in found for again in self._give_up(row)]

    def _give_up(self, row: int) -> list[int]:
        """Let the next record of its key count. Returns whom to ask again."""
        key = self._keys[row]
        self.orphans.append(row)
        again = self._heirs.pop(key, [])
        if later := self._later.get(key):
            self.first[key] = later.pop()
            again.append(self.first[key])
        else:
            del self.first[key]
        return again

    def _donor_key(self, row: int) -> bytes:
        return self._table[row, 7:9].tobytes()
