"""Whole samples in random order out of the page cache, checksums on; GB/s of states."""

from collections import deque
from itertools import cycle, islice, repeat
from typing import Any

import numpy as np
from bench.feed import Feed

from hashtap.codec import compress, decompress
from hashtap.directory import CaptureDirectory
from hashtap.reader import Reader


def test_reader(beside: Any, feed: Feed, captured: CaptureDirectory) -> None:
    reader = Reader(captured)
    keys = sorted(reader.keys())
    order = [keys[number] for number in np.random.default_rng(0).permutation(len(keys))]
    out = np.empty_like(feed.rows)
    for key in order:
        out.fill(0)
        reader.by_key(key).read_into(out)
        assert np.array_equal(out, feed.rows)
    size = feed.planes[0].nbytes
    sections = [np.frombuffer(compress(plane) or b"", np.uint8) for plane in feed.planes]
    beside(
        lambda: [reader.by_key(key).read_into(out) for key in order],
        "bare zstd",
        lambda: deque(map(decompress, islice(cycle(sections), len(order)), repeat(size)), maxlen=0),
        gigabytes=len(order) * feed.rows.nbytes / 1e9,
    )
