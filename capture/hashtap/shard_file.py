"""The one shard that a writer has open: it is appended to, then sealed or discarded.

Until it is sealed its name ends in ``.partial`` and its header's length is zero, so that nothing takes it for data; the
facts stand there already, for whoever recovers its frames, and a lock on the file tells that its writer lives.
Not thread safe: the writer holds its lock around every call but :meth:`ShardFile.seal`.
"""

import errno
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hashtap.block_file import BlockFile
from hashtap.directory import PARTIAL_SUFFIX, CaptureDirectory, shard_name
from hashtap.facts import ShardFacts
from hashtap.frame import Pieces
from hashtap.header import Header
from hashtap.shard import (
    INDEX_COLUMNS,
    RECORD_COLUMNS,
    TRAILER_BYTES,
    index_row,
    sealed_header,
    trailer_words,
    unsealed_header,
)

__all__ = ["ShardFile"]


class ShardFile:
    """A shard being written, ``<name>.safetensors.partial``.

    Args:
        directory: where it goes.
        facts: what its header will say.
        number: its number in the writing run; part of its name.
        wait: asked when the disk is full or read-only; True to try again, False to fail.

    Raises:
        OSError: when it cannot be made; nothing is left behind then.

    Attributes:
        path: the name that it will be sealed under.
        frames: how many so far, tables included.
        frames_bytes: their bytes.
        rows: token rows so far.
        tables: ids of the tables that it holds.
        serials: the passes that it holds frames of.
        appended_at: ``time.monotonic`` of the last frame.
    """

    def __init__(
        self,
        directory: CaptureDirectory,
        facts: ShardFacts,
        number: int,
        wait: Callable[[OSError], bool] = lambda _: False,
    ) -> None:
        self.path = directory.path / shard_name(facts.rank, facts.writer, number)
        self.number = number
        self.facts = facts
        self.frames = 0
        self.frames_bytes = 0
        self.rows = 0
        self.tables: set[int] = set()
        self.serials: set[int] = set()
        self.opened_at = self.appended_at = time.monotonic()
        self._index = array("Q")
        self._partial = Path(f"{self.path}{PARTIAL_SUFFIX}")
        if self.path.exists():
            raise FileExistsError(errno.EEXIST, "a shard of that name is sealed already", str(self.path))
        head = unsealed_header(facts)
        self._reserved_bytes = len(head)
        self._file = BlockFile(self._partial, head, wait)

    @property
    def raw_bytes(self) -> int:
        """What the rows so far take uncompressed."""
        return self.rows * self.facts.geometry.row_bytes

    @property
    def dirty(self) -> bool:
        """Whether frames of it would not survive this process."""
        return self._file.dirty

    def append(self, header: Header, pieces: Pieces) -> None:
        """Put one stored frame behind the last one. Call :meth:`write_out` soon after.

        Raises:
            OSError: when it, or a frame before it, could not be written.
        """
        self._file.append(pieces)
        self._index.extend(index_row(header, self.frames_bytes))
        self.frames += 1
        self.frames_bytes += header.stored_bytes
        self.rows += header.tokens
        if header.tokens:
            self.serials.add(header.serial)
        else:
            self.tables.add(header.table)
        self.appended_at = time.monotonic()

    def write_out(self) -> None:
        """Write to the disk what is due. Unlike all else this may be called beside another method."""
        self._file.write_out()

    def flush(self) -> None:
        """Write all frames to the file.

        Raises:
            OSError: when they cannot be written.
        """
        self._file.flush()

    def seal(self, records: Sequence[tuple[int, ...]]) -> int:
        """Write index, records, trailer and header, sync, and give the file its name. Returns the file's bytes.

        From then on readers see it. That the name lasts takes a sync of the directory.

        Args:
            records: one tuple a record, in the order of ``RECORD_COLUMNS``.

        Raises:
            OSError: when a step failed; nothing was sealed, and the partial file is still there.
        """
        index = np.array(self._index, "<u8").tobytes()
        rows = np.array(records, "<u8").reshape(-1, len(RECORD_COLUMNS)).tobytes()
        header = sealed_header(self.facts, self.frames_bytes, self.frames, len(records))
        file_bytes = self._file.finish(index + rows + trailer_words(header, index, rows), header)
        self._partial.rename(self.path)
        self._file.close()
        return file_bytes

    def give_way(self, records: int) -> set[int]:
        """Cut off what could not be written, and frames to make room for the tail; returns the passes they are of.

        Args:
            records: how many the tail is to list at most.

        Raises:
            OSError: when they cannot be cut off.
        """
        index = np.array(self._index, np.uint64).reshape(-1, len(INDEX_COLUMNS))
        tail_bytes = index.nbytes + records * len(RECORD_COLUMNS) * 8 + TRAILER_BYTES
        kept_bytes = min(self._file.written_bytes - self._reserved_bytes, self.frames_bytes - tail_bytes)
        self.frames = int(np.searchsorted(index[:, 0] + index[:, 1], max(0, kept_bytes), "right"))
        lost = index[self.frames :]
        self.frames_bytes -= int(lost[:, 1].sum())
        self.rows -= int((lost[:, 4] >> np.uint64(32)).sum())
        del self._index[self.frames * len(INDEX_COLUMNS) :]
        self._file.cut(self._reserved_bytes + self.frames_bytes)
        return set(lost[:, 3].tolist())

    def discard(self) -> None:
        """Close and remove the partial file; a failure to remove it is left at that."""
        self._file.discard()
