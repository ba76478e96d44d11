"""What reading costs: random whole samples on one thread and on two, and ``verify``.

From the page cache, checksums on, of real states. What a core does is measured in CPU time; two threads against one by
the best time of each, less what threads waited for a processor.
"""

import statistics
import threading
import time
from typing import Any, NamedTuple

import numpy as np
from bench.clock import Clock
from bench.feed import Feed
from bench.figures import Figure, Measured
from bench.shards import WIDE, captures, check, write

from hashtap.directory import CaptureDirectory
from hashtap.reader import Reader
from hashtap.verify import verify

ROUNDS = 4
RAW_BYTES = 512 << 20


def measure() -> Measured:
    """All of it, in about half a minute."""
    narrow, wide = Feed(256), Feed(256, WIDE)
    check(narrow)
    return reading(narrow, wide)


def reading(narrow: Feed, wide: Feed) -> Measured:
    """Random reads of whole samples from the page cache, checksums on; and ``verify``."""
    figures, details = [], {}
    for name, feed in (("4x576", narrow), ("4x6912", wide)):
        with captures() as directory:
            write(feed, directory, 2, RAW_BYTES // feed.rows.nbytes)
            keys = sorted(Reader(directory).keys())
            one, two = [], []
            for _ in range(ROUNDS):
                one.append(read_speed(directory, keys, 1))
                two.append(read_speed(directory, keys, 2))
            core = [speed.a_core for speed in one]
            figures.append(Figure(f"reading.gb_per_s_{name}", statistics.median(core), 0.9, True, "GB/s"))
            figures.append(Figure(f"reading.two_over_one_{name}", max(two).in_all / max(one).in_all, 1.6, True))
            details[f"read_gb_per_s_{name}"] = {"core, all": one, "core, all by two threads": two}
            if feed is narrow:
                for quick, bar in ((True, 5.0), (False, 0.8)):
                    speed = statistics.median(verify_speed(directory, quick) for _ in range(ROUNDS))
                    figures.append(
                        Figure(f"reading.verify_{'quick' if quick else 'full'}_gb_per_s", speed, bar, True, "GB/s")
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
