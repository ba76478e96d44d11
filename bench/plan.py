"""Whether ``hashtap plan`` is right: its forecast of small runs beside what they took, which must be within 15 %.

The rate of a writer thread is measured on one run and the forecast checked on others: three times as long, and of rows
twelve times as wide. Here the writer is the bottleneck; bench/capture_cost.py has the check of a real server, where
prefill is.
"""

from bench.feed import Feed
from bench.figures import Figure, Measured
from bench.shards import WIDE, captures, write

from hashtap.estimate import Estimate
from hashtap.forecast import Forecast, Rates
from hashtap.reader import Reader
from hashtap.verify import verify

ROUNDS = 4
RAW_BYTES = 96 << 20
FEEDS = {"4x576": (1, 3), "4x6912": (WIDE, 1)}  # copies side by side, times as long
OFF = 0.15


def measure() -> Measured:
    """Time and bytes on disk, forecast over measured, less 1; the best of interleaved rounds, as others only add."""
    known, feeds = Feed(256), {name: Feed(256, copies) for name, (copies, _) in FEEDS.items()}
    run(known, RAW_BYTES)  # the first one loads what the others find loaded
    took: list[float] = []
    runs: dict[str, list[tuple[float, int]]] = {name: [] for name in feeds}
    for _ in range(ROUNDS):
        took.append(run(known, RAW_BYTES)[0])
        for name, feed in feeds.items():
            runs[name].append(run(feed, RAW_BYTES * FEEDS[name][1]))
    figures = []
    for name, feed in feeds.items():
        forecast = forecast_of(feed, RAW_BYTES * FEEDS[name][1], thread=RAW_BYTES / min(took))
        seconds, size = min(runs[name])
        for what, predicted, measured in (
            ("seconds", forecast.seconds, seconds),
            ("bytes", forecast.estimate.stored_bytes, size),
        ):
            figures.append(Figure(f"plan.{what}_off_{name}", abs(predicted / measured - 1), OFF, at_least=False))
    return Measured(figures, {"thread_gb_per_s": RAW_BYTES / min(took) / 1e9, "seconds_and_bytes": runs})


def run(feed: Feed, raw_bytes: int) -> tuple[float, int]:
    """Write so much with one thread: its seconds, and the bytes of the files; the captures are verified."""
    with captures() as directory:
        count = raw_bytes // feed.rows.nbytes
        written = write(feed, directory, 1, count)
        report = verify(directory.path, quick=True)
        if not report.ok or len(Reader(directory)) != count:
            raise SystemExit(f"no figures without right captures: {report.to_json()}")
        return written.took_s, sum(path.stat().st_size for path in directory.shards())


def forecast_of(feed: Feed, raw_bytes: int, thread: float) -> Forecast:
    """The same run, where prefill is never in the way."""
    tokens = raw_bytes // feed.rows.nbytes * len(feed.rows)
    estimate = Estimate(tokens, feed.geometry.layers, feed.geometry.hidden)
    return Forecast(estimate, threads=1, rates=Rates(prefill_tokens_per_s=1e12, thread=thread, disk=1e12, pcie=1e15))
