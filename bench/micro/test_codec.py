"""The codec on a real exponent plane, beside zstd itself with the same parameters; GB/s of the plane."""

from collections import deque
from itertools import repeat
from typing import Any

import numpy as np
import zstandard
from bench.feed import Feed

from hashtap import codec


def test_compress(beside: Any, feed: Feed) -> None:
    compressed(feed)
    planes, bare = feed.planes, zstandard.ZstdCompressor(compression_params=codec._PARAMETERS)
    assert bare.compress(planes[0].data) == codec.compress(planes[0])
    beside(
        lambda: deque(map(codec.compress, planes), maxlen=0),
        "bare zstd",
        lambda: deque(map(bare.compress, planes), maxlen=0),
        gigabytes=sum(plane.nbytes for plane in planes) / 1e9,
    )


def test_decompress(beside: Any, feed: Feed) -> None:
    sections, size = compressed(feed), feed.planes[0].nbytes
    bare = zstandard.ZstdDecompressor()
    assert bare.decompress(sections[0].data) == feed.planes[0].tobytes()
    beside(
        lambda: deque(map(codec.decompress, sections, repeat(size)), maxlen=0),
        "bare zstd",
        lambda: deque(map(bare.decompress, sections), maxlen=0),
        gigabytes=size * len(sections) / 1e9,
    )


def compressed(feed: Feed) -> list[Any]:
    """The planes compressed, once it is sure that they come back, and are as much smaller as real ones are."""
    sections = [np.frombuffer(codec.compress(plane) or b"", np.uint8) for plane in feed.planes]
    for section, plane in zip(sections, feed.planes, strict=True):
        assert np.array_equal(codec.decompress(section, plane.nbytes), plane)
        assert len(section) < 0.4 * plane.nbytes
    return sections
