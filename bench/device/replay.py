"""One captured launch, replayed over other frames, rows, requests and token ids: nothing about a batch is in the graph.

PYTHONPATH=kernels:capture python bench/device/replay.py [--dry]   (the dry run launches where the real one replays)
"""

from harness import DEVICE, DRY, Bare, Batch, Bench, seconds, synchronize  # isort: skip

from functools import partial

import numpy as np
import torch

from hashtap_kernels.layout import Geometry, Payload

SHAPES = [(12, 3), (9, 1), (5, 5)] if DRY else [(2048, 16), (1777, 3), (64, 64), (1, 1), (2048, 1)]
HIDDEN = 64 if DRY else 7168


def main() -> None:
    bench = Bench("replay", budget_s=120)
    geometry = Geometry(4, HIDDEN)
    batches = [Batch(tokens, requests, geometry, seed=i) for i, (tokens, requests) in enumerate(SHAPES)]
    out = torch.empty(max(batch.plan.bytes for batch in batches), dtype=torch.uint8, device=DEVICE)
    for payload in (Payload.RAW, Payload.PLANES):
        bare = Bare(batches[0], payload, 4 * bench.processors)
        most = max(batch.plan.descriptors.size for batch in batches)
        control = torch.zeros(len(bare.control) + most, dtype=torch.int64, device=DEVICE)
        bare.control = control
        bare.launch(out)  # compiled before it is captured; an empty control array writes nothing
        synchronize()
        replay = _captured(bare, out)
        for batch in batches:
            batch.table = batches[0].table
            words = torch.from_numpy(bare.words(batch, payload))
            control[: len(words)].copy_(words)
            out.fill_(0xA5)
            replay()
            synchronize()
            expected = np.full(len(out), 0xA5, np.uint8)
            table = batch.table if payload == Payload.PLANES else None
            expected[: batch.plan.bytes] = batch.expected(0, table)
            name = f"replay {payload.name.lower()} T={batch.tokens} R={len(batch.pieces)} bits equal"
            bench.exact(name, np.array_equal(out.cpu().numpy(), expected))
        bench.row("replay", payload=payload.name.lower(), T=batch.tokens, us=seconds(lambda _, r=replay: r()) * 1e6)
    bench.finish()


def _captured(bare: Bare, out: torch.Tensor):
    if DRY:
        return partial(bare.launch, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        bare.launch(out)
    return partial(graph.replay)


if __name__ == "__main__":
    main()
