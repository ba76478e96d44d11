"""Rows around element 2**31 (and 64-bit word 2**31) of sources and output, where a 32-bit product would wrap.

The buffers are sparse files: only the pages that are touched take room.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from batches import FORWARD, POISON, SEED, Request, make_batch

from hashtap_kernels.gather import NUM_WARPS, compile_constants, control_words, gather
from hashtap_kernels.gather_kernel import DESCRIPTORS, gather_kernel
from hashtap_kernels.layout import Geometry, Payload
from hashtap_kernels.plan import OFFSET, Piece, plan_frames
from hashtap_kernels.reference import gather_reference

# The row of a [rows, 4, H] buffer that holds element 2**31; the last: word 2**31, four elements each.
WRAPS = [(7168, 74_898), (4096, 131_072), (7168, 299_593)]
ROWS = 5


def sparse(path: Path, size: int) -> torch.Tensor:
    return torch.from_numpy(np.memmap(path, np.uint8, mode="w+", shape=(size,)))


@pytest.mark.parametrize("planes", [False, True])
@pytest.mark.parametrize(("hidden", "wrap"), WRAPS)
def test_sources(tmp_path: Path, hidden: int, wrap: int, planes: bool) -> None:
    geometry, first = Geometry(4, hidden), wrap - ROWS // 2
    buffer = sparse(tmp_path / "sources", (first + ROWS) * geometry.row_bytes).view(torch.bfloat16).view(-1, 4 * hidden)
    rng = np.random.default_rng(hidden)
    buffer[first:].view(torch.int16).numpy()[:] = rng.integers(-(1 << 15), 1 << 15, (ROWS, 4 * hidden))
    sources = [buffer[:, layer * hidden : (layer + 1) * hidden] for layer in range(4)]
    ids, positions = torch.arange(first + ROWS), torch.arange(first + ROWS)
    plan = plan_frames([Piece(first, ROWS, first, first + ROWS, 1, bytes(16))], geometry)
    table = rng.integers(0, 256, (4, hidden), np.uint8) if planes else None
    frames = []
    for function in (gather, gather_reference):
        out = torch.full((plan.bytes,), POISON, dtype=torch.uint8)
        facts = {"geometry": geometry, "seed": SEED, "table": table, "forward": FORWARD}
        function(sources, ids, positions, plan, out, **facts)
        frames.append(out.numpy().tobytes())
    assert frames[0] == frames[1]
    if not planes:
        values = torch.stack([source[first:] for source in sources], dim=1).view(torch.uint8).numpy().tobytes()
        assert frames[0][128 : 128 + len(values)] == values


@pytest.mark.parametrize("payload", [Payload.RAW, Payload.PLANES])
@pytest.mark.parametrize(("hidden", "wrap"), WRAPS)
def test_output(tmp_path: Path, hidden: int, wrap: int, payload: Payload) -> None:
    """The frame that straddles the wrap of the output is the one that starts at byte 0."""
    geometry = Geometry(4, hidden)
    batch = make_batch(geometry, [Request(ROWS)], "packed")
    offset = (wrap * geometry.row_bytes - 128 - ROWS // 2 * geometry.row_bytes) // 64 * 64
    out = sparse(tmp_path / "out", offset + batch.plan.bytes)
    table = torch.full((4 * hidden,), 120, dtype=torch.uint8)
    for start in (0, offset):
        arguments = (batch.sources, batch.input_ids, batch.positions, batch.plan)
        words = control_words(*arguments, seed=SEED, table_id=7, forward=FORWARD)
        words[DESCRIPTORS.value + OFFSET] = start
        constants = compile_constants(geometry, payload)
        gather_kernel[(2,)](torch.from_numpy(words), table, out, **constants, num_warps=NUM_WARPS)
    assert out[:8].numpy().tobytes() == b"HASHTAP1"
    assert torch.equal(out[offset:], out[: batch.plan.bytes])
