"""The reference gather against frames that plain Python builds byte by byte."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import (
    FORWARD,
    SEED,
    Batch,
    Request,
    expected_frames,
    make_batch,
    make_table,
    margins_untouched,
    poisoned,
)

from hashtap_kernels.layout import HEADER, Dtype, Geometry
from hashtap_kernels.plan import Piece, plan_frames
from hashtap_kernels.proof import add_proofs, prompt_proof, table_id
from hashtap_kernels.reference import gather_reference

MIXED = [Request(5), Request(2, captured=False), Request(1, prefix=9), Request(0), Request(7, prefix=3, rest=4)]


def gather(batch: Batch, table: np.ndarray | None = None) -> np.ndarray:
    """The frames of ``batch``; fails when a byte outside of them was touched."""
    whole, out = poisoned(batch.plan.bytes)
    arguments = (batch.sources, batch.input_ids, batch.positions, batch.plan, out)
    gather_reference(*arguments, geometry=batch.geometry, seed=SEED, table=table, forward=FORWARD)
    assert margins_untouched(whole)
    return out


@pytest.mark.parametrize("form", ["list", "packed", "strided"])
@pytest.mark.parametrize("planes", [False, True])
@pytest.mark.parametrize(("layers", "hidden"), [(4, 24), (1, 8), (3, 72), (8, 16)])
def test_bytes(layers: int, hidden: int, planes: bool, form: str) -> None:
    geometry = Geometry(layers, hidden)
    batch = make_batch(geometry, MIXED, form)
    table = make_table(geometry) if planes else None
    expected = expected_frames(batch, table, 0 if table is None else table_id(table))
    assert gather(batch, table).tobytes() == expected


@pytest.mark.parametrize("dtype", Dtype)
def test_bytes_of_each_dtype(dtype: Dtype) -> None:
    batch = make_batch(Geometry(3, 40, dtype), MIXED)
    assert gather(batch).tobytes() == expected_frames(batch, None, 0)


def test_bytes_of_several_frames_a_piece() -> None:
    geometry = Geometry(2, 8, Dtype.FP16)
    batch = make_batch(geometry, [Request(1), Request(515, prefix=100, rest=1), Request(256)])
    table = make_table(geometry)
    assert len(batch.plan) == 5
    assert gather(batch).tobytes() == expected_frames(batch, None, 0)
    assert gather(batch, table).tobytes() == expected_frames(batch, table, table_id(table))


def test_output_may_be_a_tensor() -> None:
    batch = make_batch(Geometry(2, 16), MIXED)
    out = torch.zeros(batch.plan.bytes, dtype=torch.uint8)
    arguments = (batch.sources, batch.input_ids, batch.positions, batch.plan, out)
    gather_reference(*arguments, geometry=batch.geometry, seed=SEED, table=None, forward=FORWARD)
    assert out.numpy().tobytes() == gather(batch).tobytes()


def test_nothing_captured_writes_nothing() -> None:
    batch = make_batch(Geometry(2, 16), [Request(4, captured=False)])
    assert gather(batch).size == 0


def test_chunks_of_a_prompt_add_up_to_its_proof() -> None:
    geometry = Geometry(2, 16)
    whole = make_batch(geometry, [Request(57)], pad_rows=0)
    total, serial = (0, 0), 5
    for start, end in [(0, 20), (20, 45), (45, 57)]:
        rows = slice(start, end)
        chunk = replace(
            whole,
            sources=[source[rows] for source in whole.sources],
            input_ids=whole.input_ids[rows],
            positions=whole.positions[rows],
            plan=plan_frames([Piece(0, end - start, start, 57, serial, bytes(16))], geometry),
        )
        header = gather(chunk)[:128].view(HEADER)[0]
        total = add_proofs(total, (int(header["proof"][0]), int(header["proof"][1])))
    assert total == prompt_proof(whole.input_ids.numpy(), 0, SEED)


def test_the_proof_follows_the_positions_that_the_forward_consumed() -> None:
    batch = make_batch(Geometry(2, 16), [Request(6)])
    good = gather(batch)[:128].view(HEADER)[0]
    shifted = gather(replace(batch, positions=batch.positions + 1))[:128].view(HEADER)[0]
    assert good["first_position"] == shifted["first_position"]
    assert (good["proof"] != shifted["proof"]).all()
    assert tuple(good["proof"]) == prompt_proof(batch.input_ids.numpy()[:6], 0, SEED)
