"""A file that is appended to, written in large pieces and past the page cache where the file system allows it.

A copy into the page cache costs the processor a third of what compressing the same bytes does, and drives out of the
cache what others need. So pieces are gathered in a buffer; full buffers go to the disk whole, by any thread.
"""

import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK_BYTES", "PASSING", "BlockFile"]

BLOCK_BYTES = 4096
"""Offsets and sizes of writes past the page cache are multiples of it."""
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""The errors of a disk that is full or read-only for a while: they pass when somebody makes room or mounts it anew."""
_BUFFER_BYTES = 2 << 20  # about what a core's cache holds: copying into memory that is not there takes twice as long

U8Array = npt.NDArray[np.uint8]


class BlockFile:
    """A new file, open for appending. One thread at a time appends; :meth:`write_out` may run beside it.

    A write that fails is remembered: what was in the file before stays, and every later call but :meth:`cut` raises
    the error.

    Args:
        path: of the file, which must not exist.
        head: its first bytes, a multiple of :data:`BLOCK_BYTES`.
        wait: asked when the disk is full or read-only, with the lock on writing held; True to try again, False to fail.

    Raises:
        OSError: when it cannot be made or the head cannot be written; nothing is left behind then.

    Attributes:
        written_bytes: how much of it is in the file for certain, from the beginning.
    """

    def __init__(self, path: Path, head: bytes, wait: Callable[[OSError], bool] = lambda _: False) -> None:
        self._path = path
        self._wait = wait
        self._buffer, self._spare = _aligned_buffer(), _aligned_buffer()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._direct = False
        self._error: OSError | None = None
        self._writing = threading.Lock()
        self._filled = 0  # bytes in the buffer
        self._at = 0  # where the buffer's first byte belongs; a multiple of a block
        self._full: tuple[U8Array, int] | None = None  # a buffer to be written out, and where to
        self.written_bytes = 0
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write(memoryview(head), 0)
        except OSError:
            self.discard()
            raise
        self._at = len(head)
        with suppress(OSError):
            self._set_direct(True)

    @property
    def dirty(self) -> bool:
        """Whether there are bytes that are not in the file."""
        return self._full is not None or self.written_bytes < self._at + self._filled

    def append(self, pieces: Iterable[memoryview]) -> None:
        """Append ``pieces``, one behind the other; they are copied. Call :meth:`write_out` soon after.

        Raises:
            OSError: when an earlier write failed.
        """
        for piece in pieces:
            while len(piece):
                if self._filled == _BUFFER_BYTES:
                    self._swap()
                part = piece[: _BUFFER_BYTES - self._filled]
                end = self._filled + len(part)
                self._buffer[self._filled : end] = part
                self._filled, piece = end, piece[len(part) :]
        if self._filled == _BUFFER_BYTES:
            self._swap()
        self._check()

    def write_out(self) -> None:
        """Write the buffer that is full, if there is one. Any thread may do so; an error is kept for :meth:`append`."""
        if self._full is None:
            return
        with self._writing:
            if self._full is not None:
                with suppress(OSError):
                    self._write(self._full[0].data, self._full[1])
                self._spare, self._full = self._full[0], None

    def flush(self) -> None:
        """Write everything, so that it survives this process.

        Raises:
            OSError: when it cannot be written, or an earlier write failed.
        """
        self.write_out()
        with self._writing:
            self._check()
            if not self.dirty:
                return
            whole = self._filled - self._filled % BLOCK_BYTES
            self._write(self._buffer[:whole].data, self._at)
            rest = self._buffer[whole : self._filled]
            if len(rest):
                # Less than a block goes through the page cache, and is written again with what follows.
                direct = self._direct
                self._set_direct(False)
                self._write(rest.data, self._at + whole)
                self._set_direct(direct)
            self._at, self._filled = self._at + whole, len(rest)
            self._buffer[: len(rest)] = rest.copy()

    def finish(self, tail: bytes, head: bytes) -> int:
        """Append ``tail``, write ``head`` over the beginning and sync; returns the file's bytes. Nothing may follow.

        Raises:
            OSError: when any of it fails. A failed sync is EIO, whatever the reason: it must not be tried again.
        """
        self.flush()
        self._set_direct(False)
        end = self._at + self._filled
        self._write(memoryview(tail), end)
        self._write(memoryview(head), 0)
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            # The kernel may have dropped what it could not write: a second sync would say that all is well.
            raise OSError(errno.EIO, f"cannot sync: {error.strerror}") from error
        return end + len(tail)

    def cut(self, end: int) -> None:
        """Cut the file off at ``end``, within what is written, and forget the error. Only :meth:`finish` may follow.

        Raises:
            OSError: when it cannot be cut off.
        """
        os.ftruncate(self._descriptor, end)
        self._set_direct(False)
        self._full, self._error = None, None
        self._filled, self._at, self.written_bytes = 0, end, end

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def discard(self) -> None:
        """Close and remove it; a failure to remove it is left at that."""
        with suppress(OSError):
            os.close(self._descriptor)
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _swap(self) -> None:
        """Put the full buffer up for writing and go on in the other one."""
        while self._full is not None:  # nobody came to write the one before
            self.write_out()
        self._check()
        self._buffer, self._full = self._spare, (self._buffer, self._at)
        self._at, self._filled = self._at + self._filled, 0

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _set_direct(self, direct: bool) -> None:
        if direct != self._direct:
            flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags ^ os.O_DIRECT)
            self._direct = direct

    def _write(self, data: memoryview, at: int) -> None:
        """Write all of ``data`` at ``at``, however little a call takes."""
        while len(data):
            try:
                count = os.pwrite(self._descriptor, data, at)
            except OSError as error:
                if error.errno == errno.EINVAL and self._direct:
                    self._set_direct(False)  # larger blocks than ours, or a short write that ended within one
                    continue
                if error.errno in PASSING and self._wait(error):
                    continue
                self._error = error
                raise
            data, at = data[count:], at + count
            self.written_bytes = max(self.written_bytes, at)


def _aligned_buffer() -> U8Array:
    """A buffer at a multiple of its size, in one huge page where there are some: that halves what a write costs."""
    memory = mmap.mmap(-1, 2 * _BUFFER_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = np.frombuffer(memory, np.uint8)
    return buffer[-buffer.ctypes.data % _BUFFER_BYTES :][:_BUFFER_BYTES]
