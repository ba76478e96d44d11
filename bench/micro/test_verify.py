"""``verify`` of a directory in the page cache, beside the checksum of its bytes alone; GB/s of states."""

import mmap
from typing import Any

import pytest
import xxhash

from hashtap.directory import CaptureDirectory
from hashtap.reader import Reader
from hashtap.verify import verify


@pytest.mark.parametrize("quick", [True, False], ids=["quick", "full"])
def test_verify(beside: Any, captured: CaptureDirectory, quick: bool) -> None:
    report = verify(captured.path, quick=quick)
    assert report.ok
    assert report.verified == len(Reader(captured))
    assert damaged(captured, quick)

    def hash_alone() -> None:
        for path in captured.shards():
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                xxhash.xxh3_64(mapped).intdigest()

    beside(lambda: verify(captured.path, quick=quick), "hash alone", hash_alone, gigabytes=report.raw_bytes / 1e9)
    assert verify(captured.path, quick=quick).ok


def damaged(captured: CaptureDirectory, quick: bool) -> bool:
    """Whether one bit that is flipped in the middle of a shard is found; it is flipped back."""
    path = captured.shards()[0]
    with path.open("r+b", buffering=0) as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[len(mapped) // 2] ^= 1
        found = not verify(captured.path, quick=quick).ok
        mapped[len(mapped) // 2] ^= 1
    return found
