"""The kernel's speed against the same run's device-to-device copy, by shape and grid; what a launch costs the host.

PYTHONPATH=kernels:capture python bench/device/kernel.py [--dry]
"""

from harness import DEVICE, DRY, Bare, Batch, Bench, Way, seconds, synchronize  # isort: skip

import statistics
import time

import numpy as np
import torch
import triton

from hashtap_kernels.gather import Gather
from hashtap_kernels.layout import Geometry, Payload
from hashtap_kernels.restore import restore

# Tokens, requests, hidden size; the bars are held against the first two.
SHAPES = [(12, 3, 64), (8, 2, 40)] if DRY else [(8192, 8, 7168), (8192, 8, 4096), (2048, 16, 7168), (512, 4, 7168)]


def copy_rate(payload_bytes: int) -> float:
    """GB/s of a device-to-device copy of as many bytes, reads and writes counted."""
    source = torch.empty(payload_bytes, dtype=torch.uint8, device=DEVICE).fill_(7)
    target = torch.empty_like(source)
    return 2 * payload_bytes / seconds(lambda _: target.copy_(source)) / 1e9


def shape_rates(bench: Bench, tokens: int, requests: int, hidden: int, with_bar: bool) -> None:
    geometry = Geometry(4, hidden)
    batch = Batch(tokens, requests, geometry, sets=2 if tokens > 4096 else 4)
    out = torch.empty(batch.plan.bytes, dtype=torch.uint8, device=DEVICE)
    grids = {"rows": tokens} | {f"{k}/SM": min(tokens, k * bench.processors) for k in (32, 16, 8, 4, 2, 1)}
    rates: dict[tuple[str, str], float] = {}
    copies = [copy_rate(batch.payload_bytes)]
    for payload in (Payload.RAW, Payload.PLANES):
        name, table = payload.name.lower(), batch.table if payload == Payload.PLANES else None
        for grid, programs in grids.items():
            turns = [Bare(batch, payload, programs, turn) for turn in range(len(batch.sets))]
            taken_s = seconds(lambda turn, turns=turns: turns[turn % len(turns)].launch(out))
            rates[name, grid] = 2 * batch.payload_bytes / taken_s / 1e9
        copies.append(copy_rate(batch.payload_bytes))
        gather = Gather(geometry, DEVICE, len(batch.plan))
        gather.set_table(table)
        taken_s = seconds(lambda turn, gather=gather: batch.launch(gather, out, turn))
        rates[name, "as served"] = 2 * batch.payload_bytes / taken_s / 1e9
        out.zero_()
        batch.launch(gather, out, 1)
        synchronize()
        bench.exact(
            f"{name} T={tokens} H={hidden} bits equal", np.array_equal(out.cpu().numpy(), batch.expected(1, table))
        )
    copy = statistics.median(copies)
    for (payload, grid), rate in rates.items():
        of_copy = rate / copy
        bench.row("kernel", T=tokens, H=hidden, payload=payload, grid=grid, gb_s=rate, copy_gb_s=copy, of_copy=of_copy)
    if with_bar:
        raw, planes = rates["raw", "32/SM"], rates["planes", "32/SM"]
        bench.bar(f"kernel T={tokens} H={hidden} of device copy", raw / copy, least=0.90)
        bench.bar(f"planes T={tokens} H={hidden} of raw", planes / raw, least=0.90)


def restore_rate(bench: Bench, tokens: int, hidden: int) -> None:
    exponents = torch.randint(0, 256, (tokens, 4, hidden), dtype=torch.uint8, device=DEVICE)
    rests, table = exponents.clone(), exponents[0].clone()
    out = torch.empty((tokens, 4, hidden), dtype=torch.bfloat16, device=DEVICE)
    rate = 2 * out.numel() * 2 / seconds(lambda _: restore(exponents, rests, table, out)) / 1e9
    copy = copy_rate(out.numel() * 2)
    bench.row("restore", T=tokens, H=hidden, gb_s=rate, copy_gb_s=copy, of_copy=rate / copy)


def host_cost(bench: Bench, requests: int) -> None:
    """Microseconds that one forward's way takes the calling thread, and what it asks of CUDA."""
    batch = Batch(max(requests, 16) if DRY else 2048, requests, Geometry(4, 64 if DRY else 4096))
    way = Way(batch)
    way.send(batch)[1]()
    times = []
    for _ in range(2 if DRY else 200):
        start = time.perf_counter()
        _, wait = way.send(batch)
        times.append(time.perf_counter() - start)
        wait()
    bench.row("host", requests=requests, send_us=statistics.median(times) * 1e6)
    if DRY or requests != 64:
        return
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    with torch.profiler.profile() as profile:
        torch.cuda.set_sync_debug_mode("error")  # a wait inside torch raises
        _, wait = way.send(batch)
        torch.cuda.set_sync_debug_mode("default")
    wait()
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - allocated
    on_device = [call.name for call in profile.events() if call.device_type == torch.autograd.DeviceType.CUDA]
    launches = sum(not name.startswith("Mem") for name in on_device)
    # The profiler itself synchronises the device, by another call than these.
    waits = sum(call.name.endswith(("StreamSynchronize", "EventSynchronize")) for call in profile.events())
    bench.row("profiler", launches=launches, copies=len(on_device) - launches, waits=waits, allocations=allocations)
    bench.bar("launches a forward", launches, least=1, most=1)
    bench.bar("host waits a forward", waits, most=0)
    bench.bar("device allocations a forward", allocations, most=0)


def nothing_compiled_late(bench: Bench) -> None:
    """All forms of the kernel are compiled when a transport is opened; later forwards of any shape add none."""
    batches = [
        Batch(tokens, requests, Geometry(3, 584), seed=tokens) for tokens, requests in ((300, 17), (9, 3), (1, 1))
    ]
    way = Way(batches[0])
    late: list[object] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **facts: late.append(facts["key"])
    for table in (None, batches[0].table):
        for batch in batches:
            way.send(batch, table=table)[1]()
    triton.knobs.runtime.jit_post_compile_hook = None
    bench.exact("nothing compiled while serving", not late)


def main() -> None:
    bench = Bench("kernel", budget_s=300)
    for number, (tokens, requests, hidden) in enumerate(SHAPES):
        with_bar = number < 2
        if with_bar or bench.left_s() > 20:
            shape_rates(bench, tokens, requests, hidden, with_bar)
    restore_rate(bench, SHAPES[0][0], SHAPES[0][2])
    for requests in (1, 8) if DRY else (1, 8, 64, 256):
        host_cost(bench, requests)
    nothing_compiled_late(bench)
    bench.finish()


if __name__ == "__main__":
    main()
