"""What the sealed shards of a directory hold, from their indices alone: which frames make up which record.

Frames and records are joined by writing run, epoch and serial, over all shards; file names play no part in it. A record
whose frames are not all there is listed as incomplete and never handed out.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hashtap.directory import CaptureDirectory
from hashtap.errors import FormatError
from hashtap.identity import KEY_BYTES
from hashtap.shard import Shard, read_shard

__all__ = ["Catalog", "Entry", "Incomplete", "Piece"]

_Look = tuple[tuple[int, ...], Shard | FormatError]
"""What tells a file from another of its name, and what was found in it."""

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

    Attributes:
        shards: the valid shards, sorted by name.
        bad_shards: the others, each with what is wrong with it.
        entries: one entry for each (key, epoch), the first by shard name; in that order.
        duplicates: entries with a (key, epoch) that was there already, and whole.
        incomplete: entries that cannot be read whole.
    """

    def __init__(self, directory: CaptureDirectory, epoch: str | None = None) -> None:
        self._directory = directory
        self._epoch = epoch
        self._read: dict[Path, _Look] = {}
        self.shards: list[Shard] = []
        self.bad_shards: dict[Path, FormatError] = {}
        self.entries: list[Entry] = []
        self.duplicates: list[Entry] = []
        self.incomplete: list[Incomplete] = []
        self._by_key: dict[bytes, dict[str, Entry]] = {}
        self._frames: dict[tuple[str, str], _Frames] = {}
        self._rows: dict[Shard, list[Entry]] = {}

    def refresh(self) -> bool:
        """Read the shards that are new, forget those that are gone. Returns whether anything changed."""
        found = {path: _look_at(path, self._read.get(path)) for path in self._directory.shards()}
        if found == self._read:
            return False
        self._read = found
        shards = [shard for _, shard in found.values() if isinstance(shard, Shard)]
        self.bad_shards = {path: error for path, (_, error) in found.items() if isinstance(error, FormatError)}
        self.shards = [shard for shard in shards if self._epoch in (None, shard.facts.epoch)]
        self._join()
        return True

    def of(self, key: bytes) -> dict[str, Entry]:
        """The entries of a key, by epoch; empty when there is none."""
        return self._by_key.get(key, {})

    @property
    def keys(self) -> set[bytes]:
        """The keys of all entries."""
        return set(self._by_key)

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
        return self._by_key.get(entry.donor_key, {}).get(entry.epoch) if entry.shared_tokens else None

    def _join(self) -> None:
        """Join frames to records. What is public changes at the end, so that other threads never see half of it."""
        runs: dict[tuple[str, str], list[Shard]] = {}
        for shard in self.shards:
            runs.setdefault(_run(shard), []).append(shard)
        frames = {run: _Frames(shards) for run, shards in runs.items()}
        self._rows = {shard: self._rows.get(shard) or list(_entries(shard)) for shard in self.shards}
        entries: list[Entry] = []
        duplicates: list[Entry] = []
        incomplete: list[Incomplete] = []
        by_key: dict[bytes, dict[str, Entry]] = {}
        for shard, rows in self._rows.items():
            epoch, records = shard.facts.epoch, shard.records
            whole = frames[_run(shard)].cover(records[:, 2], records[:, 6], records[:, 3])
            for entry, is_whole in zip(rows, whole.tolist(), strict=True):
                if not is_whole:
                    incomplete.append(Incomplete(entry, "frames of it are missing"))
                elif by_key.setdefault(entry.key, {}).setdefault(epoch, entry) is entry:
                    entries.append(entry)
                else:
                    duplicates.append(entry)
        for entry in _orphans(entries, by_key):
            incomplete.append(Incomplete(entry, f"its donor {entry.donor_key.hex()} is missing"))
            entries.remove(entry)
            by_key[entry.key].pop(entry.epoch)
            if not by_key[entry.key]:
                del by_key[entry.key]
        self._frames, self._by_key = frames, by_key
        self.entries, self.duplicates, self.incomplete = entries, duplicates, incomplete


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


def _orphans(entries: list[Entry], by_key: dict[bytes, dict[str, Entry]]) -> list[Entry]:
    """Those that share rows with a record which is not there or too short, or in a circle."""
    orphans = []
    for entry in [entry for entry in entries if entry.shared_tokens]:
        seen, current, needed = {entry.key}, entry, entry.shared_tokens
        while needed:
            donor = by_key.get(current.donor_key, {}).get(current.epoch)
            if donor is None or donor.key in seen or donor.total_tokens < needed:
                orphans.append(entry)
                break
            seen.add(donor.key)
            current, needed = donor, min(needed, donor.shared_tokens)
    return orphans


def _entries(shard: Shard) -> Iterator[Entry]:
    keys, donors = shard.records[:, 0:2].tobytes(), shard.records[:, 7:9].tobytes()
    for number, row in enumerate(shard.records.tolist()):
        at = slice(KEY_BYTES * number, KEY_BYTES * (number + 1))
        yield Entry(
            key=keys[at],
            shard=shard,
            serial=row[2],
            total_tokens=row[3],
            proof=(row[4], row[5]),
            shared_tokens=row[6],
            donor_key=donors[at],
            salt_sum=row[9],
        )


def _run(shard: Shard) -> tuple[str, str]:
    return shard.facts.writer, shard.facts.epoch


def _look_at(path: Path, before: _Look | None) -> _Look:
    """Read a shard, unless it is the file that was read before; a bad one is tried again."""
    identity: tuple[int, ...]
    try:
        state = os.lstat(path)
        identity = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
    except OSError:
        identity = ()
    same = before is not None and before[0] == identity
    if before is not None and same and isinstance(before[1], Shard):
        return before
    try:
        return identity, read_shard(path)
    except FormatError as error:
        return before if before is not None and same and str(before[1]) == str(error) else (identity, error)
