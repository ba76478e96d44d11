"""The naive way beside hashtap's: ``.cpu()`` and ``torch.save`` for each layer of each request, as server patches do.

PYTHONPATH=kernels:capture python bench/device/naive.py [--dry]
"""

from harness import DRY, Batch, Bench, Way, synchronize  # isort: skip

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from hashtap_kernels.layout import Geometry

TOKENS, REQUESTS, HIDDEN = (12, 3, 64) if DRY else (8192, 8, 7168)


def naive(batch: Batch, folder: Path, save: bool) -> None:
    for number, piece in enumerate(batch.pieces):
        rows = slice(piece.row, piece.row + piece.tokens)
        layers = {f"layer{layer}": source[rows].cpu().clone() for layer, source in enumerate(batch.sets[0])}
        if save:
            torch.save(layers, folder / f"req_{number}.pt")


def wall_ms(work: Callable[[], object], repeats: int = 3) -> float:
    work()
    synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize()
    return (time.perf_counter() - start) / repeats * 1e3


def host_ms(work: Callable[[], object], repeats: int = 5) -> float:
    """How long the calling thread is held up; the device's work is waited for outside."""
    held = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        work()
        held.append(time.perf_counter() - start)
    synchronize()
    return sorted(held)[repeats // 2] * 1e3


def main() -> None:
    bench = Bench("naive", budget_s=120)
    batch = Batch(TOKENS, REQUESTS, Geometry(4, HIDDEN))
    way = Way(batch)
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        paths = {
            "naive, saved to tmpfs": lambda: naive(batch, Path(folder), save=True),
            "naive, not saved": lambda: naive(batch, Path(folder), save=False),
            "hashtap, to pinned memory": lambda: way.send(batch),
        }
        for name, work in paths.items():
            figures = {"wall_ms": wall_ms(work), "host_held_ms": host_ms(work)}
            bench.row("a forward", path=name, T=TOKENS, R=REQUESTS, H=HIDDEN, **figures)
    bench.finish()


if __name__ == "__main__":
    main()
