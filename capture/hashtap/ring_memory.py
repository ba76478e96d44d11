"""The ring's memory: shared with the writer processes, and there from the start.

It neither grows while serving nor fails late. Writers only read it. On a GPU server it is pinned as well
(:mod:`hashtap.staging`).
"""

import mmap
import os
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hashtap.errors import SetupError

__all__ = ["Bytes", "RingMemory"]

Bytes = npt.NDArray[np.uint8]


class RingMemory:
    """Memory of this machine that other processes can map too.

    Attributes:
        descriptor: the file descriptor to hand to them.
        bytes: uint8 ``[ring_bytes]``; read-only where it was attached to.
    """

    def __init__(self, descriptor: int, ring_bytes: int, protection: int) -> None:
        self.descriptor = descriptor
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self.bytes: Bytes = np.frombuffer(mmap.mmap(descriptor, ring_bytes, flags=flags, prot=protection), np.uint8)
        weakref.finalize(self, os.close, descriptor).atexit = False

    @classmethod
    def create(cls, ring_bytes: int) -> "RingMemory":
        """Take memory for a ring.

        Raises:
            SetupError: when it cannot be had.
        """
        gib, free_bytes = ring_bytes / 2**30, _available_bytes()
        if ring_bytes > free_bytes:
            raise SetupError(
                f"--capture-ring-gib {gib:g} asks for more than the {free_bytes / 2**30:.1f} GiB of memory "
                "that are free: give a smaller ring"
            )
        descriptor = os.memfd_create("hashtap-ring")
        try:
            os.posix_fallocate(descriptor, 0, ring_bytes)
            return cls(descriptor, ring_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise SetupError(f"--capture-ring-gib {gib:g} cannot be had ({error}): give a smaller ring") from error

    @classmethod
    def attach(cls, descriptor: int, ring_bytes: int) -> "RingMemory":
        """Map a ring that another process took, to read it."""
        return cls(descriptor, ring_bytes, mmap.PROT_READ)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise SetupError("/proc/meminfo does not tell how much memory is free: hashtap captures on Linux only")
