"""Every form of the kernels on a real GPU, bit for bit against the reference; every byte around the frames is watched.

PYTHONPATH=kernels:capture python bench/device/correctness.py [--dry]
"""

from harness import DEVICE, DRY, SEED, Bench, pinned, synchronize  # isort: skip

import numpy as np
import torch

from hashtap_kernels.contract import TORCH_DTYPE
from hashtap_kernels.gather import Gather
from hashtap_kernels.layout import Dtype, Geometry
from hashtap_kernels.plan import Piece, plan_frames
from hashtap_kernels.reference import gather_reference
from hashtap_kernels.restore import restore, restore_reference

MARGIN, POISON = 4096, 0xA5
# Sizes that every form is tried with, and sizes for the usual one.
ALL_FORMS = [40] if DRY else [584, 7168]
USUAL_FORM = [8, 72] if DRY else [8, 576, 2880, 4096, 16384]


def sources_of(geometry: Geometry, rows: int, form: str) -> list[torch.Tensor]:
    L, H = geometry.layers, geometry.hidden
    width = {"list": H, "strided": H + 48, "packed": L * H}[form] * geometry.dtype.element_bytes
    buffers = [torch.randint(0, 256, (rows, width), dtype=torch.uint8, device=DEVICE) for _ in range(L)]
    typed = [buffer.view(TORCH_DTYPE[geometry.dtype]) for buffer in buffers]
    if form == "packed":
        return [typed[0][:, layer * H : (layer + 1) * H] for layer in range(L)]
    return [tensor[:, -H:] for tensor in typed]


def check_gather(bench: Bench, geometry: Geometry, form: str, programs: int, host_output: bool) -> None:
    """Captured and left-out requests, several frames, a prefix; RAW, then PLANES where there are."""
    if not bench.mine():
        return
    lengths = [3, 5, 1, 4] if DRY else [300, 5, 1, 700]
    starts = np.cumsum(lengths) - lengths
    pieces = [
        Piece(int(start), n, 7 * i, 7 * i + n, i, bytes(16))
        for i, (start, n) in enumerate(zip(starts, lengths, strict=True))
        if i != 1
    ]
    plan = plan_frames(pieces, geometry)
    rows = sum(lengths) + 3
    sources = sources_of(geometry, rows, form)
    input_ids = torch.randint(0, 1 << 40, (rows,), device=DEVICE)
    positions = torch.cat([7 * i + torch.arange(n) for i, n in enumerate(lengths)] + [torch.arange(3)]).to(DEVICE)
    size = plan.bytes + 2 * MARGIN
    out = pinned(size) if host_output else torch.empty(size, dtype=torch.uint8, device=DEVICE)
    gather = Gather(geometry, DEVICE, len(plan), programs=programs)
    table = np.random.default_rng(0).integers(0, 256, (geometry.layers, geometry.hidden), np.uint8)
    for centre in (None, table) if geometry.dtype in (Dtype.BF16, Dtype.FP16) else (None,):
        out.fill_(POISON)
        gather.set_table(centre)
        target = out[MARGIN : MARGIN + plan.bytes]
        gather.launch(sources, input_ids, positions, plan, target, seed=SEED, forward=9)
        synchronize()
        got = out.cpu().numpy()
        expected = np.full(size, POISON, np.uint8)
        arguments = ([source.cpu() for source in sources], input_ids.cpu(), positions.cpu(), plan)
        facts = {"geometry": geometry, "seed": SEED, "table": centre, "forward": 9}
        gather_reference(*arguments, expected[MARGIN : MARGIN + plan.bytes], **facts)
        payload = "raw" if centre is None else "planes"
        where = "pinned" if host_output else "device"
        name = f"{payload} {form} L={geometry.layers} H={geometry.hidden} {geometry.dtype.name} {where} x{programs}"
        bench.exact(name, np.array_equal(got, expected))


def check_restore(bench: Bench, layers: int, hidden: int) -> None:
    if not bench.mine():
        return
    n = 5 if DRY else 777
    exponents, rests = torch.randint(0, 256, (2, n, layers, hidden), dtype=torch.uint8, device=DEVICE)
    table = torch.randint(0, 256, (layers, hidden), dtype=torch.uint8, device=DEVICE)
    planes = (exponents.clone(), rests.clone(), table)
    for dtype in (torch.bfloat16, torch.float16):
        out = torch.empty((n, layers, hidden), dtype=dtype, device=DEVICE)
        expected = torch.empty((n, layers, hidden), dtype=dtype)
        restore(*planes, out)
        restore_reference(*(plane.cpu() for plane in planes), expected)
        good = torch.equal(out.cpu().view(torch.int16), expected.view(torch.int16))
        bench.exact(f"restore L={layers} H={hidden} {dtype}", good)


def main() -> None:
    bench = Bench("correctness", budget_s=240)
    for hidden in USUAL_FORM:
        check_gather(bench, Geometry(4, hidden), "packed", 0, host_output=False)
        check_restore(bench, 4, hidden)
    for hidden in ALL_FORMS:
        for layers, form in ((4, "list"), (4, "packed"), (1, "strided"), (3, "packed"), (8, "strided")):
            for programs in (0, 7):
                check_gather(bench, Geometry(layers, hidden), form, programs, host_output=False)
        check_gather(bench, Geometry(4, hidden), "packed", 8, host_output=True)
        for dtype in (Dtype.FP16, Dtype.FP32, Dtype.FP8_E4M3):
            check_gather(bench, Geometry(4, hidden, dtype), "list", 0, host_output=False)
        for layers in (1, 3, 8):
            check_restore(bench, layers, hidden)
    bench.finish()


if __name__ == "__main__":
    main()
