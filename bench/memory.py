"""What memory a writer and a reader take as the data grows tenfold."""

import os
from pathlib import Path

import numpy as np
from bench.feed import Feed
from bench.figures import Figure, Measured
from bench.shards import captures

from hashtap.reader import Reader
from hashtap.verify import verify

PROMPTS = 200


def measure() -> Measured:
    """Private memory of the writer, and of a reader, over ten times the data."""
    feed, count = Feed(256), PROMPTS
    with captures() as directory:
        writer = feed.open(directory, 1, shard_bytes=64 << 20)
        feed.send(writer, count)
        before = private_bytes(writer.pids[0])
        feed.send(writer, 9 * count)
        written = private_bytes(writer.pids[0]) - before
        writer.close()
        reader = Reader(directory)
        out = np.empty_like(feed.rows)
        for number, capture in enumerate(reader):
            if number == count:
                before = private_bytes(os.getpid())
            capture.read_into(out)
        read = private_bytes(os.getpid()) - before
        if not verify(directory.path, quick=True).ok or len(reader) != 10 * count:
            raise SystemExit(f"no figures without right captures: {len(reader)} of {10 * count}")
    return Measured(
        [
            Figure("memory.writer_growth_mb", written / 1e6, 10, at_least=False, unit="MB"),
            Figure("memory.reader_growth_mb", read / 1e6, 10, at_least=False, unit="MB"),
        ]
    )


def private_bytes(pid: int) -> int:
    """Memory of a process that is no file's and nobody else's."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this kernel does not say what memory a process has")
