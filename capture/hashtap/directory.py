"""A capture directory: sealed shards, open ones, and one small file that gives the directory its uuid.

Many servers may share one. Nothing in it counts anything: the sealed shards are the only truth.
"""

import errno
import fcntl
import glob
import json
import os
import re
import socket
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from hashtap.errors import FormatError, UsageError

__all__ = [
    "FORMAT_VERSION",
    "IDENTITY_FILE",
    "PARTIAL_SUFFIX",
    "CaptureDirectory",
    "drop_drafts",
    "host_name",
    "locked",
    "open_regular",
    "place_first",
    "read_regular",
    "shard_name",
    "sync_directory",
    "whole_file",
]

FORMAT_VERSION = 1
IDENTITY_FILE = "hashtap.json"
PARTIAL_SUFFIX = ".partial"
_IDENTITY_LIMIT_BYTES = 65536
_SHARD_NAME = re.compile(r"[^.].*\.safetensors", re.DOTALL)


def host_name() -> str:
    """This host, as it stands in the names of its shards."""
    return re.sub(r"[^A-Za-z0-9._]", "_", socket.gethostname()) or "host"


def shard_name(rank: int, writer: str, number: int) -> str:
    """The name of a writer's shard: host, process, rank, run and number, so that two writers never share one.

    Nobody looks a shard up by its name: it may be renamed to anything that ends in ``.safetensors``.
    """
    return f"hashtap-{host_name()}-{os.getpid()}-r{rank}-{writer[:8]}-{number:06d}.safetensors"


@dataclass(frozen=True, slots=True)
class CaptureDirectory:
    """An existing capture directory and its uuid. Made by :meth:`create` or :meth:`open`."""

    path: Path
    uuid: str

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> "CaptureDirectory":
        """Open the directory; make it and its identity file where missing. Of two racing makers the first wins.

        Raises:
            UsageError: when the path is no directory or cannot be written.
            FormatError: when the identity file is damaged or of a newer format.
        """
        path = Path(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not (path / IDENTITY_FILE).exists():
                _write_identity(path)
        except (FileExistsError, NotADirectoryError):
            raise UsageError(f"{path} is not a directory: name another capture directory") from None
        except OSError as error:
            raise UsageError(
                f"cannot write the capture directory {path}: {error.strerror}. Check its owner, mode and free space"
            ) from error
        if not os.access(path, os.W_OK | os.X_OK):
            raise UsageError(f"cannot write the capture directory {path}: permission denied. Check its owner and mode")
        return cls.open(path)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "CaptureDirectory":
        """Open an existing capture directory.

        Raises:
            UsageError: when there is no directory, or no identity file in it.
            FormatError: when the identity file is damaged or of a newer format.
        """
        path = Path(path)
        if not path.is_dir():
            raise UsageError(f"{path} is not a directory: give the directory that the server captured to")
        identity = path / IDENTITY_FILE
        try:
            text = read_regular(identity, _IDENTITY_LIMIT_BYTES)
        except FileNotFoundError:
            raise UsageError(
                f"{path} holds no {IDENTITY_FILE}, so nothing was captured to it: give the server's capture directory"
            ) from None
        except OSError as error:
            raise UsageError(f"cannot read {identity}: {error.strerror}. Check its owner and mode") from error
        return cls(path, _parse_identity(identity, text))

    def check_there(self) -> None:
        """Make sure that its path leads to it: where a disk was unmounted, a directory of the same name may remain.

        Raises:
            OSError: when it does not.
        """
        try:
            there = _parse_identity(self.path, read_regular(self.path / IDENTITY_FILE, _IDENTITY_LIMIT_BYTES))
        except FormatError as error:
            raise OSError(errno.ENOENT, f"no longer the directory that was opened: {error}") from None
        if there != self.uuid:
            raise OSError(errno.ENOENT, f"no longer the directory that was opened: its uuid is {there}")

    def shards(self) -> list[Path]:
        """The sealed shards, that is all ``*.safetensors``, sorted by name; none that is still being written."""
        return sorted(self.path / name for name in self._names() if _SHARD_NAME.fullmatch(name))

    def partials(self) -> list[Path]:
        """Shards being written, or left behind by writers that were killed; sorted by name. Never read as data."""
        suffix = PARTIAL_SUFFIX
        names = (name for name in self._names() if name.endswith(suffix))
        return sorted(self.path / name for name in names if _SHARD_NAME.fullmatch(name.removesuffix(suffix)))

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except OSError as error:
            raise UsageError(f"cannot list the capture directory {self.path}: {error.strerror}") from error


def open_regular(path: Path, limit_bytes: int) -> BinaryIO:
    """Open a file that may be anything: never waits for a pipe, and opens no device.

    Raises:
        OSError: when it cannot be opened.
        FormatError: when it is not a regular file, or longer than ``limit_bytes``.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise FormatError(f"{path} is damaged: it is not a regular file")
        if state.st_size > limit_bytes:
            raise FormatError(f"{path} is damaged: it has {state.st_size} bytes, over the limit of {limit_bytes}")
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, limit_bytes: int) -> bytes:
    """All of such a file. Raises as :func:`open_regular`."""
    with open_regular(path, limit_bytes) as file:
        return file.read(limit_bytes)


@contextmanager
def whole_file(
    path: Path, *, place: Callable[[Path, Path], object] | None = None, sync: bool = True
) -> Iterator[BinaryIO]:
    """A file to fill, which can be seen under its name once it is whole, and not at all after an error.

    Until then it has a name that nobody can guess and is nobody else's: a link that lies in the directory, whatever
    its name, is replaced and never written through.

    Args:
        path: its name; what has that name already is replaced.
        place: gives the draft its name, if not :meth:`Path.replace`.
        sync: whether it is on the disk before it has its name.

    Raises:
        OSError: when it cannot be written.
    """
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}{PARTIAL_SUFFIX}")
    file = draft.open("xb")
    try:
        with file:
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        (place or Path.replace)(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def drop_drafts(folder: Path, name: str = "") -> None:
    """Remove what killed processes left of :func:`whole_file`; for who is the only one that writes there.

    Args:
        folder: where they lie; those in folders below stay.
        name: how the names of the files begin whose drafts they are.
    """
    for draft in folder.glob(f".{glob.escape(name)}*{PARTIAL_SUFFIX}"):
        with suppress(OSError):
            draft.unlink()


def sync_directory(path: Path) -> None:
    """Make what was renamed in a directory last. OSError when it cannot be synced."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Be the only one that changes one of a directory's small files; what was renamed meanwhile lasts.

    Raises:
        OSError: when it cannot be locked or synced.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def place_first(draft: Path, path: Path) -> None:
    """Give a whole file its name, unless another was faster. OSError when it cannot be; the draft may be left."""
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    except OSError:
        # A file system without hard links: rename is atomic too, and the file was missing a moment ago.
        draft.rename(path)


def _write_identity(path: Path) -> None:
    """Write the identity file; the first one wins."""
    facts = {
        "format": FORMAT_VERSION,
        "uuid": str(uuid.uuid4()),
        "created": datetime.now(UTC).isoformat("T", "seconds"),
    }
    with whole_file(path / IDENTITY_FILE, place=place_first) as file:
        file.write(json.dumps(facts).encode() + b"\n")


def _parse_identity(path: Path, text: bytes) -> str:
    remedy = "Restore it from a copy, or capture to a fresh directory"
    try:
        facts = json.loads(text)
        version, identity = facts["format"], str(uuid.UUID(facts["uuid"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{path} is damaged ({type(error).__name__}: {error}). {remedy}") from None
    if version != FORMAT_VERSION:
        raise FormatError(
            f"{path} says format {version!r} and this hashtap reads {FORMAT_VERSION}. Install a hashtap that reads it"
        )
    return identity
