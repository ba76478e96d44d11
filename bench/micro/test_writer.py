"""The writer, from frames to an open shard: one process beside bare zstd, two beside the disk; GB/s of states."""

import mmap
import os
from contextlib import closing
from pathlib import Path
from typing import Any

from bench.feed import Feed
from bench.shards import captures, check
from bench.writing import bare_zstd

from hashtap.directory import CaptureDirectory
from hashtap.reader import Reader

FRAMES = 200
PIECE_BYTES = 2 << 20  # of one write, as a shard's


def test_one_writer(beside: Any, feed: Feed) -> None:
    check(feed)
    with captures() as directory, closing(feed.open(directory, 1)) as writer:
        beside(
            lambda: feed.send(writer, FRAMES),
            "bare zstd",
            lambda: bare_zstd(feed, FRAMES),
            gigabytes=FRAMES * feed.rows.nbytes / 1e9,
        )


def test_two_writers(beside: Any, feed: Feed, captured: CaptureDirectory) -> None:
    check(feed)
    reader = Reader(captured)
    stored = sum(shard.file_bytes for shard in reader.shards) * FRAMES // len(reader)
    with captures() as directory, closing(feed.open(directory, 2)) as writer:
        beside(
            lambda: feed.send(writer, FRAMES),
            "raw disk",
            lambda: write_past_the_cache(directory.path / "raw", stored),
            gigabytes=FRAMES * feed.rows.nbytes / 1e9,
        )


def write_past_the_cache(path: Path, size: int) -> None:
    """A file of ``size`` bytes, rounded down to whole pieces, on the disk."""
    piece = mmap.mmap(-1, PIECE_BYTES)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    for _ in range(size // PIECE_BYTES):
        os.write(descriptor, piece)
    os.fsync(descriptor)
    os.close(descriptor)
