"""What opening a directory of thousands of shards costs: without an index cache, then with it."""

import os
import time
from pathlib import Path

import numpy as np
from bench.figures import Figure, Measured
from bench.shards import captures

from hashtap.facts import ShardFacts
from hashtap.reader import Reader
from hashtap.shard import sealed_header, trailer_words
from hashtap_kernels.layout import Geometry

SHARDS = 2400
PROMPTS = 56  # of a shard


def measure() -> Measured:
    """Opening 2,400 shards of 2 GB each, sparse: without an index cache, then with it."""
    with captures() as directory:
        for number in range(SHARDS):
            sparse_shard(directory.path / f"shard-{number:05d}.safetensors", number)
        seconds = []
        for _ in range(2):
            started = time.perf_counter()
            reader = Reader(directory)
            seconds.append(time.perf_counter() - started)
        found = {"records": len(reader), "bytes": sum(shard.file_bytes for shard in reader.shards)}
        if len(reader) != SHARDS * PROMPTS or reader.incomplete:
            raise SystemExit(f"no figures without right captures: {found}, {len(reader.incomplete)} incomplete")
    return Measured(
        [
            Figure("opening.2400_cold_s", seconds[0], 20, at_least=False, unit="s"),
            Figure("opening.2400_warm_s", seconds[1], 1, at_least=False, unit="s"),
        ],
        {"opened": found},
    )


def sparse_shard(path: Path, number: int) -> None:
    """A shard of prompts of 1,000 tokens of 4 x 7,168, whose frames are a hole."""
    geometry, prompts, tokens, pieces = Geometry(4, 7168), PROMPTS, 1000, 4
    frame_bytes = (tokens // pieces * geometry.row_bytes * 2 // 3) // 64 * 64
    facts = ShardFacts(
        model="sparse",
        epoch="bench",
        boundaries=(2, 30, 58),
        final_norm="post",
        geometry=geometry,
        seed=(1, 2),
        directory_uuid="",
        writer=f"{number // 100:032x}",
        rank=0,
        versions={},
        server_flags={},
    )
    serials = np.arange(prompts) + number * 1000 + 1
    index = np.zeros((prompts * pieces, 8), "<u8")
    index[:, 0], index[:, 1] = np.arange(len(index)) * frame_bytes, frame_bytes
    index[:, 3] = np.repeat(serials, pieces)
    index[:, 4] = np.arange(len(index)) % pieces * (tokens // pieces) | (tokens // pieces) << 32
    records = np.zeros((prompts, 12), "<u8")
    records[:, 0:2] = np.random.default_rng(number).integers(0, 1 << 63, (prompts, 2))
    records[:, 2], records[:, 3] = serials, tokens
    head = sealed_header(facts, len(index) * frame_bytes, len(index), prompts)
    with path.open("wb") as file:
        file.write(head)
        file.seek(len(index) * frame_bytes, os.SEEK_CUR)
        file.write(index.tobytes() + records.tobytes())
        file.write(trailer_words(head, index.tobytes(), records.tobytes()))
