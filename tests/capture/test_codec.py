import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import zstandard
from tests.capture.build import Host

from hashtap.codec import Codec, compress, decompress
from hashtap.errors import FormatError
from hashtap.reader import Reader


def skewed(size: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(seed).geometric(0.4, size).astype(np.uint8)


@pytest.mark.parametrize("size", [100, 4096, 131071, 131072, 131073, 1_000_003])
def test_there_and_back(size: int) -> None:
    plain = skewed(size)
    coded = compress(plain)
    assert coded is not None
    assert len(coded) < 0.6 * size + 100
    assert zstandard.get_frame_parameters(coded).content_size == size
    assert (decompress(np.frombuffer(coded, np.uint8), size) == plain).all()


def test_what_does_not_shrink_is_left_alone() -> None:
    assert compress(np.random.default_rng(0).integers(0, 256, 5000, np.uint8)) is None
    assert compress(np.array([7], np.uint8)) is None


def test_any_zstd_reads_it(tmp_path: Path) -> None:
    """The frames cut out of a real shard: at once, as a stream, by another library and by the command line."""
    with Host(tmp_path, table=np.full((4, 72), 120, np.uint8)) as host:
        host.capture([[n] * 300 for n in range(3)], chunk=200)
    reader = Reader(tmp_path)
    sections = [
        (frame.coded.tobytes(), frame.plain().tobytes())
        for shard in reader.shards
        for frame in (reader.frame(shard, row) for row in range(len(shard.index)))
        if frame.header.codec == Codec.ZSTD
    ]
    assert len(sections) > 3
    for coded, plain in sections:
        assert zstandard.ZstdDecompressor().decompress(coded) == plain
        assert zstandard.ZstdDecompressor().decompressobj().decompress(coded) == plain
        assert pyarrow.decompress(coded, len(plain), "zstd", asbytes=True) == plain
        if command := shutil.which("zstd"):
            assert subprocess.run([command, "-dc"], input=coded, capture_output=True, check=True).stdout == plain


def test_each_thread_has_its_own_contexts() -> None:
    sections = [skewed(200_000, seed) for seed in range(24)]

    def there_and_back(section: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> bool:
        coded = compress(section)
        assert coded is not None
        return bool((decompress(np.frombuffer(coded, np.uint8), len(section)) == section).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(there_and_back, sections))


def test_nothing_is_taken_but_one_whole_frame_of_the_right_size() -> None:
    plain = skewed(10_000)
    coded = compress(plain)
    assert coded is not None
    streamed = zstandard.ZstdCompressor().compressobj()
    no_size = streamed.compress(plain.tobytes()) + streamed.flush()
    bomb = bytearray(zstandard.ZstdCompressor().compress(bytes(1 << 20)))
    for bad in (coded[:-1], coded[:20], coded[:5], b"", coded + b"7 bytes", coded + coded, no_size, b"x" * 99, bomb):
        with pytest.raises(FormatError, match="its zstd frame"):
            decompress(np.frombuffer(bytes(bad), np.uint8), len(plain))
