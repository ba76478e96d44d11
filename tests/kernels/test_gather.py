"""The kernel, in Triton's interpreter, bit for bit against the reference; every byte around its frames is watched."""

import os
import subprocess
import sys
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from batches import FORWARD, SEED, Batch, Request, make_batch, make_table, margins_untouched, poisoned
from hypothesis import given, settings
from hypothesis import strategies as st

from hashtap_kernels.gather import Gather, _Upload, gather
from hashtap_kernels.layout import HEADER, Dtype, Geometry
from hashtap_kernels.plan import Piece, plan_frames
from hashtap_kernels.proof import add_proofs, prompt_proof
from hashtap_kernels.reference import gather_reference

MIXED = [Request(5), Request(2, captured=False), Request(1, prefix=9), Request(0), Request(7, prefix=3, rest=4)]


def by_reference(batch: Batch, table: np.ndarray | None = None) -> bytes:
    out = np.zeros(batch.plan.bytes, np.uint8)
    arguments = (batch.sources, batch.input_ids, batch.positions, batch.plan, out)
    gather_reference(*arguments, geometry=batch.geometry, seed=SEED, table=table, forward=FORWARD)
    return out.tobytes()


def by_kernel(batch: Batch, table: np.ndarray | None = None) -> bytes:
    whole, out = poisoned(batch.plan.bytes)
    arguments = (batch.sources, batch.input_ids, batch.positions, batch.plan, torch.from_numpy(out))
    gather(*arguments, geometry=batch.geometry, seed=SEED, table=table, forward=FORWARD)
    assert margins_untouched(whole)
    return out.tobytes()


def launch(kernel: Gather, batch: Batch) -> bytes:
    whole, out = poisoned(batch.plan.bytes)
    arguments = (batch.sources, batch.input_ids, batch.positions, batch.plan, torch.from_numpy(out))
    kernel.launch(*arguments, seed=SEED, forward=FORWARD)
    assert margins_untouched(whole)
    return out.tobytes()


@pytest.mark.parametrize("form", ["list", "packed", "strided"])
@pytest.mark.parametrize("planes", [False, True])
@pytest.mark.parametrize(("layers", "hidden"), [(4, 24), (1, 8), (3, 72), (8, 16)])
def test_forms(layers: int, hidden: int, planes: bool, form: str) -> None:
    geometry = Geometry(layers, hidden)
    batch = make_batch(geometry, MIXED, form)
    table = make_table(geometry) if planes else None
    assert by_kernel(batch, table) == by_reference(batch, table)


@pytest.mark.parametrize("dtype", Dtype)
@pytest.mark.parametrize("hidden", [40, 48])
def test_dtypes(dtype: Dtype, hidden: int) -> None:
    batch = make_batch(Geometry(3, hidden, dtype), MIXED)
    assert by_kernel(batch) == by_reference(batch)


@pytest.mark.parametrize("planes", [False, True])
@pytest.mark.parametrize(("layers", "hidden"), [(4, 576), (4, 2056), (4, 7168), (1, 8200), (8, 4104), (2, 16384)])
def test_rows_longer_than_a_tile(layers: int, hidden: int, planes: bool) -> None:
    geometry = Geometry(layers, hidden)
    batch = make_batch(geometry, [Request(2), Request(1, captured=False), Request(1, prefix=5)], "strided")
    table = make_table(geometry) if planes else None
    assert by_kernel(batch, table) == by_reference(batch, table)


def test_several_frames_a_piece() -> None:
    geometry = Geometry(2, 8, Dtype.FP16)
    batch = make_batch(geometry, [Request(1), Request(257, prefix=100, rest=1)])
    assert len(batch.plan) == 3
    assert by_kernel(batch) == by_reference(batch)


requests = st.builds(
    Request,
    tokens=st.integers(0, 6),
    prefix=st.integers(0, (1 << 31) - 20),
    rest=st.integers(0, 5),
    captured=st.sampled_from([True, True, False]),
)


@settings(deadline=None, max_examples=40)
@given(
    geometry=st.builds(Geometry, st.integers(1, 8), st.integers(1, 80).map(lambda n: 8 * n), st.sampled_from(Dtype)),
    requests=st.lists(requests, max_size=6),
    form=st.sampled_from(["list", "packed", "strided"]),
    pad_rows=st.integers(0, 3),
    planes=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_any_batch(
    geometry: Geometry, requests: list[Request], form: str, pad_rows: int, planes: bool, seed: int
) -> None:
    batch = make_batch(geometry, requests, form, pad_rows, seed)
    table = make_table(geometry, seed) if planes and geometry.dtype in (Dtype.BF16, Dtype.FP16) else None
    assert by_kernel(batch, table) == by_reference(batch, table)


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 3), st.booleans())
def test_any_chunking_gives_the_rows_of_the_whole(chunks: list[int], others: int, planes: bool) -> None:
    """A prompt prefilled in chunks, each beside another request, has the rows, row sums and proof of the whole."""
    geometry, total = Geometry(2, 16), sum(chunks)
    whole = make_batch(geometry, [Request(total)])
    table = make_table(geometry) if planes else None
    row_bytes, proof, bodies = geometry.row_bytes, (0, 0), []
    for start, n in zip(np.cumsum(chunks) - chunks, chunks, strict=True):
        beside = make_batch(geometry, [Request(others)], pad_rows=0, seed=int(start))
        chunk = replace(
            whole,
            sources=[torch.cat([b, s[start:]]) for b, s in zip(beside.sources, whole.sources, strict=True)],
            input_ids=torch.cat([beside.input_ids, whole.input_ids[start:]]),
            positions=torch.cat([beside.positions, whole.positions[start:]]),
            plan=plan_frames([Piece(others, n, int(start), total, 1, bytes(16))], geometry),
        )
        frame = np.frombuffer(by_kernel(chunk, table), np.uint8)
        header = frame[:128].view(HEADER)[0]
        proof = add_proofs(proof, (int(header["proof"][0]), int(header["proof"][1])))
        bodies.append((frame[128 : 128 + n * row_bytes], frame[128 + n * row_bytes :][: 8 * n]))
    frame = np.frombuffer(by_kernel(whole, table), np.uint8)
    payloads = [payload.reshape(1 + planes, -1) for payload, _ in bodies]  # each plane is joined with its own
    assert np.concatenate(payloads, axis=1).tobytes() == frame[128 : 128 + total * row_bytes].tobytes()
    assert (
        np.concatenate([sums for _, sums in bodies]).tobytes()
        == frame[128 + total * row_bytes :][: 8 * total].tobytes()
    )
    assert proof == prompt_proof(whole.input_ids.numpy()[:total], 0, SEED)


def test_one_object_serves_many_forwards_raw_and_planes() -> None:
    geometry = Geometry(4, 24)
    kernel = Gather(geometry, "cpu", max_frames=5)
    kernel.warm_up()
    large = make_batch(geometry, [Request(30), *MIXED], seed=1)
    small = make_batch(geometry, [Request(2)], "packed", seed=2)
    table, other = make_table(geometry, 1), make_table(geometry, 2)
    assert launch(kernel, large) == by_reference(large)
    assert launch(kernel, small) == by_reference(small)
    for centre in (table, other, None):
        kernel.set_table(centre)
        assert launch(kernel, large) == by_reference(large, centre)
        assert launch(kernel, small) == by_reference(small, centre)


@pytest.mark.parametrize("programs", [1, 2, 7, 50])
def test_any_number_of_programs(programs: int) -> None:
    geometry = Geometry(2, 16)
    batch = make_batch(geometry, MIXED * 3)
    assert launch(Gather(geometry, "cpu", 9, programs=programs), batch) == by_reference(batch)


def test_parts_of_a_split_plan_are_the_whole() -> None:
    geometry = Geometry(2, 16)
    batch = make_batch(geometry, [Request(257, prefix=1), Request(5)])
    kernel = Gather(geometry, "cpu", 2)
    parts = batch.plan.split(geometry.frame_bytes(256))
    assert len(parts) == 2
    assert b"".join(launch(kernel, replace(batch, plan=part)) for part in parts) == by_reference(batch)


def test_more_frames_than_agreed_are_refused() -> None:
    batch = make_batch(Geometry(2, 16), [Request(1), Request(300)])
    with pytest.raises(ValueError, match="3 frames: this gather was made for at most 2"):
        launch(Gather(batch.geometry, "cpu", 2), batch)


def test_on_a_cpu_without_the_interpreter_it_is_refused() -> None:
    code = (
        "import hashtap_kernels as k; from hashtap_kernels.layout import Geometry; k.Gather(Geometry(1, 8), 'cpu', 1)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "ValueError: the gather kernel runs on a GPU; on a CPU use gather_reference" in done.stderr


def test_warm_up_writes_nothing() -> None:
    geometry = Geometry(2, 16)
    kernel = Gather(geometry, "cpu", 2)
    kernel.set_table(np.full((2, 16), 77, np.uint8))
    kernel.warm_up()
    assert (kernel._table.bytes == 77).all()
    assert (kernel._control.bytes == 0).all()


def test_nothing_captured_writes_nothing() -> None:
    assert by_kernel(make_batch(Geometry(2, 16), [Request(4, captured=False)])) == b""


class SlowEvent:
    """A CUDA event whose work is done only when somebody waits for it, or ``steps`` records later."""

    log: ClassVar[list[str]] = []

    def __init__(self, number: int, steps: int) -> None:
        self.number, self.steps, self.due = number, steps, 0

    def record(self) -> None:
        self.log.append(f"record {self.number}")
        self.due = len(self.log) + self.steps

    def query(self) -> bool:
        return len(self.log) >= self.due

    def synchronize(self) -> None:
        self.log.append(f"wait {self.number}")
        self.due = 0


@pytest.mark.parametrize(("steps", "waits"), [(2, False), (3, True)])
def test_an_upload_buffer_is_reused_only_when_its_upload_is_done(steps: int, waits: bool) -> None:
    control = _Upload(8, torch.device("cpu"), 3)
    buffers = torch.zeros((3, 8), dtype=torch.int64)
    control._buffers = [(buffer, buffer.numpy(), SlowEvent(number, steps)) for number, buffer in enumerate(buffers)]
    SlowEvent.log.clear()
    for upload in range(4):
        control.send(np.arange(upload, upload + 5))
        assert control.words.tolist() == [*range(upload, upload + 5), 0, 0, 0]
    turns = ["record 1", "record 2", "record 0"]
    assert SlowEvent.log == [*turns, *(["wait 1"] if waits else []), "record 1"]
