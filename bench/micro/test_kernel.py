"""The gather of 2,048 rows of real states into frames, and planes back to elements; GB/s of states.

The interpreter's speed says nothing: the kernel itself is measured where there is a GPU, its NumPy definition anywhere.
"""

from typing import Any

import numpy as np
import pytest
import torch
from bench.feed import SEED, Feed

from hashtap.exponents import TableBuilder
from hashtap_kernels.layout import HEADER_BYTES
from hashtap_kernels.plan import OFFSET, Piece, plan_frames
from hashtap_kernels.planes import from_planes, to_planes
from hashtap_kernels.reference import gather_reference

PROMPTS = 8
LAUNCHES = 100  # of the kernel in a round, after which the host waits
forms = pytest.mark.parametrize("planes", [False, True], ids=["raw", "planes"])


class Forward:
    """Eight prompts of one frame each.

    Attributes:
        rows: bit patterns, uint16 ``[T, L, H]``.
        batch: L sources ``[T, H]``, ids and positions ``[T]``, and the plan: what a gather is given.
        table: uint8 ``[L, H]``, or None for raw frames.
    """

    def __init__(self, feed: Feed, planes: bool) -> None:
        each, self.geometry = len(feed.rows), feed.geometry
        self.rows = np.tile(feed.rows, (PROMPTS, 1, 1))
        tables = TableBuilder(self.geometry, each)
        tables.observe(feed.rows)
        self.table = tables.table if planes else None
        plan = plan_frames([Piece(at * each, each, 0, each, at + 1, bytes(16)) for at in range(PROMPTS)], self.geometry)
        layers = [torch.from_numpy(self.rows[:, layer].copy()).view(torch.bfloat16) for layer in range(4)]
        positions = torch.arange(each).tile(PROMPTS)
        self.batch = layers, positions.clone(), positions, plan
        self.each, self.plan = each, plan

    def gather(self, out: Any) -> None:
        gather_reference(*self.batch, out, geometry=self.geometry, seed=SEED, table=self.table, forward=1)

    def values(self, frame: Any) -> Any:
        """The elements of a gathered frame (uint8), uint16 ``[n, L, H]``."""
        shape = self.each, *self.rows.shape[1:]
        payload = frame[HEADER_BYTES:][: self.each * self.geometry.row_bytes]
        if self.table is None:
            return payload.view(np.uint16).reshape(shape)
        values = np.empty(shape, np.uint16)
        from_planes(*payload.reshape(2, *shape), self.table, values)
        return values


@forms
def test_gather_reference(beside: Any, feed: Feed, planes: bool) -> None:
    forward = Forward(feed, planes)
    out, copy = np.zeros(forward.plan.bytes, np.uint8), np.empty_like(forward.rows)
    forward.gather(out)
    for offset in forward.plan.descriptors[:, OFFSET]:
        assert np.array_equal(forward.values(out[offset:]), feed.rows)
    size = forward.rows.nbytes / 1e9
    beside(lambda: forward.gather(out), "memcpy", lambda: np.copyto(copy, forward.rows), gigabytes=size)


def test_planes_inverse(beside: Any, feed: Feed) -> None:
    forward = Forward(feed, True)
    exponents, rests = np.empty((2, *forward.rows.shape), np.uint8)
    to_planes(forward.rows, forward.table, exponents, rests)
    out, copy = np.zeros_like(forward.rows), np.empty_like(forward.rows)
    from_planes(exponents, rests, forward.table, out)
    assert np.array_equal(out, forward.rows)
    size = forward.rows.nbytes / 1e9
    beside(
        lambda: from_planes(exponents, rests, forward.table, out),
        "memcpy",
        lambda: np.copyto(copy, forward.rows),
        gigabytes=size,
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@forms
def test_gather_kernel(beside: Any, feed: Feed, planes: bool) -> None:
    from hashtap_kernels.gather import Gather

    forward = Forward(feed, planes)
    expected = np.zeros(forward.plan.bytes, np.uint8)
    forward.gather(expected)
    layers, ids, positions, plan = forward.batch
    batch = [layer.cuda() for layer in layers], ids.cuda(), positions.cuda(), plan
    out = torch.zeros(plan.bytes, dtype=torch.uint8, device="cuda")
    source = torch.zeros(forward.rows.nbytes, dtype=torch.uint8, device="cuda")
    copy = torch.empty_like(source)
    gather = Gather(forward.geometry, "cuda", PROMPTS)
    gather.set_table(forward.table)

    def launches() -> None:
        for _ in range(LAUNCHES):
            gather.launch(*batch, out, seed=SEED, forward=1)
        torch.cuda.synchronize()

    def copies() -> None:
        for _ in range(LAUNCHES):
            copy.copy_(source)
        torch.cuda.synchronize()

    launches()
    assert np.array_equal(out.cpu().numpy(), expected)
    beside(launches, "device copy", copies, gigabytes=LAUNCHES * forward.rows.nbytes / 1e9)
