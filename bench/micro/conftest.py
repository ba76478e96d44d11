"""What every suite here shares: real states, a directory of them, and rounds that take turns with a ceiling's."""

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from bench.feed import Feed
from bench.shards import captures, write
from pytest_benchmark.fixture import BenchmarkFixture

from hashtap.bench.surroundings import surroundings
from hashtap.directory import CaptureDirectory

SECONDS = 3.0  # of a benchmark's rounds and its ceiling's together
ROUNDS = 5, 200  # fewest and most
FRAMES = 200  # prompts in the directory that is read and verified

Call = Callable[[], object]
Beside = Callable[..., None]


@pytest.fixture
def beside(benchmark: BenchmarkFixture) -> Beside:
    """``beside(work, name, ceiling, gigabytes=…)`` times ``work`` in turn with the ``ceiling`` that ``name`` says.

    Both do the work of so many gigabytes, or of so many things: ``beside(…, request=64)``. Of both extra_info has
    the GB/s, or the ns a thing, by their medians, and as share of the ceiling the median of the ratios of pairs.
    """

    def measure(work: Call, name: str, ceiling: Call, **amount: float) -> None:
        ((what, count),) = amount.items()
        ceilings: list[float] = []

        def turn() -> None:
            began = time.perf_counter()
            ceiling()
            ceilings.append(time.perf_counter() - began)

        turn()
        began = time.perf_counter()
        work()
        turn()
        rounds = int(SECONDS / (time.perf_counter() - began))
        ceilings.clear()
        benchmark.pedantic(work, setup=turn, rounds=max(ROUNDS[0], min(ROUNDS[1], rounds)))
        if benchmark.disabled:
            return
        seconds = benchmark.stats.stats.data
        share = statistics.median(least / took for least, took in zip(ceilings, seconds, strict=True))
        unit = "gb_per_s" if what == "gigabytes" else f"ns_per_{what}"
        value, most = (
            count / median if what == "gigabytes" else median / count * 1e9
            for median in (statistics.median(seconds), statistics.median(ceilings))
        )
        benchmark.extra_info |= {unit: value, "ceiling": name, "ceiling_value": most, "share_of_ceiling": share}

    return measure


@pytest.fixture(scope="session")
def feed() -> Feed:
    """Frames of 256 rows of real states."""
    return Feed(256)


@pytest.fixture(scope="session")
def captured(feed: Feed) -> Iterator[CaptureDirectory]:
    """A directory of such frames, each under a key of its own."""
    with captures() as directory:
        write(feed, directory, 2, FRAMES)
        yield directory


def pytest_benchmark_generate_machine_info() -> dict[str, Any]:
    """What tells machines apart: pytest-benchmark's own has a clock rate, which is never twice the same."""
    machine: dict[str, Any] = surroundings([])["machine"]
    return machine


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """The head that every record here has."""
    output_json |= surroundings(["pytest", *config.invocation_params.args])
