"""Prefill throughput with capture on and off, interleaved: a Llama-8B-shaped model in plain PyTorch.

Random weights; 8 prompts of 1,024 tokens a forward. With capture, the residual stream after three layers and the final
normed state are gathered, staged and copied to pinned memory on a side stream, forward after forward.

PYTHONPATH=kernels python bench/device/prefill.py [--dry]
"""

from harness import DEVICE, DRY, Batch, Bench, Staged, synchronize  # isort: skip

import statistics
import time
from dataclasses import dataclass

import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from hashtap_kernels.layout import Geometry


@dataclass(frozen=True)
class Shape:
    layers: int = 32
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    inner: int = 14336
    prompts: int = 8
    tokens: int = 1024


SHAPE = Shape(layers=4, hidden=64, heads=4, kv_heads=2, inner=96, prompts=2, tokens=5) if DRY else Shape()
ROUNDS, FORWARDS = (1, 1) if DRY else (12, 6)


class Model:
    """The matrix products, norms and attention of a Llama decoder; no rotary embedding, which costs next to nothing."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        width = shape.hidden // shape.heads
        sizes = {
            "qkv": (shape.hidden + 2 * shape.kv_heads * width, shape.hidden),
            "o": (shape.hidden, shape.hidden),
            "gate_up": (2 * shape.inner, shape.hidden),
            "down": (shape.hidden, shape.inner),
        }
        self.layers = [
            {name: torch.randn(size, device=DEVICE, dtype=torch.bfloat16) * 0.02 for name, size in sizes.items()}
            for _ in range(shape.layers)
        ]

    def forward(self, x: torch.Tensor, taps: set[int]) -> list[torch.Tensor]:
        """The residual stream ``[T, H]`` before each tapped layer, then the final normed state ``[T, H]``."""
        shape, tapped = self.shape, []
        width = shape.hidden // shape.heads
        split = [shape.hidden, shape.kv_heads * width, shape.kv_heads * width]
        for number, weights in enumerate(self.layers):
            if number in taps:
                tapped.append(x)
            parts = linear(rms_norm(x, (shape.hidden,)), weights["qkv"]).split(split, dim=-1)
            q, k, v = (part.view(shape.prompts, shape.tokens, -1, width).transpose(1, 2) for part in parts)
            mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + linear(mixed.transpose(1, 2).reshape(x.shape), weights["o"])
            gate, up = linear(rms_norm(x, (shape.hidden,)), weights["gate_up"]).chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, weights["down"])
        return [*tapped, rms_norm(x, (shape.hidden,))]


@torch.inference_mode()
def main() -> None:
    bench = Bench("prefill", budget_s=240)
    model, tokens = Model(SHAPE), SHAPE.prompts * SHAPE.tokens
    taps = {2, SHAPE.layers // 2, SHAPE.layers - 3} if not DRY else {0, 1, 2}
    batch = Batch(tokens, SHAPE.prompts, Geometry(4, SHAPE.hidden))
    way = Staged(batch.geometry, batch.plan.bytes, len(batch.plan))
    x = torch.randn((tokens, SHAPE.hidden), device=DEVICE, dtype=torch.bfloat16)

    def run(capture: bool) -> float:
        synchronize()
        start = time.perf_counter()
        for _ in range(FORWARDS):
            states = model.forward(x, taps)
            if capture:
                way.send(batch, sources=states)
        synchronize()
        return FORWARDS * tokens / (time.perf_counter() - start)

    run(False), run(True)
    ratios = []
    for number in range(ROUNDS):
        first = bool(number % 2)
        speeds = {capture: run(capture) for capture in (first, not first)}
        ratios.append(speeds[True] / speeds[False])
        bench.row("prefill", round=number, off_tokens_s=speeds[False], on_tokens_s=speeds[True], ratio=ratios[-1])
        if bench.left_s() < 30:
            break
    bench.bar("prefill throughput with capture", statistics.median(ratios), least=0.99)

    batch.sets = [model.forward(x, taps)]
    slot = way.send(batch)
    way.arrived[slot].synchronize()
    bench.exact(
        "captured bits equal", way.ring[slot].numpy()[: batch.plan.bytes].tobytes() == batch.expected().tobytes()
    )
    bench.finish()


if __name__ == "__main__":
    main()
