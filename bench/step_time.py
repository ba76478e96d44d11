"""What a writer costs the thread that hands it its work: SGLang's scheduler.

A step is Python and small torch operations in turn, about as a scheduler prepares and launches a forward; it keeps the
interpreter lock for half of its time. With a writer at full speed it is compared with the same step beside an equally
busy zstd, which leaves the interpreter lock as the only difference; with a writer at the demo's rate, with an idle
machine. How much the writer gets done meanwhile is told too, and what one on a thread of this process costs. The
conditions take turns, and what was written is verified.
"""

import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from bench.clock import Clock
from bench.feed import Feed
from bench.figures import Figure, Measured
from bench.shards import WIDE, captures

from hashtap.codec import compress
from hashtap.directory import CaptureDirectory
from hashtap.verify import verify

ROUNDS = 12
STEPS = 80  # of a condition in a round
LAYERS = 30
DEMO_BYTES_PER_S = 14e6  # 3,000 tokens/s of 4 x 576
MATRIX = torch.ones(8, 576)
WEIGHTS = torch.ones(576, 576)


def measure() -> Measured:
    """All conditions in turns, in about a minute."""
    narrow, wide = Feed(256), Feed(256, WIDE)
    conditions = {
        "idle": partial(nothing),
        "zstd": partial(busy_zstd, narrow),
        "full_4x576": partial(full_speed, narrow),
        "full_4x6912": partial(full_speed, wide),
        "thread_4x576": partial(full_speed, narrow, in_process=True),
        "thread_4x6912": partial(full_speed, wide, in_process=True),
        "demo": partial(demo_rate, narrow),
    }
    torch.set_num_threads(1)
    steps: dict[str, list[list[float]]] = {name: [] for name in conditions}
    wrote: dict[str, list[float]] = {name: [] for name in conditions}
    for _ in range(ROUNDS):
        for name, condition in conditions.items():
            with condition() as speed:
                steps[name].append([step() for _ in range(STEPS)])
                wrote[name].append(speed() / 1e6)
    details: dict[str, Any] = {
        f"{name}_over_zstd": ratio(steps[name], steps["zstd"]) for name in ("thread_4x576", "thread_4x6912")
    }
    notes = []
    for name, rounds in steps.items():
        p50, p99 = (float(np.percentile(rounds, part)) * 1e3 for part in (50, 99))
        speed_mb = statistics.median(wrote[name])
        notes.append(f"step with {name}: p50 {p50:.2f} ms, p99 {p99:.2f} ms, writer {speed_mb:.0f} MB/s")
        details[name] = {"p50_ms": p50, "p99_ms": p99, "writer_mb_per_s": speed_mb}
    pairs = ("full_4x576", "zstd", 1.05), ("full_4x6912", "zstd", 1.05), ("demo", "idle", 1.02)
    return Measured(
        [
            Figure(f"step_time.{one}_over_{other}", ratio(steps[one], steps[other]), bar, at_least=False)
            for one, other, bar in pairs
        ],
        details,
        notes,
    )


def ratio(ones: list[list[float]], others: list[list[float]]) -> float:
    """The median over rounds of one condition's median step over the other's."""
    return statistics.median(
        statistics.median(one) / statistics.median(other) for one, other in zip(ones, others, strict=True)
    )


def step() -> float:
    """Seconds of one step."""
    clock = Clock()
    table: dict[int, int] = {}
    for layer in range(LAYERS):
        for number in range(300):
            table[number] = table.get(number, 0) + layer
        torch.mm(MATRIX, WEIGHTS)
    return clock.seconds()


Speed = Callable[[], float]


@contextmanager
def nothing() -> Iterator[Speed]:
    """Nothing else runs."""
    yield lambda: 0.0


@contextmanager
def busy_zstd(feed: Feed) -> Iterator[Speed]:
    """Another process compresses."""
    process = multiprocessing.get_context("fork").Process(target=compress_for_ever, args=[feed], daemon=True)
    process.start()
    try:
        yield lambda: 0.0
    finally:
        process.kill()
        process.join()


def compress_for_ever(feed: Feed) -> None:
    while True:
        for plane in feed.planes:
            compress(plane)


@contextmanager
def full_speed(feed: Feed, *, in_process: bool = False) -> Iterator[Speed]:
    """A writer always has work: it is sent each buffer again as soon as it is written."""
    with written(feed) as directory:
        writer = feed.open_in_process(directory) if in_process else feed.open(directory, 1)
        feed.keep_sending(writer)
        began = time.perf_counter()
        try:
            yield lambda: writer.counters()["raw_bytes"] / (time.perf_counter() - began)
        finally:
            feed.stop_sending()
            writer.close()


@contextmanager
def demo_rate(feed: Feed) -> Iterator[Speed]:
    """A writer is sent a frame now and then."""
    with written(feed) as directory:
        writer = feed.open(directory, 1)
        stop = threading.Event()

        def send() -> None:
            while not stop.wait(feed.rows.nbytes / DEMO_BYTES_PER_S):
                feed.send(writer, 1)

        sender = threading.Thread(target=send)
        sender.start()
        began = time.perf_counter()
        try:
            yield lambda: writer.counters()["raw_bytes"] / (time.perf_counter() - began)
        finally:
            stop.set()
            sender.join()
            writer.close()


@contextmanager
def written(feed: Feed) -> Iterator[CaptureDirectory]:
    """A directory whose captures are verified at the end."""
    with captures() as directory:
        yield directory
        report = verify(directory.path)
        if not report.ok:
            raise SystemExit(f"no figures without right captures: {report.to_json()}")
