"""Random access to what was captured, by key, token ids or sample id.

Needs NumPy, zstandard and xxhash; torch only when a tensor is asked for. Every frame's checksum is checked whenever its
bytes are used.
"""

import mmap
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hashtap.capture import Capture
from hashtap.catalog import Catalog, Entry, Incomplete, Piece
from hashtap.directory import CaptureDirectory
from hashtap.errors import FormatError, MismatchError
from hashtap.facts import ShardFacts
from hashtap.frame import StoredFrame, Table
from hashtap.identity import TokenIds, parse_key, prompt_key
from hashtap.shard import Shard
from hashtap_kernels.layout import Payload

__all__ = ["Capture", "NotCaptured", "Reader"]

_OPEN_MAPS = 128
"""Shards mapped at a time; each map holds a file descriptor."""


class NotCaptured(KeyError):
    """No record of the prompt is in the sealed shards."""

    def __str__(self) -> str:
        return str(self.args[0])


class Reader:
    """The captures of a directory's sealed shards.

    Safe to use from several threads, :meth:`refresh` excepted, and in a process that is forked meanwhile.

    Args:
        directory: the capture directory.
        epoch: take only captures of these weights; None takes all.
        strict: raise at a shard that is damaged; otherwise leave it out and list it in :attr:`bad_shards`.
        cache: whether a directory of many shards may be opened from its index cache, and get one.

    Raises:
        UsageError: when it is no capture directory.
        FormatError: when ``strict`` and a shard is damaged.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | CaptureDirectory,
        *,
        epoch: str | None = None,
        strict: bool = True,
        cache: bool = True,
    ) -> None:
        self.directory = directory if isinstance(directory, CaptureDirectory) else CaptureDirectory.open(directory)
        self._catalog = Catalog(self.directory, epoch, cache)
        self._strict = strict
        self._maps = _Maps()
        self._tables: dict[int, Table] = {}
        self.refresh()

    def refresh(self) -> bool:
        """Pick up newly sealed shards. Returns whether anything changed. Raises as the constructor does."""
        changed = self._catalog.refresh()
        if self._strict and self.bad_shards:
            raise next(iter(self.bad_shards.values()))
        return changed

    def __len__(self) -> int:
        """How many captures there are; a prompt captured twice with the same weights counts once."""
        return len(self._catalog.entries)

    def __iter__(self) -> Iterator["Capture"]:
        """All captures, by shard name and their order in the shard."""
        return (Capture(self, entry) for entry in self._catalog.entries)

    def __contains__(self, key: bytes | str) -> bool:
        return bool(self._catalog.of(_as_key(key)))

    def has(self, key: bytes, epoch: str) -> bool:
        """Whether the prompt was captured with these weights."""
        return epoch in self._catalog.of(key)

    def keys(self) -> set[bytes]:
        """The keys of all captures."""
        return self._catalog.keys

    def by_key(self, key: bytes | str, epoch: str | None = None) -> "Capture":
        """The capture of a key, 16 bytes or 32 hex digits.

        Raises:
            NotCaptured: when there is none.
            MismatchError: when there are several, of different weights, and ``epoch`` does not choose one.
        """
        epochs = self._catalog.of(_as_key(key))
        if epoch is None and len(epochs) > 1:
            raise MismatchError(f"{_hex(key)} was captured with the weights {sorted(epochs)}: choose one with epoch=")
        entry = epochs.get(epoch) if epoch is not None else next(iter(epochs.values()), None)
        if entry is None:
            of_epoch = "" if epoch is None else f" with the weights {epoch}"
            raise NotCaptured(
                f"{_hex(key)} was not captured{of_epoch}: it is in none of the {len(self.shards)} sealed shards in "
                f"{self.directory.path}"
            )
        return Capture(self, entry)

    def by_token_ids(self, token_ids: TokenIds, salt: bytes = b"", epoch: str | None = None) -> "Capture":
        """The capture of a prompt. Raises as :meth:`by_key`."""
        return self.by_key(prompt_key(token_ids, salt), epoch)

    def by_sample_id(self, sample_id: str) -> "Capture":
        """The capture of a sample that the manifest names. Needs pyarrow.

        Raises:
            NotCaptured: when the manifest does not name it, or it was not captured.
        """
        from hashtap.manifest import Manifest

        manifest = Manifest.load(self.directory.path)
        if sample_id not in manifest:
            raise NotCaptured(f"the manifest in {self.directory.path} names no sample {sample_id!r}")
        return self.by_key(manifest.key_of(sample_id), manifest.epoch_of(sample_id))

    def read(self, keys: Iterable[bytes | str | Capture], threads: int = 4) -> Iterator[Capture]:
        """The captures of many keys, in their order, with their arrays already read, by several threads ahead of use.

        Args:
            keys: each as :meth:`by_key` takes it; a capture stands for itself.
            threads: how many read; about twice as many captures are held ready.

        Raises:
            NotCaptured: at the place of a key that has no capture.
            FormatError: at the place of one whose frames are damaged.
        """

        def load(key: bytes | str | Capture) -> Capture:
            capture = key if isinstance(key, Capture) else self.by_key(key)
            _ = capture.hidden_states, capture.token_ids
            return capture

        ahead: deque[Future[Capture]] = deque()
        with ThreadPoolExecutor(threads, "hashtap-reader") as pool:
            try:
                for key in keys:
                    ahead.append(pool.submit(load, key))
                    if len(ahead) > 2 * threads:
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            finally:
                for future in ahead:
                    future.cancel()

    @property
    def facts(self) -> ShardFacts:
        """What all shards have in common: model, weights, layers and geometry are those of each of them.

        Raises:
            MismatchError: when two shards differ in these.
            NotCaptured: when there is no shard.
        """
        if not self.shards:
            raise NotCaptured(f"there is no sealed shard in {self.directory.path}")
        first = self.shards[0]
        for shard in self.shards[1:]:
            for name in ("model", "boundaries", "final_norm", "geometry", "epoch"):
                ours, theirs = getattr(first.facts, name), getattr(shard.facts, name)
                if ours != theirs:
                    remedy = "choose one with epoch=" if name == "epoch" else "keep them in different directories"
                    raise MismatchError(
                        f"{first.path.name} has {name} {ours!r} and {shard.path.name} {theirs!r}: {remedy}"
                    )
        return first.facts

    @property
    def epochs(self) -> list[str]:
        """The weights that there are captures of."""
        return sorted({shard.facts.epoch for shard in self.shards})

    @property
    def ratio(self) -> float | None:
        """Bytes of all captures' states over bytes of the shard files; None when there is none."""
        stored_bytes = sum(shard.file_bytes for shard in self.shards)
        raw_bytes = sum(entry.total_tokens * entry.shard.facts.geometry.row_bytes for entry in self._catalog.entries)
        return raw_bytes / stored_bytes if raw_bytes else None

    @property
    def entries(self) -> Sequence[Entry]:
        """What the captures are made from, in the order of iteration."""
        return self._catalog.entries

    @property
    def shards(self) -> list[Shard]:
        """The valid shards, sorted by name."""
        return self._catalog.shards

    @property
    def bad_shards(self) -> dict[Path, FormatError]:
        """The damaged ones."""
        return self._catalog.bad_shards

    @property
    def duplicates(self) -> list[Entry]:
        """Records that repeat an earlier one, key and weights; they are never handed out."""
        return self._catalog.duplicates

    @property
    def incomplete(self) -> list[Incomplete]:
        """Records that frames are missing of; they are never handed out."""
        return self._catalog.incomplete

    @property
    def set_aside(self) -> list[Entry]:
        """Records that ``hashtap verify --set-aside`` found wrong; they are never handed out."""
        return self._catalog.set_aside

    def pieces(self, entry: Entry) -> list[Piece]:
        """The frames that make up a record, in order."""
        return self._catalog.pieces(entry)

    def frame(self, shard: Shard, row: int) -> StoredFrame:
        """Frame ``row`` of a shard's index, checked against its checksum and that row.

        Raises:
            FormatError: naming shard, place and reason, when it is damaged.
        """
        offset, size, stored_sum, serial, positions, table, kind, forward = shard.index[row].tolist()
        try:
            frame = StoredFrame.parse(self._bytes(shard)[offset : offset + size])
            header = frame.header
            if header.geometry != shard.facts.geometry or (stored_sum, serial, positions, table, kind, forward) != (
                header.stored_sum,
                header.serial,
                header.first_position | header.tokens << 32,
                header.table,
                header.payload | header.codec << 8,
                header.forward,
            ):
                raise FormatError("a frame is not the one that the index says")
        except FormatError as error:
            raise self.damage(shard, row, error) from None
        return frame

    def table(self, shard: Shard, identity: int) -> Table:
        """A reference-exponent table, uint8 ``[L, H]``, that frames of ``shard`` name. Raises as :meth:`frame`."""
        table = self._tables.get(identity)
        if table is None:
            kinds = shard.index[:, 6] & np.uint64(0xFF)
            row = int(np.flatnonzero((kinds == Payload.TABLE) & (shard.index[:, 5] == np.uint64(identity)))[0])
            frame = self.frame(shard, row)
            try:
                table = self._tables[identity] = frame.table()
            except FormatError as error:
                raise self.damage(shard, row, error) from None
        return table

    def damage(self, shard: Shard, row: int, error: FormatError) -> FormatError:
        """``error``, said of frame ``row`` of ``shard``."""
        offset = shard.frames_at + int(shard.index[row, 0])
        return FormatError(
            f"{shard.path}, frame {row} at byte {offset}: {error}. Restore the shard from a copy, or move it away, "
            f"start the server anew and run hashtap extract again"
        )

    def _bytes(self, shard: Shard) -> npt.NDArray[np.uint8]:
        """The shard's ``frames``, mapped."""
        mapped = self._map(shard)
        size_bytes = mapped.size()  # asked each time: to read what was cut off meanwhile would end the process
        if size_bytes != shard.file_bytes:
            raise FormatError(f"the shard has {size_bytes} bytes now and had {shard.file_bytes} when it was opened")
        return np.frombuffer(mapped, np.uint8)[shard.frames_at : shard.frames_at + shard.frames_bytes]

    def _map(self, shard: Shard) -> mmap.mmap:
        """The shard's file, which stays mapped for a while."""
        maps = self._maps
        if maps.pid != os.getpid():
            maps = self._maps = _Maps()
        with maps.lock:
            known = maps.get(shard.path)
            if known is not None and known[0] is shard:
                maps.move_to_end(shard.path)
                return known[1]
        try:
            with shard.path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise FormatError(f"the shard cannot be read any more: {error}") from None
        with maps.lock:
            maps[shard.path] = (shard, mapped)
            if len(maps) > _OPEN_MAPS:
                maps.popitem(last=False)
        return mapped


class _Maps(OrderedDict[Path, tuple[Shard, mmap.mmap]]):
    """The shards that one process has mapped; in a forked one the lock may be held by a thread that is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.pid = os.getpid()
        self.lock = threading.Lock()


def _as_key(key: bytes | str) -> bytes:
    if isinstance(key, bytes):
        return key
    parsed = parse_key(key)
    if parsed is None:
        raise NotCaptured(f"{key!r} is no key: a key is 32 hex digits")
    return parsed


def _hex(key: bytes | str) -> str:
    return key if isinstance(key, str) else key.hex()
