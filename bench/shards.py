"""Shards of real states to measure on: an empty directory, what is written to it and how long that takes."""

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from bench.clock import Clock, cpu_s, threads_of
from bench.feed import Feed

from hashtap.directory import CaptureDirectory
from hashtap.reader import Reader
from hashtap.verify import verify

WIDE = 12  # 12 x 576 = 6,912 channels


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
