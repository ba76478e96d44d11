"""The way to the host: staging and copy engine against the bare pinned copy, and against stores into pinned memory.

Also: what either does to matrix products beside it, and whether a record is ever seen before it is whole.

PYTHONPATH=kernels:capture python bench/device/transfer.py [--dry]
"""

from harness import DEVICE, DRY, Bare, Batch, Bench, Way, clock, on, pinned, seconds, stream, synchronize  # isort: skip

import time

import torch

from hashtap_kernels.layout import Geometry, Payload

TOKENS, REQUESTS, HIDDEN = (12, 3, 64) if DRY else (8192, 8, 7168)
FORWARDS = 3 if DRY else 40


def pinned_copy_rate(size: int) -> float:
    """GB/s of one device-to-pinned copy."""
    source, target = torch.empty(size, dtype=torch.uint8, device=DEVICE).fill_(7), pinned(size)
    return size / seconds(lambda _: target.copy_(source, non_blocking=True), 5) / 1e9


def staged_rate(bench: Bench) -> None:
    """Forwards one behind the other through two slots: the copy engine must never be the one that waits."""
    batch = Batch(TOKENS, REQUESTS, Geometry(4, HIDDEN), sets=2)
    way = Way(batch)
    way.send(batch)[1]()
    before = pinned_copy_rate(batch.plan.bytes)
    start = time.perf_counter()
    sent = [way.send(batch, turn) for turn in range(FORWARDS)]
    sent[-1][1]()
    rate = FORWARDS * batch.plan.bytes / (time.perf_counter() - start) / 1e9
    copy = (before + pinned_copy_rate(batch.plan.bytes)) / 2
    bench.row("staged", T=TOKENS, H=HIDDEN, gb_s=rate, pinned_copy_gb_s=copy)
    bench.bar("transfer of pinned copy", rate / copy, least=0.95)
    bench.exact("staged bits equal", sent[-1][0].tobytes() == batch.expected(FORWARDS - 1).tobytes())


def direct_rates(bench: Bench) -> None:
    """Stores straight into pinned memory, by number of programs."""
    batch = Batch(TOKENS // 4, REQUESTS, Geometry(4, HIDDEN))
    ring = pinned(batch.plan.bytes)
    copy = pinned_copy_rate(batch.plan.bytes)
    for programs in (2,) if DRY else (1, 2, 4, 8, 16, 32, bench.processors, 4 * bench.processors):
        bare = Bare(batch, Payload.RAW, programs)
        rate = batch.plan.bytes / seconds(lambda _, bare=bare: bare.launch(ring), 3, 1) / 1e9
        bench.row("direct", programs=programs, gb_s=rate, of_pinned_copy=rate / copy)
    bench.exact("direct bits equal", ring.numpy().tobytes() == batch.expected().tobytes())


def interference(bench: Bench) -> None:
    """Milliseconds of a matrix product while another stream moves frames to the host without a pause."""
    n, products, moves = (64, 2, 1) if DRY else (8192, 60, 80)
    a, b = torch.rand((2, n, n), device=DEVICE).to(torch.bfloat16)
    product = torch.empty_like(a)
    batch = Batch(TOKENS // 4, REQUESTS, Geometry(4, HIDDEN))
    ring, side = pinned(batch.plan.bytes), stream()
    staging = torch.empty(batch.plan.bytes, dtype=torch.uint8, device=DEVICE)
    loads = {"none": lambda: None, "copy engine": lambda: ring.copy_(staging, non_blocking=True)}
    for programs in (1,) if DRY else (1, 4, 8, 16):
        bare = Bare(batch, Payload.RAW, programs)
        bare.launch(ring)
        loads[f"{programs} programs"] = lambda bare=bare: bare.launch(ring)
    loads["none again"] = loads["none"]
    alone_ms = 0.0
    for name, load in loads.items():
        torch.mm(a, b, out=product)
        synchronize()
        start, end = clock(), clock()
        with on(side):
            for _ in range(moves):
                load()
        start.record()
        for _ in range(products):
            torch.mm(a, b, out=product)
        end.record()
        synchronize()
        taken_ms = start.elapsed_time(end) / products
        alone_ms = alone_ms or taken_ms
        bench.row("matrix product", beside=name, ms=taken_ms, slowdown=taken_ms / alone_ms - 1)


def torn_reads(bench: Bench) -> None:
    """Small forwards whose slots are filled again and again; each is checked as soon as its event says it is there."""
    trials = 3 if DRY else 300
    batches = [Batch(9 if DRY else 64, 2, Geometry(4, HIDDEN), seed=seed) for seed in range(4)]
    way = Way(batches[0])
    torn = early = 0
    for trial in range(trials):
        batch = batches[trial % len(batches)]
        frames, wait = way.send(batch)
        # Looked at too soon on purpose: it shows that the check would notice.
        early += not batch.whole(frames) or frames[40:56].tobytes() != batch.pieces[0].key
        wait()
        torn += not batch.whole(frames) or frames[40:56].tobytes() != batch.pieces[0].key
    bench.row("torn reads", trials=trials, torn_after_event=torn, wrong_before_event=early)
    bench.exact("no torn record after its event", torn == 0)


def main() -> None:
    bench = Bench("transfer", budget_s=240)
    staged_rate(bench)
    direct_rates(bench)
    torn_reads(bench)
    if bench.left_s() > 15:
        interference(bench)
    bench.finish()


if __name__ == "__main__":
    main()
