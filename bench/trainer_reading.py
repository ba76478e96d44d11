"""A trainer's sample from the shards against the same sample from the file that ``hashtap export`` made for it.

``python bench/trainer_reading.py``: real states side by side to H = 4,032, samples of 256 tokens (8.3 MB), one thread,
all of it in the page cache. Each sample is compared, then read both ways in turn; medians of the pairs' ratios.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.feed import Feed

from hashtap.directory import CaptureDirectory
from hashtap.trainers.export import export
from hashtap.trainers.source import Choice, TrainerSource

SAMPLES, ROUNDS = 32, 3
OWN: dict[str, Callable[[Path], dict[str, Any]]] = {
    "modelopt": lambda path: dict(torch.load(path, weights_only=True)),
    # load_file maps the file; a trainer's collator copies what it maps.
    "safetensors": lambda path: {name: tensor.clone() for name, tensor in load_file(path).items()},
}


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=".") as home:
        captures = Path(home) / "captures"
        feed = Feed(256, copies=7)
        writer = feed.open(CaptureDirectory.create(captures), writers=1)
        feed.send(writer, SAMPLES)
        writer.close()
        shards = sum(path.stat().st_size for path in captures.glob("*.safetensors"))
        for target, own in OWN.items():
            source = TrainerSource(captures, target, Choice(loss_on_all=True))
            out = Path(home) / target
            export(source, out)
            files = [out / source.target.file(index) for index in range(len(source))]
            ratio, cpu_ratio, mb_per_s = compare(source, files, own)
            stored = sum(path.stat().st_size for path in files)
            print(
                f"{target}: shards / own files: {ratio:.2f} x the time, {cpu_ratio:.2f} x the CPU time "
                f"({mb_per_s:,.0f} MB/s from shards), {shards / stored:.2f} x the bytes"
            )


def compare(
    source: TrainerSource, files: list[Path], own: Callable[[Path], dict[str, Any]]
) -> tuple[float, float, float]:
    """Median ratios of wall and CPU time, and MB of states a second from the shards."""
    for index, path in enumerate(files):  # which also brings everything into the page cache
        mine, theirs = source[index], own(path)
        for name, value in theirs.items():
            found: Any = mine[name]
            if not (found.equal(value) if isinstance(value, torch.Tensor) else found == value):
                raise SystemExit(f"{name} of sample {index} differs")
    pairs = [
        (timed(source.__getitem__, index), timed(own, path)) for _ in range(ROUNDS) for index, path in enumerate(files)
    ]
    seconds = sum(shard[0] for shard, _ in pairs)
    size = ROUNDS * sum(source.lengths) * source.facts.geometry.row_bytes
    wall, cpu = (statistics.median(shard[clock] / file[clock] for shard, file in pairs) for clock in (0, 1))
    return wall, cpu, size / seconds / 1e6


def timed(read: Callable[[Any], Any], what: Any) -> tuple[float, float]:
    """Wall and CPU seconds of one reading."""
    wall, cpu = time.perf_counter(), time.process_time()
    read(what)
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    main()
