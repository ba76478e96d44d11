"""What an attack is, and the good directory that all of them begin with."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tests.capture.build import Host

__all__ = ["EPOCH", "GOOD_PROMPTS", "OUTSIDE", "TARGET", "TARGET_PROMPTS", "Attack", "copy_of", "make_base"]

GOOD, TARGET, OUTSIDE = "a-good.safetensors", "target.safetensors", "outside.safetensors"
EPOCH = "weights-1"
GOOD_PROMPTS = [[1, 2, 3], [4, 5]]
TARGET_PROMPTS = [[n % 7 for n in range(300)], [8, 9], [10] * 20]


@dataclass(frozen=True, slots=True)
class Attack:
    """One thing that a hostile directory holds.

    Attributes:
        make: is given a sealed shard of a good directory, and spoils it or puts something beside it.
        reason: what the one error says, as a regular expression; empty when it must have no effect.
        limit_mb: how much memory reading may take at most.
    """

    make: Callable[[Path], object]
    reason: str
    limit_mb: int = 8


def make_base(path: Path) -> Path:
    """A capture directory of two shards, one RAW and one with a table and PLANES; a third shard lies outside."""
    table = np.full((4, 72), 120, np.uint8)
    for name, prompts, options in (
        (GOOD, GOOD_PROMPTS, {"codec": "none"}),
        (TARGET, TARGET_PROMPTS, {"table": table}),
        (f"../{OUTSIDE}", [[11, 12]], {}),
    ):
        with Host(path / "captures", threads=1, **options) as host:  # type: ignore[arg-type]
            host.capture(prompts)
            host.writer.drain()
            (shard,) = (shard for shard in host.directory.shards() if shard.name.startswith("hashtap-"))
            shard.rename(path / "captures" / name)
    return path


def copy_of(base: Path, path: Path) -> Path:
    """The target shard of a fresh copy."""
    shutil.copytree(base, path)
    return path / "captures" / TARGET
