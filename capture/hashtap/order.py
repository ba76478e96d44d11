"""The order in which records were sealed, fixed once for all who follow a directory, and how far these have come.

The shards are the only truth of what is captured, but they are in no order: two servers seal at the same moment, and no
list of a file system only grows. So the first who sees a new record, a trainer's process or the client, appends it to
``.hashtap-order-<hash of the epoch>`` under a lock, and from then on it has that place for everybody.

The file: 16 bytes of magic, two unsigned 64-bit words (rows asked for, rows at which the order ended or all ones), then
a row for each record: key (16 bytes), tokens (64 bits). Numbers are little-endian. Whoever deletes it begins anew.
"""

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from hashtap.errors import FormatError, UsageError
from hashtap.identity import KEY_BYTES
from hashtap.manifest import MANIFEST_NAME, Manifest
from hashtap.reader import Reader

__all__ = ["SealingOrder"]

_MAGIC = b"hashtap order 1\n"
_HEADER = struct.Struct("<16sQQ")
_ROW_BYTES = KEY_BYTES + 8
_PIECE_BYTES = _ROW_BYTES << 16  # read at a time, whatever size the file claims
_OPEN_END = (1 << 64) - 1


class SealingOrder:
    """The order of one directory and epoch, as of the last :meth:`look`; many processes may use it at a time.

    Attributes:
        asked: the furthest row that any trainer has taken or waits for, as an end: it wants the rows before it.
        end: so many rows are all that come, or None while more may.
    """

    def __init__(self, directory: Path, epoch: str) -> None:
        self._path = directory / f".hashtap-order-{xxhash.xxh3_64_hexdigest(epoch.encode())}"
        self._directory, self._epoch = directory, epoch
        self._rows = bytearray()
        self._names: frozenset[bytes] = frozenset()
        self._manifest = (0, 0)
        self.asked = 0
        self.end: int | None = None

    def __len__(self) -> int:
        return len(self._rows) // _ROW_BYTES

    def key(self, row: int) -> bytes:
        """The key of a row's record."""
        return bytes(self._rows[row * _ROW_BYTES : row * _ROW_BYTES + KEY_BYTES])

    def tokens(self, first: int, stop: int) -> npt.NDArray[np.uint64]:
        """Tokens of the records of rows ``[first, stop)``."""
        rows = np.frombuffer(bytes(self._rows[first * _ROW_BYTES : stop * _ROW_BYTES]), "<u8")
        return rows.reshape(-1, _ROW_BYTES // 8)[:, -1]

    def look(self) -> None:
        """Take in what others have written since.

        Raises:
            FormatError: when the file is no order of records.
            UsageError: when it cannot be read.
        """
        if self._path.exists():
            with self._locked(fcntl.LOCK_SH):
                pass

    def extend(self, reader: Reader) -> int:
        """Append the records that ``reader`` has and the order lacks; of several shards by their time, then by name.

        Where the directory has a manifest, records that it does not name are left out until it does. Returns how many
        were appended. Raises as :meth:`look`.
        """
        if not self._lacking(reader):
            return 0
        with self._locked(fcntl.LOCK_EX) as file:
            captures = [reader.by_key(key, self._epoch) for key in self._lacking(reader)]
            modified = {shard: _modified(shard) for shard in {capture.shard for capture in captures}}
            captures.sort(key=lambda capture: (modified[capture.shard], capture.shard.name, capture.serial))
            rows = b"".join(capture.key + len(capture).to_bytes(8, "little") for capture in captures)
            # Of a row that was cut short nothing stays.
            os.ftruncate(file, _HEADER.size + len(self._rows))
            _write(file, rows, _HEADER.size + len(self._rows))
            os.fsync(file)
            self._rows += rows
        return len(captures)

    def ask(self, row: int) -> None:
        """A trainer has taken the rows before ``row``, or waits for them. Raises as :meth:`look`."""
        if row > self.asked:
            with self._locked(fcntl.LOCK_EX) as file:
                self._write_header(file, max(row, self.asked), self.end)

    def finish(self) -> None:
        """No more rows are to come: trainers end at the present last one. Raises as :meth:`look`."""
        with self._locked(fcntl.LOCK_EX) as file:
            self._write_header(file, self.asked, len(self))

    def reopen(self) -> None:
        """More rows are to come after all. Raises as :meth:`look`."""
        if self._path.exists():
            with self._locked(fcntl.LOCK_EX) as file:
                self._write_header(file, self.asked, None)

    def _lacking(self, reader: Reader) -> set[bytes]:
        keys = {self.key(row) for row in range(len(self))}
        lacking = reader.keys() - keys
        names = self._named() if lacking else None
        return lacking if names is None else lacking & names

    def _named(self) -> frozenset[bytes] | None:
        """Keys that the manifest names; None where there is no manifest."""
        try:
            found = os.stat(self._directory / MANIFEST_NAME)
        except FileNotFoundError:
            return None
        if self._manifest != (identity := (found.st_ino, found.st_mtime_ns)):
            self._names = frozenset(row.key for row in Manifest.load(self._directory))
            self._manifest = identity
        return self._names

    def _write_header(self, file: int, asked: int, end: int | None) -> None:
        _write(file, _HEADER.pack(_MAGIC, asked, _OPEN_END if end is None else end), 0)
        self.asked, self.end = asked, end

    @contextmanager
    def _locked(self, kind: int) -> Iterator[int]:
        """The file, locked and taken in; made if it is to be written and missing."""
        flags = os.O_RDONLY if kind == fcntl.LOCK_SH else os.O_RDWR | os.O_CREAT
        try:
            # Without waiting, as somebody may have put a pipe there, or a link to what must not be written to.
            file = os.open(self._path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.flock(file, kind)
                if kind == fcntl.LOCK_EX and os.fstat(file).st_size < _HEADER.size:
                    self._write_header(file, 0, None)
                self._take_in(file)
                yield file
            finally:
                os.close(file)
        except OSError as error:
            raise UsageError(
                f"cannot use {self._path}: {error.strerror or error}; who follows a capture directory writes to it"
            ) from None

    def _take_in(self, file: int) -> None:
        size = os.fstat(file).st_size
        if size < _HEADER.size and not self._rows:
            return  # whoever made it was killed before he wrote to it
        header = os.pread(file, _HEADER.size, 0)
        if size < _HEADER.size or not header.startswith(_MAGIC):
            raise FormatError(f"{self._path} is not an order of records: delete it and start again")
        _, asked, end = _HEADER.unpack(header)
        while self._take_rows(os.pread(file, _PIECE_BYTES, _HEADER.size + len(self._rows))):
            pass
        self.asked, self.end = asked, None if end == _OPEN_END else end

    def _take_rows(self, piece: bytes) -> bool:
        """Take in the rows at the beginning of a piece; returns whether more may follow."""
        rows = np.frombuffer(piece[: len(piece) // _ROW_BYTES * _ROW_BYTES], "<u8")
        tokens = rows.reshape(-1, _ROW_BYTES // 8)[:, -1]
        # After a power cut there may be zeros where rows were to be; a record has a token at least.
        whole = len(tokens) if tokens.all() else int(np.argmin(tokens > 0))
        self._rows += piece[: whole * _ROW_BYTES]
        return 0 < whole == len(tokens)


def _write(file: int, data: bytes, at: int) -> None:
    """Write all of it, however little a call takes: a disk that fills up takes a part, then fails."""
    while data:
        count = os.pwrite(file, data, at)
        data, at = data[count:], at + count


def _modified(shard: Path) -> int:
    try:
        return shard.stat().st_mtime_ns
    except FileNotFoundError:
        return 0  # moved away a moment ago: reading its records will say so
