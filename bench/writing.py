"""What writing costs: the writer beside bare zstd, two writers beside one, and the ratio.

No figure without right captures: what was written is verified in full, and compared with what was given. Ratios are of
runs that took turns. What one core does is measured in CPU time; two writers against one by the best time of each, less
what threads waited for a processor: whatever else runs only ever adds to it.
"""

import mmap
import os
import statistics
import time

import xxhash
from bench.feed import Feed
from bench.figures import Figure, Measured
from bench.shards import WIDE, captures, check, write

from hashtap.block_file import BLOCK_BYTES, BlockFile
from hashtap.codec import compress
from hashtap.reader import Reader

ROUNDS = 4
RAW_BYTES = 4 << 30  # that a figure is measured on, under distinct keys, in so many rounds
FRAME_ROWS = (1, 4, 16, 64, 256)


def measure() -> Measured:
    """All of it, in about a minute."""
    narrow, wide = Feed(256), Feed(256, WIDE)
    check(narrow)
    speed, ratio = writing(narrow, wide), ratios()
    return Measured(speed.figures + ratio.figures, speed.details | ratio.details, speed.notes + ratio.notes)


def bare_zstd(feed: Feed, count: int) -> float:
    """CPU seconds of zstd alone, with the writer's parameters, on the same planes."""
    started = time.thread_time()
    for number in range(count):
        compress(feed.planes[number % len(feed.planes)])
    return time.thread_time() - started


def bare_writing(feed: Feed, count: int) -> float:
    """CPU seconds of zstd, the stored checksum and the file alone: no writer of this format needs less."""
    with captures() as directory:
        file = BlockFile(directory.path / "bare", bytes(BLOCK_BYTES))
        started = time.thread_time()
        for number in range(count):
            at = number % len(feed.planes)
            pieces = [memoryview(compress(feed.planes[at]) or b""), feed.rests[at].data]
            digest = xxhash.xxh3_64()
            for piece in pieces:
                digest.update(piece)
            digest.intdigest()
            file.append(pieces)
            file.write_out()
        took = time.thread_time() - started
        file.close()
    return took


def writing(narrow: Feed, wide: Feed) -> Measured:
    """The writer's CPU time beside bare zstd's, and two writers beside one."""
    shares: dict[str, list[float]] = {"4x576": [], "4x6912": []}
    ceilings: dict[str, list[float]] = {"4x576": [], "4x6912": []}
    took: dict[int, list[float]] = {1: [], 2: []}
    walls: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for name, feed in (("4x576", narrow), ("4x6912", wide)):
            count = RAW_BYTES // ROUNDS // feed.rows.nbytes
            zstd = bare_zstd(feed, count)
            ceilings[name].append(zstd / bare_writing(feed, count))
            for writers in (1, 2):
                with captures() as directory:
                    written = write(feed, directory, writers, count)
                speed = count * feed.rows.nbytes / written.wall_s / 1e9
                walls.setdefault(f"{name}, {writers} writers", []).append(speed)
                if writers == 1:
                    shares[name].append(zstd / written.cpu_s)
                if feed is narrow:
                    took[writers].append(written.took_s)
    disk = disk_speed()
    most = ", ".join(f"{statistics.median(ratios):.2f} with {name}" for name, ratios in ceilings.items())
    wall = ", ".join(f"{name} {statistics.median(speeds):.2f}" for name, speeds in walls.items())
    return Measured(
        [
            Figure("writing.over_zstd_4x576", statistics.median(shares["4x576"]), 0.85, at_least=True),
            Figure("writing.over_zstd_4x6912", statistics.median(shares["4x6912"]), 0.85, at_least=True),
            Figure("writing.two_over_one", min(took[1]) / min(took[2]), 1.8, at_least=True),
        ],
        {
            "writer_over_zstd": shares,
            "most_over_zstd": ceilings,
            "writer_wall_raw_gb_per_s": walls,
            "disk_gb_per_s": disk,
        },
        [
            f"zstd, hash and file alone are {most} of bare zstd",
            f"raw GB/s in wall time: {wall}; the disk itself takes {disk:.2f} of what is stored",
        ],
    )


def disk_speed() -> float:
    """What the disk itself takes, past the page cache, in GB/s."""
    piece = mmap.mmap(-1, 8 << 20)
    with captures() as directory:
        descriptor = os.open(directory.path / "disk", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
        started = time.perf_counter()
        for _ in range(64):
            os.write(descriptor, piece)
        os.fsync(descriptor)
        took = time.perf_counter() - started
        os.close(descriptor)
    return 64 * len(piece) / took / 1e9


def ratios() -> Measured:
    """Raw bytes over those of the files, index and padding included, by the rows of a frame."""
    found = {}
    for rows in FRAME_ROWS:
        feed = Feed(rows)
        with captures() as directory:
            write(feed, directory, 1, max(50, 20_000 // rows))
            reader = Reader(directory)
            found[rows] = reader.ratio or 0.0
    worst = min(ratio for rows, ratio in found.items() if rows >= 64)
    told = ", ".join(f"{ratio:.3f} of {rows}" for rows, ratio in found.items())
    return Measured(
        [Figure("writing.ratio_64_rows", worst, 1.48, at_least=True)],
        {"ratio_by_rows": found},
        [f"ratio by the rows of a frame: {told}"],
    )
