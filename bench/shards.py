"""What shards cost: the writer beside bare zstd, reading, verifying, opening thousands of them, and memory.

All of it with real states. No figure without right captures: what the writer wrote is verified in full, and compared
with what it was given. Ratios are of runs that took turns. What one core does is measured in CPU time; two
against one by the best time of each, less what threads waited for a processor: whatever else runs only ever adds to it.
"""

import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from bench.clock import Clock, cpu_s, threads_of
from bench.feed import Feed
from bench.figures import Figure, Measured

from hashtap.block_file import BLOCK_BYTES, BlockFile
from hashtap.codec import compress
from hashtap.directory import CaptureDirectory
from hashtap.facts import ShardFacts
from hashtap.reader import Reader
from hashtap.shard import sealed_header, trailer_words
from hashtap.verify import verify
from hashtap_kernels.layout import Geometry

ROUNDS = 4
RAW_BYTES = 4 << 30  # that a writer's figure is measured on, under distinct keys, in so many rounds
WIDE = 12  # 12 x 576 = 6,912 channels
SHARDS = 2400
FRAME_ROWS = (1, 4, 16, 64, 256)


def measure() -> Measured:
    """Everything, in about two minutes."""
    narrow, wide = Feed(256), Feed(256, WIDE)
    check(narrow)
    figures, details = [], {}
    for part in (writing(narrow, wide), ratios(), reading(narrow, wide), opening(), memory(narrow)):
        figures += part.figures
        details |= part.details
    return Measured(figures, details)


@contextmanager
def captures() -> Iterator[CaptureDirectory]:
    """An empty capture directory that goes away again."""
    path = Path(tempfile.mkdtemp(prefix="shards-"))
    try:
        yield CaptureDirectory.create(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def check(feed: Feed) -> None:
    """The gate: what is written is verified, and is what was sent."""
    with captures() as directory:
        write(feed, directory, 2, 40)
        report, reader = verify(directory.path), Reader(directory)
        same = all(np.array_equal(capture.hidden_states, feed.rows) for capture in reader)
        if not report.ok or not same or len(reader) != 40:
            raise SystemExit(f"no figures without right captures: {report.to_json()}")


@dataclass(frozen=True, slots=True)
class Written:
    """What writers took.

    Attributes:
        cpu_s: of their processes, and of what hands them their work.
        took_s: until everything was written, less what the busiest one's thread waited for a processor.
        wall_s: until everything was sealed.
    """

    cpu_s: float
    took_s: float
    wall_s: float


def write(feed: Feed, directory: CaptureDirectory, writers: int, count: int) -> Written:
    """Write ``count`` frames."""
    writer = feed.open(directory, writers)
    clocks = [Clock(number) for pid in writer.pids for number in threads_of(pid)[-1:]]
    cpu, own, started = cpu_s(writer.pids), time.thread_time(), time.perf_counter()
    feed.send(writer, count)
    took_s = max(clock.seconds() for clock in clocks)
    writer.drain()
    wall_s, cpu = time.perf_counter() - started, cpu_s(writer.pids) - cpu - (time.thread_time() - own)
    writer.close()
    if writer.counters()["records"] != count:
        raise SystemExit(f"no figures without right captures: {writer.counters()}")
    return Written(cpu, took_s, wall_s)


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
    return Measured(
        [
            Figure("shards.writer_over_zstd_4x576", statistics.median(shares["4x576"]), 0.85, at_least=True),
            Figure("shards.writer_over_zstd_4x6912", statistics.median(shares["4x6912"]), 0.85, at_least=True),
            Figure("shards.two_writers_over_one", min(took[1]) / min(took[2]), 1.8, at_least=True),
        ],
        {
            "writer_over_zstd": shares,
            "most_over_zstd": ceilings,
            "writer_wall_raw_gb_per_s": walls,
            "disk_gb_per_s": disk_speed(),
        },
    )


def disk_speed() -> float:
    """What the disk itself takes, past the page cache, in GB/s."""
    import mmap

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
    return Measured([Figure("shards.ratio_64_rows", worst, 1.48, at_least=True)], {"ratio_by_rows": found})


def reading(narrow: Feed, wide: Feed) -> Measured:
    """Random reads of whole samples from the page cache, checksums on; and ``verify``."""
    figures, details = [], {}
    for name, feed in (("4x576", narrow), ("4x6912", wide)):
        with captures() as directory:
            write(feed, directory, 2, RAW_BYTES // 8 // feed.rows.nbytes)
            keys = sorted(Reader(directory).keys())
            one, two = [], []
            for _ in range(ROUNDS):
                one.append(read_speed(directory, keys, 1))
                two.append(read_speed(directory, keys, 2))
            core = [speed.a_core for speed in one]
            figures.append(Figure(f"shards.read_gb_per_s_{name}", statistics.median(core), 0.9, True, "GB/s"))
            figures.append(Figure(f"shards.two_readers_over_one_{name}", max(two).in_all / max(one).in_all, 1.6, True))
            details[f"read_gb_per_s_{name}"] = {"core, all": one, "core, all by two threads": two}
            if feed is narrow:
                for quick, bar in ((True, 5.0), (False, 0.8)):
                    speed = statistics.median(verify_speed(directory, quick) for _ in range(ROUNDS))
                    figures.append(
                        Figure(f"shards.verify_{'quick' if quick else 'full'}_gb_per_s", speed, bar, True, "GB/s")
                    )
    return Measured(figures, details)


class ReadSpeed(NamedTuple):
    """Raw GB/s by all threads, and in a second of CPU time."""

    in_all: float
    a_core: float


def read_speed(directory: CaptureDirectory, keys: list[bytes], threads: int) -> ReadSpeed:
    """How fast samples are read in random order into memory that is there."""
    reader = Reader(directory)
    order = np.random.default_rng(0).permutation(len(keys))
    took: list[tuple[float, float]] = []

    def read(part: Any) -> None:
        out = np.empty_like(reader.by_key(keys[0]).hidden_states)
        clock, cpu = Clock(), time.thread_time()
        for number in part:
            reader.by_key(keys[number]).read_into(out)
        took.append((clock.seconds(), time.thread_time() - cpu))

    workers = [threading.Thread(target=read, args=[order[at::threads]]) for at in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    first = reader.by_key(keys[0])
    gigabytes = len(keys) * len(first) * first.facts.geometry.row_bytes / 1e9
    return ReadSpeed(gigabytes / max(seconds for seconds, _ in took), gigabytes / sum(cpu for _, cpu in took))


def verify_speed(directory: CaptureDirectory, quick: bool) -> float:
    """Raw GB/s of ``verify`` on one core."""
    started = time.process_time()
    report = verify(directory.path, quick=quick)
    if not report.ok:
        raise SystemExit(f"no figures without right captures: {report.to_json()}")
    return report.raw_bytes / (time.process_time() - started) / 1e9


def opening() -> Measured:
    """Opening 2,400 shards of 2 GB each, sparse: without an index cache, then with it."""
    with captures() as directory:
        for number in range(SHARDS):
            sparse_shard(directory.path / f"shard-{number:05d}.safetensors", number)
        seconds = []
        for _ in range(2):
            started = time.perf_counter()
            reader = Reader(directory)
            seconds.append(time.perf_counter() - started)
        found = {"records": len(reader), "bytes": sum(shard.file_bytes for shard in reader.shards)}
    return Measured(
        [
            Figure("shards.open_2400_cold_s", seconds[0], 20, at_least=False, unit="s"),
            Figure("shards.open_2400_warm_s", seconds[1], 1, at_least=False, unit="s"),
        ],
        {"opened": found},
    )


def sparse_shard(path: Path, number: int) -> None:
    """A shard of 56 prompts of 1,000 tokens of 4 x 7,168, whose frames are a hole."""
    geometry, prompts, tokens, pieces = Geometry(4, 7168), 56, 1000, 4
    frame_bytes = (tokens // pieces * geometry.row_bytes * 2 // 3) // 64 * 64
    facts = ShardFacts(
        model="sparse",
        epoch="bench",
        boundaries=(2, 30, 58),
        final_norm="post",
        geometry=geometry,
        seed=(1, 2),
        directory_uuid="",
        writer=f"{number // 100:032x}",
        rank=0,
        versions={},
        server_flags={},
    )
    serials = np.arange(prompts) + number * 1000 + 1
    index = np.zeros((prompts * pieces, 8), "<u8")
    index[:, 0], index[:, 1] = np.arange(len(index)) * frame_bytes, frame_bytes
    index[:, 3] = np.repeat(serials, pieces)
    index[:, 4] = np.arange(len(index)) % pieces * (tokens // pieces) | (tokens // pieces) << 32
    records = np.zeros((prompts, 12), "<u8")
    records[:, 0:2] = np.random.default_rng(number).integers(0, 1 << 63, (prompts, 2))
    records[:, 2], records[:, 3] = serials, tokens
    head = sealed_header(facts, len(index) * frame_bytes, len(index), prompts)
    with path.open("wb") as file:
        file.write(head)
        file.seek(len(index) * frame_bytes, os.SEEK_CUR)
        file.write(index.tobytes() + records.tobytes())
        file.write(trailer_words(head, index.tobytes(), records.tobytes()))


def memory(feed: Feed) -> Measured:
    """Private memory of the writer, and of a reader, over ten times the data."""
    count = 200
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
    return Measured(
        [
            Figure("shards.writer_growth_mb", written / 1e6, 10, at_least=False, unit="MB"),
            Figure("shards.reader_growth_mb", read / 1e6, 10, at_least=False, unit="MB"),
        ]
    )


def private_bytes(pid: int) -> int:
    """Memory of a process that is no file's and nobody else's."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("this kernel does not say what memory a process has")
