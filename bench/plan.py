"""Whether ``hashtap plan`` is right: its forecast of small runs beside what they took, which must be within 15 %.

The two rates of a writer thread are measured on small frames and on large ones; the forecast is checked on frames of
other sizes, and a longer run. Here the writer is the bottleneck; bench/capture_cost.py has the check of a real server,
where prefill is.
"""

from dataclasses import asdict

from bench.feed import Feed
from bench.figures import Figure, Measured
from bench.shards import WIDE, captures, write

from hashtap.estimate import Estimate
from hashtap.forecast import Forecast, Rates
from hashtap.reader import Reader
from hashtap.verify import verify

ROUNDS = 4
RAW_BYTES = 96 << 20
SMALL, LARGE = (64, 1), (256, WIDE)  # rows of a frame, and copies of 4 x 576 side by side
CHECKED = {"256x4x576": (256, 1, 3), "128x4x2304": (128, 4, 1)}  # the same, and times as long
OFF = 0.15


def measure() -> Measured:
    """Time and bytes on disk, forecast over measured, less 1; the best of interleaved rounds, as others only add."""
    small, large = Feed(*SMALL), Feed(*LARGE)
    feeds = {name: Feed(rows, copies) for name, (rows, copies, _) in CHECKED.items()}
    run(small, RAW_BYTES)  # the first one loads what the others find loaded
    known: list[tuple[float, float]] = []
    runs: dict[str, list[tuple[float, int]]] = {name: [] for name in feeds}
    for _ in range(ROUNDS):
        known.append((run(small, RAW_BYTES)[0], run(large, RAW_BYTES)[0]))
        for name, feed in feeds.items():
            runs[name].append(run(feed, RAW_BYTES * CHECKED[name][2]))
    rates = rates_of(small, large, *map(min, zip(*known, strict=True)))
    figures = []
    for name, feed in feeds.items():
        forecast = forecast_of(feed, RAW_BYTES * CHECKED[name][2], rates)
        seconds, size = min(runs[name])
        for what, predicted, measured in (
            ("seconds", forecast.seconds, seconds),
            ("bytes", forecast.estimate.stored_bytes, size),
        ):
            figures.append(Figure(f"plan.{what}_off_{name}", abs(predicted / measured - 1), OFF, at_least=False))
    return Measured(figures, {"rates": asdict(rates), "seconds_and_bytes": runs, "known_seconds": known})


def rates_of(small: Feed, large: Feed, small_s: float, large_s: float) -> Rates:
    """A thread's time for a frame is one part for the frame, one for its bytes: two runs tell both apart."""
    small_s, large_s = (
        seconds / (RAW_BYTES // feed.rows.nbytes) for feed, seconds in ((small, small_s), (large, large_s))
    )
    byte_s = (large_s - small_s) / (large.rows.nbytes - small.rows.nbytes)
    frame_s = small_s - byte_s * small.rows.nbytes
    return Rates(prefill_tokens_per_s=1e12, writer=1 / byte_s, frame_s=frame_s, disk=1e12, pcie=1e15)


def run(feed: Feed, raw_bytes: int) -> tuple[float, int]:
    """Write so much with one thread: its seconds, and the bytes of the files; the captures are verified."""
    with captures() as directory:
        count = raw_bytes // feed.rows.nbytes
        written = write(feed, directory, 1, count)
        report = verify(directory.path, quick=True)
        if not report.ok or len(Reader(directory)) != count:
            raise SystemExit(f"no figures without right captures: {report.to_json()}")
        return written.took_s, sum(path.stat().st_size for path in directory.shards())


def forecast_of(feed: Feed, raw_bytes: int, rates: Rates) -> Forecast:
    """The same run, where prefill is never in the way."""
    rows = len(feed.rows)
    estimate = Estimate(raw_bytes // feed.rows.nbytes * rows, feed.geometry.layers, feed.geometry.hidden)
    return Forecast(estimate, writers=1, prompt_tokens=rows, rates=rates)
