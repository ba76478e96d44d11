"""What is sealed, asked of the shards themselves or, without shared storage, of the server."""

import asyncio
import fcntl
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Protocol

from hashtap.client import ServerClient, ServerInfo
from hashtap.errors import MismatchError, UsageError
from hashtap.order import SealingOrder
from hashtap.reader import Reader

__all__ = ["RemoteDirectory", "SealedKeys", "SharedDirectory"]

_RUNNING = ".hashtap-extracting"


class SealedKeys(Protocol):
    """Answers which prompts are captured for good, under the run's epoch."""

    async def among(self, keys: Sequence[bytes]) -> set[bytes]:
        """Those of ``keys`` that stand in sealed shards now."""

    async def begin(self) -> None:
        """More is to come: trainers that follow the directory shall wait for it. UsageError when they can't be told."""

    async def finish(self) -> None:
        """All is sealed: trainers shall end with what is there now, unless another client still has more."""

    def close(self) -> None:
        """The run is over, finished or not."""

    def ratio(self) -> float | None:
        """Bytes of all states over bytes of the shard files, as of the last question; None when unknown."""

    def damaged(self) -> list[str]:
        """A line for each shard that cannot be used, as of the last question."""


class SharedDirectory:
    """Looks into the server's capture directory, which this machine can read too.

    Raises:
        UsageError: when ``path`` is no capture directory.
        MismatchError: when it is not the one that the server writes to.
    """

    def __init__(self, path: Path, info: ServerInfo) -> None:
        self._order = SealingOrder(path, info.epoch)
        self._running: BinaryIO | None = None
        self._reader = Reader(path, epoch=info.epoch, strict=False)
        self._lock = threading.Lock()  # a cancelled question still runs in its thread
        uuid = self._reader.directory.uuid
        if uuid != info.directory:
            raise MismatchError(
                f"--out {path} is the capture directory {uuid}, but the server writes to {info.directory} "
                f"at {info.path}; give that directory, or --remote when this machine cannot see it"
            )

    async def among(self, keys: Sequence[bytes]) -> set[bytes]:
        return await asyncio.to_thread(self._among, keys)

    async def begin(self) -> None:
        await asyncio.to_thread(self._begin)

    async def finish(self) -> None:
        await asyncio.to_thread(self._finish)

    def close(self) -> None:
        if self._running is not None:
            self._running.close()

    def ratio(self) -> float | None:
        return self._reader.ratio

    def damaged(self) -> list[str]:
        return [f"{path.name} is left out: {error}" for path, error in self._reader.bad_shards.items()]

    def _among(self, keys: Sequence[bytes]) -> set[bytes]:
        with self._lock:
            self._reader.refresh()
            return self._reader.keys().intersection(keys)

    def _begin(self) -> None:
        # All clients that run share a lock, so that the last one knows that it is the last, however the others ended.
        path = self._reader.directory.path / _RUNNING
        try:
            # Without waiting, as somebody may have put a pipe there, or a link to what must not be made or changed.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            self._running = os.fdopen(os.open(path, flags, 0o666), "rb", buffering=0)
            fcntl.flock(self._running, fcntl.LOCK_SH)
        except OSError as error:
            raise UsageError(f"cannot lock {path}: {error.strerror or error}. Remove it, or check its owner") from None
        self._order.reopen()

    def _finish(self) -> None:
        assert self._running is not None
        try:
            fcntl.flock(self._running, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        with self._lock:
            self._reader.refresh()
            self._order.look()
            self._order.extend(self._reader)
            self._order.finish()


class RemoteDirectory:
    """Asks the server, for a client that does not share its storage."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client

    async def among(self, keys: Sequence[bytes]) -> set[bytes]:
        return await self._client.sealed(keys)

    async def begin(self) -> None:
        """Trainers are told nothing: the directory is not to be seen from here."""

    async def finish(self) -> None:
        """As :meth:`begin`."""

    def close(self) -> None:
        """There is nothing to end."""

    def ratio(self) -> float | None:
        return None

    def damaged(self) -> list[str]:
        return []
