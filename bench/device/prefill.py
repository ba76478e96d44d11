"""Prefill throughput with capture on and off, interleaved: a Llama-8B-shaped model in plain PyTorch.

Random weights; 8 prompts of 1,024 tokens a forward. With capture, a whole session takes part as in a server: requests
are admitted and hashed, the residual stream after three layers and the final normed state go through kernel, staging
and ring to a writer that compresses them into shards. In the end the directory is verified and one forward compared bit
for bit.

PYTHONPATH=kernels:capture python bench/device/prefill.py [--dry]   (the dry run's session captures on the CPU)
"""

from harness import DEVICE, DRY, SEED, Bench, synchronize  # isort: skip

import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

import hashtap
from hashtap.directory import CaptureDirectory
from hashtap.facts import ShardFacts
from hashtap.session import Batch, Session, Tracked
from hashtap.verify import verify
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
ROUNDS, FORWARDS = (1, 1) if DRY else (6, 4)
THREADS = 2 if DRY else 6


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


class Server:
    """The model, and a session beside it that captures what is asked for."""

    def __init__(self, path: Path) -> None:
        self.model, self.tokens = Model(SHAPE), SHAPE.prompts * SHAPE.tokens
        self.taps = (0, 1, 2) if DRY else (2, SHAPE.layers // 2, SHAPE.layers - 3)
        self.x = torch.randn((self.tokens, SHAPE.hidden), device=DEVICE, dtype=torch.bfloat16)
        self.positions = torch.arange(SHAPE.tokens).repeat(SHAPE.prompts).to(DEVICE)
        self.random = np.random.default_rng(0)
        directory = CaptureDirectory.create(path)
        facts = ShardFacts(
            model="8B-shaped, random",
            epoch="random",
            boundaries=self.taps,
            final_norm="post",
            geometry=Geometry(4, SHAPE.hidden),
            seed=SEED,
            directory_uuid=directory.uuid,
            writer="0" * 32,
            rank=0,
            versions={},
            server_flags={},
        )
        ring_gib = 1 / 64 if DRY else 4
        config = hashtap.CaptureConfig(capture_dir=str(path), capture_ring_gib=ring_gib, capture_writers=THREADS)
        self.session = Session(config, facts, directory, device=str(DEVICE), max_forward_tokens=self.tokens)
        self.captured = 0

    def prompts(self) -> np.ndarray:
        """Token ids of one forward's prompts, int64 ``[prompts, T]``."""
        return self.random.integers(0, 128_000, (SHAPE.prompts, SHAPE.tokens))

    def capture(self, prompts: np.ndarray, input_ids: torch.Tensor) -> list[torch.Tensor]:
        """One captured forward, with all that it costs the scheduler's thread; its states."""
        kept: list[Tracked] = [self.session.admit(str(number), ids) for number, ids in enumerate(prompts)]
        while not self.session.may_admit():
            time.sleep(1e-3)
        states = self.model.forward(self.x, set(self.taps))
        lens, prefixes = [SHAPE.tokens] * SHAPE.prompts, [0] * SHAPE.prompts
        rids = [tracked.rid for tracked in kept]
        self.session.capture(Batch(rids, lens, prefixes, input_ids, self.positions, states[:-1], states[-1]))
        self.captured += sum(tracked.state == "captured" for tracked in kept)
        return states

    def speed(self, capture: bool) -> float:
        """Tokens a second of some forwards one behind the other."""
        while self.session.counters()["queue"]:  # what was captured before does not run into this measurement
            time.sleep(1e-2)
        forwards = [
            (ids, torch.from_numpy(ids.reshape(-1)).to(DEVICE)) for ids in (self.prompts() for _ in range(FORWARDS))
        ]
        synchronize()
        start = time.perf_counter()
        for prompts, input_ids in forwards:
            if capture:
                self.capture(prompts, input_ids)
            else:
                self.model.forward(self.x, set(self.taps))
        synchronize()
        return FORWARDS * self.tokens / (time.perf_counter() - start)


@torch.inference_mode()
def run(bench: Bench, path: Path) -> None:
    server = Server(path)
    server.speed(False), server.speed(True)
    ratios = []
    for number in range(ROUNDS):
        first = bool(number % 2)
        speeds = {capture: server.speed(capture) for capture in (first, not first)}
        ratios.append(speeds[True] / speeds[False])
        bench.row("prefill", round=number, off_tokens_s=speeds[False], on_tokens_s=speeds[True], ratio=ratios[-1])
        if bench.left_s() < 50:
            break
    bench.bar("prefill throughput with capture", statistics.median(ratios), least=0.99)

    prompts = server.prompts()
    states = torch.stack(server.capture(prompts, torch.from_numpy(prompts.reshape(-1)).to(DEVICE)), dim=1)
    start = time.perf_counter()
    server.session.close()
    counts = server.session.counters()
    bench.row("writer", drained_s=time.perf_counter() - start, **counts)
    reader = hashtap.open(path)
    expected = states.view(SHAPE.prompts, SHAPE.tokens, *states.shape[1:])
    good = all(same_bits(reader.by_token_ids(ids), rows) for ids, rows in zip(prompts, expected, strict=True))
    bench.exact("prefill captured bits equal", good)
    bench.exact("prefill every prompt in a sealed shard", len(reader) == server.captured == counts["captured"])
    report = verify(path, quick=bench.left_s() < 40)
    bench.row("verify", quick=report.quick, verified=report.verified, problems=len(report.problems))
    bench.exact("prefill directory verified", report.ok)


def same_bits(capture: hashtap.Capture, rows: torch.Tensor) -> bool:
    """Whether a capture holds these states, read on the CPU and put together on the device."""
    on_device = DRY or torch.equal(capture.tensor(str(DEVICE)).view(torch.int16), rows.view(torch.int16))
    return on_device and torch.equal(capture.tensor().view(torch.int16), rows.cpu().view(torch.int16))


def main() -> None:
    bench = Bench("prefill", budget_s=150)
    with tempfile.TemporaryDirectory(prefix="prefill-") as folder:
        run(bench, Path(folder))
    bench.finish()


if __name__ == "__main__":
    main()
