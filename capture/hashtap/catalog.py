"""What the sealed shards of a directory hold, from their indices alone: which frames make up which record.

Frames and records are joined by writing run, epoch and serial, over all shards; file names play no part in it. A record
whose frames are not all there is listed as incomplete and never handed out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt

from hashtap.directory import CaptureDirectory
from hashtap.errors import FormatError
from hashtap.identity import KEY_BYTES
from hashtap.index_cache import Identity, identity_of, load_cache, store_cache
from hashtap.set_aside import Pass, load_set_aside
from hashtap.shard import RECORD_COLUMNS, Shard, read_shard
from hashtap.sharing import Sharing

__all__ = ["Catalog", "Entry", "Incomplete", "Piece"]

_Look = tuple[Identity, Shard | FormatError]
"""What tells a file from another of its name, and what was found in it."""

_WORTH_CACHING = 64
"""So many shards take longer to read than the cache."""

_LOW = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(32)


@dataclass(frozen=True, slots=True)
class Entry:
    """One record of one shard.

    Attributes:
        key: the prompt's key, 16 bytes.
        shard: where it is listed.
        serial: the pass that made it.
        total_tokens: length of the prompt, T.
        proof: of the whole prompt, two 64-bit lanes.
        shared_tokens: so many rows at its beginning are those of the record ``donor_key``.
        donor_key: 16 bytes; zeros when nothing is shared.
        salt_sum: of the key's salt, see :func:`hashtap.header.salt_sum`.
    """

    key: bytes
    shard: Shard
    serial: int
    total_tokens: int
    proof: tuple[int, int]
    shared_tokens: int
    donor_key: bytes
    salt_sum: int

    @property
    def epoch(self) -> str:
        """Which weights made it."""
        return self.shard.facts.epoch


@dataclass(frozen=True, slots=True)
class Incomplete:
    """A record that is listed but cannot be read whole."""

    entry: Entry
    reason: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows ``[start, stop)`` of a record: the first ``stop - start`` rows of frame ``row`` of ``shard``'s index."""

    shard: Shard
    row: int
    start: int
    stop: int


class Catalog:
    """The records of a directory's sealed shards.

    Args:
        directory: the capture directory.
        epoch: take only shards of this epoch; None takes all.
        cache: whether to use the directory's index cache, and to keep it up to date.

    Attributes:
        shards: the valid shards, sorted by name.
        bad_shards: the others, each with what is wrong with it.
        entries: one entry for each (key, epoch), the first by shard name; in that order.
        duplicates: entries with a (key, epoch) that was there already, and whole.
        incomplete: entries that cannot be read whole.
        set_aside: entries that somebody found wrong, see :mod:`hashtap.set_aside`.
    """

    def __init__(self, directory: CaptureDirectory, epoch: str | None = None, cache: bool = True) -> None:
        self._directory = directory
        self._cache = cache
        self._epoch = epoch
        self._read: dict[Path, _Look] = {}
        self.shards: list[Shard] = []
        self.bad_shards: dict[Path, FormatError] = {}
        self.entries: Sequence[Entry] = []
        self.duplicates: list[Entry] = []
        self.incomplete: list[Incomplete] = []
        self.set_aside: list[Entry] = []
        self._aside: frozenset[Pass] = frozenset()
        self._first: dict[str, dict[bytes, int]] = {}  # by epoch and key: which record counts
        self._records = _Records([])
        self._frames: dict[tuple[str, str], _Frames] = {}

    def refresh(self) -> bool:
        """Read the shards that are new, forget those that are gone. Returns whether anything changed."""
        paths = self._directory.shards()
        cached: Mapping[Path, _Look] = {}
        if self._cache and len(paths) - len(self._read) >= _WORTH_CACHING:
            cached = load_cache(self._directory.path)
        found = {path: _look_at(path, self._read.get(path) or cached.get(path)) for path in paths}
        aside = load_set_aside(self._directory.path)
        if found == self._read and aside == self._aside:
            return False
        fresh = [
            path for path, look in found.items() if look is not self._read.get(path) and look is not cached.get(path)
        ]
        if self._cache and len(fresh) >= _WORTH_CACHING:
            good = {path: (identity, shard) for path, (identity, shard) in found.items() if isinstance(shard, Shard)}
            store_cache(self._directory.path, good)
        self._read, self._aside = found, aside
        shards = [shard for _, shard in found.values() if isinstance(shard, Shard)]
        self.bad_shards = {path: error for path, (_, error) in found.items() if isinstance(error, FormatError)}
        self.shards = [shard for shard in shards if self._epoch in (None, shard.facts.epoch)]
        self._join()
        return True

    def of(self, key: bytes) -> dict[str, Entry]:
        """The entries of a key, by epoch; empty when there is none."""
        return {epoch: self._records.entry(rows[key]) for epoch, rows in self._first.items() if key in rows}

    @property
    def keys(self) -> set[bytes]:
        """The keys of all entries."""
        return set[bytes]().union(*self._first.values())

    def pieces(self, entry: Entry) -> list[Piece]:
        """The frames of an entry that make up its rows ``[0, T)``, in order."""
        pieces: list[Piece] = []
        stop = entry.total_tokens
        current: Entry | None = entry
        while current is not None and stop:
            own = self._frames[_run(current.shard)].of(current.serial)
            pieces += [
                Piece(piece.shard, piece.row, piece.start, min(piece.stop, stop))
                for piece in reversed(own)
                if current.shared_tokens <= piece.start < stop
            ]
            stop = min(stop, current.shared_tokens)
            current = self._donor(current)
        return pieces[::-1]

    def _donor(self, entry: Entry) -> Entry | None:
        row = self._first[entry.epoch].get(entry.donor_key) if entry.shared_tokens else None
        return None if row is None else self._records.entry(row)

    def _join(self) -> None:
        """Join frames to records. What is public changes at the end, so that other threads never see half of it."""
        runs: dict[tuple[str, str], list[int]] = {}
        for number, shard in enumerate(self.shards):
            runs.setdefault(_run(shard), []).append(number)
        frames = {run: _Frames([self.shards[number] for number in numbers]) for run, numbers in runs.items()}
        records = _Records(self.shards)
        whole = np.zeros(len(records.table), np.bool_)
        rows_of: dict[str, list[npt.NDArray[np.int64]]] = {}
        for run, rows in zip(runs, records.by_run(list(runs.values())), strict=True):
            table = records.table[rows]
            whole[rows] = frames[run].cover(table[:, 2], table[:, 6], table[:, 3])
            rows_of.setdefault(run[1], []).append(rows)
        aside = records.among(self._aside)
        set_aside = [records.entry(row) for row in np.flatnonzero(aside).tolist()]
        incomplete = [
            Incomplete(records.entry(row), "frames of it are missing")
            for row in np.flatnonzero(~whole & ~aside).tolist()
        ]
        first: dict[str, dict[bytes, int]] = {}
        counts = np.zeros(len(whole), np.bool_)
        for epoch, parts in rows_of.items():
            rows = np.sort(np.concatenate(parts))
            sharing = Sharing(rows[(whole & ~aside)[rows]], records.table, records.keys)
            first[epoch] = sharing.first
            counts[list(sharing.first.values())] = True
            for row in sharing.orphans:
                entry = records.entry(row)
                incomplete.append(Incomplete(entry, f"its donor {entry.donor_key.hex()} is missing or too short"))
                whole[row] = False
        duplicates = [records.entry(row) for row in np.flatnonzero(whole & ~counts & ~aside).tolist()]
        self._frames, self._first, self._records = frames, first, records
        self.entries = _Entries(records, np.flatnonzero(counts))
        self.duplicates, self.incomplete, self.set_aside = duplicates, incomplete, set_aside


class _Records:
    """The records of several shards, one behind the other."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self.table = np.concatenate([np.empty((0, len(RECORD_COLUMNS)), np.uint64), *(s.records for s in shards)])
        self.shard_of = np.repeat(np.arange(len(shards)), [len(shard.records) for shard in shards])
        keys = self.table[:, 0:2].tobytes()
        self.keys = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]

    def entry(self, row: int) -> Entry:
        """One of them."""
        words = self.table[row].tolist()
        return Entry(
            key=self.keys[row],
            shard=self._shards[self.shard_of[row]],
            serial=words[2],
            total_tokens=words[3],
            proof=(words[4], words[5]),
            shared_tokens=words[6],
            donor_key=self.table[row, 7:9].tobytes(),
            salt_sum=words[9],
        )

    def by_run(self, runs: Sequence[Sequence[int]]) -> list[npt.NDArray[np.int64]]:
        """The records of each run, whose shards' numbers are given; all shards are."""
        run_of = np.empty(len(self._shards), np.int64)
        for number, shards in enumerate(runs):
            run_of[shards] = number
        run_of_record = run_of[self.shard_of]
        order = np.argsort(run_of_record, kind="stable")
        return np.split(order, np.searchsorted(run_of_record[order], np.arange(1, len(runs))))[: len(runs)]

    def among(self, passes: frozenset[Pass]) -> npt.NDArray[np.bool_]:
        """Which of them are of these passes."""
        found = np.zeros(len(self.table), np.bool_)
        serials: dict[str, list[int]] = {}
        for writer, serial in passes:
            serials.setdefault(writer, []).append(serial)
        for writer, wanted in serials.items():
            shards = [number for number, shard in enumerate(self._shards) if shard.facts.writer == writer]
            here = np.flatnonzero(np.isin(self.shard_of, shards))
            found[here] = np.isin(self.table[here, 2], np.array(wanted, np.uint64))
        return found


class _Entries(Sequence[Entry]):
    """Some of the records as entries, each made when it is asked for."""

    def __init__(self, records: _Records, rows: npt.NDArray[np.int64]) -> None:
        self._records = records
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        if isinstance(index, slice):
            return [self._records.entry(row) for row in self._rows[index].tolist()]
        return self._records.entry(self._rows[index])


class _Frames:
    """The frames of one writing run and epoch, sorted by serial and position."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        counts = [len(shard.index) for shard in shards]
        index = np.concatenate([shard.index for shard in shards])
        tokens = index[:, 4] >> _HIGH
        # Frames without tokens hold tables: they belong to no record.
        rows = np.flatnonzero(tokens)
        rows = rows[np.lexsort((index[rows, 4] & _LOW, index[rows, 3]))]
        self._serial = index[rows, 3]
        self._first = (index[rows, 4] & _LOW).astype(np.int64)
        self._end = self._first + tokens[rows].astype(np.int64)
        self._shard = np.repeat(np.arange(len(shards)), counts)[rows]
        self._row = np.concatenate([np.arange(count) for count in counts])[rows]
        # How many of the frames before each do not follow on their predecessor.
        breaks = (self._serial[1:] == self._serial[:-1]) & (self._first[1:] != self._end[:-1])
        self._breaks = np.concatenate([[0], np.cumsum(breaks)])

    def cover(
        self, serials: npt.NDArray[np.uint64], starts: npt.NDArray[np.uint64], stops: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.bool_]:
        """Whether each serial's frames tile ``[start, stop)``, with neither gap nor overlap."""
        low = np.searchsorted(self._serial, serials, side="left")
        high = np.searchsorted(self._serial, serials, side="right")
        some = high > low
        covered: npt.NDArray[np.bool_] = starts == stops
        low, last = low[some], high[some] - 1
        covered[some] = (
            (self._first[low] == starts[some])
            & (self._end[last] == stops[some])
            & (self._breaks[low] == self._breaks[last])
        )
        return covered

    def of(self, serial: int) -> list[Piece]:
        """All frames of a serial, in order of position."""
        low, high = (int(np.searchsorted(self._serial, np.uint64(serial), side=side)) for side in ("left", "right"))
        return [
            Piece(self._shards[self._shard[i]], int(self._row[i]), int(self._first[i]), int(self._end[i]))
            for i in range(low, high)
        ]


def _run(shard: Shard) -> tuple[str, str]:
    return shard.facts.writer, shard.facts.epoch


def _look_at(path: Path, before: _Look | None) -> _Look:
    """Read a shard, unless it is the file that was read before; a bad one is tried again."""
    identity = identity_of(path)
    same = before is not None and before[0] == identity
    if before is not None and same and isinstance(before[1], Shard):
        return before
    try:
        return identity, read_shard(path)
    except FormatError as error:
        return before if before is not None and same and str(before[1]) == str(error) else (identity, error)
