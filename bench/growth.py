"""How what hashtap costs grows, along one axis at a time, all else fixed: ``python bench/growth.py [AXIS ...]``.

On a CPU, without a server. A cost is of a token, a byte or a shard, so it should be flat: each that is not must be
explained in ``REASONS``, with the steepest slope that its reason covers, or the exit status is 1. The points of an axis
take turns; what was captured is first verified and compared with what was sent. All axes together leave
a record and its plot.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import hot_path, shards
from bench.captured import FORWARD, captured
from bench.clock import Clock
from bench.feed import HIDDEN, Feed
from bench.opening import sparse_shard
from bench.report import growth_rows
from bench.slopes import Curve, Reason, draw

from hashtap.bench.surroundings import surroundings
from hashtap.directory import CaptureDirectory
from hashtap.index_cache import CACHE_NAME
from hashtap.reader import Reader
from hashtap_kernels.layout import MAX_FRAME_TOKENS, Geometry

ROOT = Path(__file__).parents[1]
ROUNDS = 5
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FORWARDS = 30  # of each batch size in a round; their median counts
LENGTHS = (1, 8, 64, 256, 1024, 8192, 32768)
WIDTHS = (576, 1152, 2304, 4608, 7168)
LAYERS = (1, 2, 4, 8)
PROMPT = 1024  # tokens, where width or layers vary
PAYLOAD_BYTES = 96 << 20  # of a measurement there
WRITERS = (1, 2)
FRAMES = 448  # of 4 x 576 x 256 that the writers write
SHARDS = (1, 8, 64, 300, 2400)
LOOKUPS = 2000

REASONS = {
    "scheduler ns a token": Reason(
        0.5, "The scheduler's thread works for each request and nothing for a token: as many tokens in more requests."
    ),
    "scheduler us a request": Reason(
        -0.5, "What a forward takes whatever it holds (checks, one launch, one flight) is shared by its requests."
    ),
    "CPU us a token": Reason(
        -0.1,
        "A forward and a frame each take what no token adds to: NumPy's and the interpreter's calls, many of them in "
        "the reference gather, which on a GPU is the kernel. Here a forward holds one short prompt.",
    ),
    "CPU ns a payload byte": Reason(
        -0.01,
        "A row has its proof and sum, a frame its header, checks and calls, whatever the width: wide rows share it.",
    ),
    "writer seconds a raw GB": Reason(
        0.5,
        "Two writers share the memory, the last cache and, on a machine of two cores, these with what feeds them.",
    ),
    "ms a shard to open": Reason(0.01, "Listing the directory and joining take a moment even for one shard."),
    "ms a shard to open again": Reason(
        0.01,
        "Below 64 shards there is no index cache. At thousands its tables leave the core's own cache.",
    ),
    "us to look up a key": Reason(
        0.25,
        "Only the core's cache is missed: key, row and shard lie in more memory. Keys that were just used are flat.",
    ),
}


def curves(axis: str, points: Sequence[int], measure: Callable[[int], tuple[float, ...]], *costs: str) -> list[Curve]:
    """A curve for each of the costs that ``measure`` finds at a point, the points taking turns."""
    rounds = [[measure(point) for point in points] for _ in range(ROUNDS)]
    return [
        Curve(axis, cost, {point: [found[at][number] for found in rounds] for at, point in enumerate(points)})
        for number, cost in enumerate(costs)
    ]


def batch() -> list[Curve]:
    """Time on the scheduler's thread of forwards of 8,192 tokens, whatever the number of requests."""
    hot_path.check_that_it_captures()
    with hot_path.staged_session() as session:

        def measure(requests: int) -> tuple[float, ...]:
            took = [hot_path.forward(session, number, requests, FORWARD) for number in range(FORWARDS)]
            median = float(np.median(took))
            return 1e9 * median / FORWARD, 1e6 * median / requests

        return curves("requests a forward", BATCHES, measure, "scheduler ns a token", "scheduler us a request")


def prompt() -> list[Curve]:
    """CPU time and stored bytes of prompts that are forwarded alone, in chunks where they are longer than a forward."""
    geometry = Geometry(4, HIDDEN)

    def measure(length: int, check: bool = False) -> tuple[float, ...]:
        prompts = max(1, min(256, LENGTHS[-1] // length))
        cpu_s, stored = captured(geometry, length, prompts, check=check)
        return 1e6 * cpu_s / prompts / length, stored / prompts / length

    for length in LENGTHS:
        measure(length, check=True)
    return curves("tokens of a prompt", LENGTHS, measure, "CPU us a token", "stored bytes a token")


def width() -> list[Curve]:
    """CPU time of gather and writer by hidden size."""
    return by_geometry("hidden size", WIDTHS, lambda hidden: Geometry(4, hidden))


def layers() -> list[Curve]:
    """CPU time of gather and writer by the number of layers."""
    return by_geometry("layers", LAYERS, lambda count: Geometry(count, HIDDEN))


def by_geometry(axis: str, points: Sequence[int], geometry_of: Callable[[int], Geometry]) -> list[Curve]:
    """CPU time of about as many payload bytes at each point, in prompts that are forwarded alone."""

    def measure(point: int, check: bool = False) -> tuple[float, ...]:
        geometry = geometry_of(point)
        prompts = max(2, PAYLOAD_BYTES // (PROMPT * geometry.row_bytes))
        cpu_s, _ = captured(geometry, PROMPT, prompts, check=check)
        return (1e9 * cpu_s / (prompts * PROMPT * geometry.row_bytes),)

    for point in points:
        measure(point, check=True)
    return curves(axis, points, measure, "CPU ns a payload byte")


def writers() -> list[Curve]:
    """What a writer takes for a raw GB: so many of them write as many times one over it in a second."""
    feed = Feed(MAX_FRAME_TOKENS)
    shards.check(feed)

    def measure(count: int) -> tuple[float, ...]:
        with shards.captures() as directory:
            took_s = shards.write(feed, directory, count, FRAMES).took_s
        return (1e9 * count * took_s / (FRAMES * feed.rows.nbytes),)

    return curves("writers", WRITERS, measure, "writer seconds a raw GB")


def opening() -> list[Curve]:
    """Opening sparse shards of 56 prompts, without an index cache and with it, and looking up keys."""
    with tempfile.TemporaryDirectory(prefix="growth-") as work:
        directories = {count: CaptureDirectory.create(Path(work) / str(count)) for count in SHARDS}
        for count, directory in directories.items():
            for number in range(count):
                sparse_shard(directory.path / f"shard-{number:05d}.safetensors", number)

        def measure(count: int) -> tuple[float, ...]:
            directory = directories[count]
            (directory.path / CACHE_NAME).unlink(missing_ok=True)
            opened = []
            for _ in range(2):
                clock = Clock()
                reader = Reader(directory)
                opened.append(clock.seconds())
            keys = sorted(reader.keys())
            if len(keys) != count * 56 or any(reader.by_key(key).key != key for key in keys[:LOOKUPS]):
                raise SystemExit(f"no figures without right captures: {count} shards are {len(keys)} keys, or others")
            some = [keys[at] for at in np.random.default_rng(count).integers(0, len(keys), LOOKUPS)]
            looked = [look_up(reader, order) for order in (some, some[:20] * (LOOKUPS // 20))]
            return *(1e3 * seconds / count for seconds in opened), *(1e6 * seconds / LOOKUPS for seconds in looked)

        costs = ("ms a shard to open", "ms a shard to open again", "us to look up a key", "us to look up one of 20")
        return curves("shards", SHARDS, measure, *costs)


def look_up(reader: Reader, keys: Sequence[bytes]) -> float:
    """Seconds."""
    clock = Clock()
    for key in keys:
        reader.by_key(key)
    return clock.seconds()


AXES: dict[str, Callable[[], list[Curve]]] = {
    "batch": batch,
    "prompt": prompt,
    "width": width,
    "layers": layers,
    "writers": writers,
    "shards": opening,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("axes", nargs="*", metavar="AXIS", help=f"which of {', '.join(AXES)} [all]")
    parser.add_argument("--record", type=Path, help="where to write the record [of all: bench/results/growth.json]")
    options = parser.parse_args()
    if unknown := set(options.axes) - set(AXES):
        parser.error(f"no axis is called {', '.join(sorted(unknown))}: choose from {', '.join(AXES)}")
    record: dict[str, Any] = surroundings(["python", "bench/growth.py", *sys.argv[1:]])
    found: list[Curve] = []
    for name in options.axes or AXES:
        began = time.perf_counter()
        found += AXES[name]()
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    record["growth"] = [curve.record(REASONS.get(curve.cost)) for curve in found]
    path = options.record or (None if options.axes else ROOT / "bench" / "results" / "growth.json")
    if path is not None:
        path.write_text(json.dumps(record, indent=1) + "\n")
        draw(found, path)
    print("\n".join(growth_rows(record)))
    sys.exit(any(row["why"] == "NOT EXPLAINED" for row in record["growth"]))


if __name__ == "__main__":
    main()
