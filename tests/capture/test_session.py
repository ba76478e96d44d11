"""The session on a fake host: real kernels, ring, writer and files, and no SGLang."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch

import hashtap
from hashtap.config import CaptureConfig
from hashtap.directory import CaptureDirectory
from hashtap.errors import SetupError
from hashtap.exponents import TABLE_ROWS
from hashtap.flight import Flight
from hashtap.header import parse_header
from hashtap.identity import NEEDS_RECOMPUTE, prompt_key
from hashtap.session import Batch, Session, Tracked
from hashtap.shard import ShardFacts
from hashtap.verify import verify
from hashtap_kernels.layout import Dtype, Geometry, Payload
from hashtap_kernels.proof import table_id

LAYERS, HIDDEN = 4, 24
TORCH_DTYPE = {Dtype.BF16: torch.bfloat16, Dtype.FP16: torch.float16, Dtype.FP32: torch.float32}


class Host:
    """Plays the server: computes states that tell token, position and layer apart, and batches them as told."""

    def __init__(
        self,
        path: Path,
        *,
        packed: bool = False,
        dtype: Dtype = Dtype.BF16,
        forward_tokens: int = 512,
        **options: Any,
    ) -> None:
        options = {"capture_ring_gib": 0.02, "capture_seal_after_s": 60.0} | options
        self.path, self.packed, self.dtype, self.padding = path, packed, dtype, 5
        self.directory = CaptureDirectory.create(path)
        facts = ShardFacts(
            model="fake",
            epoch="e0",
            boundaries=(1, 2, 3),
            final_norm="post",
            geometry=Geometry(LAYERS, HIDDEN, dtype),
            seed=(11, 22),
            directory_uuid=self.directory.uuid,
            writer=uuid4().hex,
            rank=0,
            versions={"torch": torch.__version__},  # not a plain str
            server_flags={},
        )
        self.now = 0.0
        self.session = Session(
            CaptureConfig(capture_dir=str(path), **options),
            facts,
            self.directory,
            device="cpu",
            max_forward_tokens=forward_tokens,
            clock=lambda: self.now,
        )

    @staticmethod
    def states(ids: list[int], first: int = 0, twist: int = 0, dtype: Dtype = Dtype.BF16) -> torch.Tensor:
        """``[T, L, H]``, every value's bits a function of token, position, layer and channel."""
        ids_t = torch.tensor(ids).view(-1, 1, 1)
        position = torch.arange(first, first + len(ids)).view(-1, 1, 1)
        layer = torch.arange(LAYERS).view(1, -1, 1)
        channel = torch.arange(HIDDEN).view(1, 1, -1)
        bits = (ids_t * 7919 + position * 104729 + layer * 31 + channel * 131 + twist) % 32749
        integers = {2: torch.int16, 4: torch.int32}[dtype.element_bytes]
        return bits.to(integers).view(TORCH_DTYPE[dtype])

    def forward(self, *parts: tuple[str, list[int], int], twist: int = 0) -> list[dict[str, Any] | None] | None:
        """One prefill forward of ``(rid, ids of the rows, first position)`` parts, padded behind with poison."""
        rows = torch.cat([self.states(ids, first, twist, self.dtype) for _, ids, first in parts])
        poison = torch.full((self.padding, LAYERS, HIDDEN), -1.0, dtype=rows.dtype)
        rows = torch.cat([rows, poison])
        aux: Any = [rows[:, layer].contiguous() for layer in range(LAYERS - 1)]
        if self.packed:
            aux = torch.cat(aux, dim=1)
        ids = [i for _, part, _ in parts for i in part] + [0] * self.padding
        positions = [first + i for _, part, first in parts for i in range(len(part))] + [0] * self.padding
        return self.session.capture(
            Batch(
                rids=[rid for rid, _, _ in parts],
                extend_lens=[len(part) for _, part, _ in parts],
                prefix_lens=[first for _, _, first in parts],
                input_ids=torch.tensor(ids),
                positions=torch.tensor(positions),
                aux=aux,
                final=rows[:, LAYERS - 1].contiguous(),
            )
        )

    def admit(self, rid: str, ids: list[int], **more: Any) -> Tracked:
        return self.session.admit(rid, np.array(ids, np.int64), **more)

    def close(self) -> "hashtap.Reader":
        self.session.close()
        return hashtap.open(self.path)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path / "captures")
    yield host
    host.session.close()


def prompt(seed: int, tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50_000, tokens).tolist()


def assert_captured(reader: "hashtap.Reader", ids: list[int], twist: int = 0) -> None:
    capture = reader.by_token_ids(ids)
    assert capture.token_ids.tolist() == ids
    states = Host.states(ids, twist=twist, dtype=capture.facts.geometry.dtype)
    assert capture.tensor().dtype == states.dtype
    assert torch.equal(capture.tensor().view(torch.uint8), states.view(torch.uint8))


@pytest.mark.parametrize("packed", [False, True], ids=["list", "packed"])
def test_batches_chunks_and_strangers(tmp_path: Path, packed: bool) -> None:
    host = Host(tmp_path, packed=packed)
    short, long, one = prompt(1, 7), prompt(2, 600), prompt(3, 1)
    kept = [host.admit("short", short), host.admit("long", long), host.admit("one", one)]
    receipts = host.forward(("short", short, 0), ("stranger", prompt(9, 30), 0), ("long", long[:300], 0))
    assert receipts is not None
    assert [r and r["state"] for r in receipts] == ["captured", None, "capturing"]
    assert host.forward(("stranger", [5], 30)) is None
    receipts = host.forward(("long", long[300:], 300), ("short", [123], 7), ("one", one, 0))
    assert receipts is not None
    assert [(r["rows"], r["state"]) for r in receipts if r] == [(600, "captured"), (7, "captured"), (1, "captured")]
    assert receipts[0] is not None
    assert receipts[0]["key"] == prompt_key(long).hex()
    assert receipts[0]["directory"] == host.directory.uuid
    reader = host.close()
    assert len(reader) == 3
    for ids in (short, long, one):
        assert_captured(reader, ids)
    assert len(kept) == 3


@pytest.mark.parametrize(("dtype", "writers"), [*((dtype, 1) for dtype in TORCH_DTYPE), (Dtype.BF16, 2)])
def test_planes_take_over_after_the_table(tmp_path: Path, dtype: Dtype, writers: int) -> None:
    """One table a run, from 1,024 rows of a writer; every frame before it is RAW, every one after it PLANES."""
    host = Host(tmp_path, dtype=dtype, capture_writers=writers)
    prompts = [prompt(seed, 400) for seed in range(8)]
    kept = []
    for number, ids in enumerate(prompts):
        kept.append(host.admit(str(number), ids))
        host.forward((str(number), ids, 0))
        host.session._writers.drain()  # so that no frame is on its way when the table is made
    reader = host.close()
    assert len(reader) == 8
    for ids in prompts:
        assert_captured(reader, ids)
    headers = [frame.header for capture in reader for _, frame in capture._frames()]
    headers.sort(key=lambda header: header.forward)
    raw = [header for header in headers if header.payload is Payload.RAW]
    planes = headers[len(raw) :]
    assert raw == headers[: len(raw)]
    if dtype is Dtype.FP32:
        assert not planes
        return
    assert sum(header.tokens for header in raw) >= TABLE_ROWS == 1024
    assert sum(header.tokens for header in raw if header.forward < raw[-1].forward) < 1024 * writers
    assert len(planes) == 2 * 5 if writers == 1 else planes
    table = host.session._writers.table
    assert table is not None
    assert {header.table for header in planes} == {table_id(table)}
    # The shards of the frames that name it hold it, and those before do not.
    holders = {shard.path for shard in reader.shards if (shard.index[:, 6] & 0xFF == Payload.TABLE).any()}
    assert holders == {
        piece.shard.path for capture in reader for piece, frame in capture._frames() if frame.header.table
    }


@pytest.mark.parametrize("dtype", TORCH_DTYPE)
def test_each_forward_lies_in_one_range_of_the_ring_header_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Dtype
) -> None:
    """By address: a prompt of one forward is one range, a chunked one a range for each of its forwards."""
    host = Host(tmp_path, dtype=dtype, forward_tokens=700)
    ring, geometry = host.session._transport.memory, host.session.facts.geometry
    flights: list[Flight] = []
    submit = host.session._writers.submit

    def hold_back(flight: Flight) -> None:  # so that no range is given back yet
        flights.append(replace(flight, frames=list(flight.frames)))

    monkeypatch.setattr(host.session._writers, "submit", hold_back)
    prompts = {"short": prompt(1, 7), "whole": prompt(2, 600), "chunked": prompt(3, 650)}
    kept = {rid: host.admit(rid, ids) for rid, ids in prompts.items()}
    chunked = prompts["chunked"]
    host.forward(("short", prompts["short"], 0), ("whole", prompts["whole"], 0), ("chunked", chunked[:30], 0))
    host.forward(("stranger", prompt(9, 40), 0), ("chunked", chunked[30:600], 30))
    host.forward(("chunked", chunked[600:], 600))

    rid_of = {tracked.record.key: rid for rid, tracked in kept.items()}
    ranges: list[tuple[str, int, int]] = []  # prompt, address, end; frames that touch are one range
    for flight in flights:
        frames = [(offset, offset + size) for offset, size, _ in flight.frames]
        assert flight.buffer is ring
        address, end = ring.ctypes.data + frames[0][0], ring.ctypes.data + frames[-1][1]
        assert ring.ctypes.data <= address < end <= ring.ctypes.data + ring.nbytes
        assert address % 4096 == ring.ctypes.data % 4096
        forward = len(ranges)
        while address < end:
            frame = ring[address - ring.ctypes.data :]
            header = parse_header(frame)  # raises unless a header comes first
            rid, first, tokens = rid_of[header.key], header.first_position, header.tokens
            payload = frame[128 : 128 + tokens * geometry.row_bytes]
            states = host.states(prompts[rid][first : first + tokens], first, dtype=dtype)
            assert payload.tobytes() == states.view(torch.uint8).numpy().tobytes()
            start = address
            address += geometry.frame_bytes(tokens)
            if len(ranges) > forward and ranges[-1][0] == rid:
                start = ranges.pop()[1]
            ranges.append((rid, start, address))
    sizes = [(rid, end - start) for rid, start, end in ranges]
    assert sizes == [
        (rid, geometry.piece_bytes(tokens))
        for rid, tokens in (("short", 7), ("whole", 600), ("chunked", 30), ("chunked", 570), ("chunked", 50))
    ]

    for flight in flights:
        submit(flight)
    reader = host.close()
    for ids in prompts.values():
        assert_captured(reader, ids)


def test_a_retracted_prompt_is_stored_once_from_one_pass(host: Host) -> None:
    ids = prompt(4, 100)
    tracked = host.admit("r", ids)
    host.forward(("r", ids[:60], 0), twist=1)
    host.forward(("r", ids[:80], 0), twist=2)  # retracted and begun anew, under other values
    host.forward(("r", [*ids[80:], 7, 8, 9], 80), twist=2)  # generated tokens behind the prompt
    receipts = host.forward(("r", [*ids, 7], 0), twist=3)  # retracted again after its last prompt row
    assert receipts is not None
    assert receipts[0] is not None
    assert (receipts[0]["rows"], receipts[0]["state"]) == (100, "captured")
    reader = host.close()
    assert len(reader) == 1
    assert_captured(reader, ids, twist=2)
    assert host.session.counters()["restarted"] == 1
    assert tracked.state == "captured"


def test_rows_from_the_prefix_cache_are_said(host: Host) -> None:
    ids = prompt(5, 40)
    tracked = host.admit("p", ids)
    receipts = host.forward(("p", ids[16:], 16))
    assert receipts is not None
    assert receipts[0] is not None
    assert receipts[0]["state"] == tracked.state == "incomplete"
    assert receipts[0]["reason"] == "16 rows from position 0 came from the prefix cache"
    assert len(host.close()) == 0


@pytest.mark.parametrize("seed", range(4))
def test_cached_rows_are_shared_with_a_capture_or_said_to_be_missing(tmp_path: Path, seed: int) -> None:
    """Conversations on a host that never computes what it has computed before, for whomever."""
    host = Host(tmp_path / "captures", capture_prefix_cache="on", capture_seal_after_s=0.05, capture_shard_gib=1 / 1024)
    random = np.random.default_rng(seed)
    cached: list[list[int]] = []
    captured: list[list[int]] = []
    missing = shared = 0

    def common(one: list[int], other: list[int]) -> int:
        same = [a == b for a, b in zip(one, other, strict=False)]
        return same.index(False) if False in same else len(same)

    def serve(rid: str, ids: list[int], prefix: int) -> dict[str, Any] | None:
        receipts = None
        while prefix < len(ids):
            stop = min(prefix + int(random.integers(1, 300)), len(ids))
            receipts = host.forward((rid, ids[prefix:stop], prefix))
            prefix = stop
        return receipts[0] if receipts else None

    for number in range(40):
        history = cached[int(random.integers(len(cached)))] if cached and random.random() < 0.8 else prompt(7, 10)
        ids = history[: int(random.integers(1, len(history) + 1))] + prompt(
            1000 * seed + number, int(random.integers(1, 60))
        )
        prefix = max((min(common(ids, other), len(ids) - 1) for other in cached), default=0)
        donated = max((common(ids, other) for other in captured), default=0)
        cached.append(ids)
        if random.random() < 0.2:  # somebody else's
            assert serve(f"r{number}", ids, prefix) is None
            continue
        tracked = host.admit(f"r{number}", ids)
        receipt = serve(f"r{number}", ids, prefix)
        assert receipt is not None
        if donated >= prefix:
            assert (receipt["state"], receipt["rows"]) == ("captured", len(ids))
            captured.append(ids)
            shared += prefix
        else:
            missing += 1
            assert receipt["state"] == NEEDS_RECOMPUTE
            assert receipt["reason"] == f"{prefix} rows from position 0 came from the prefix cache"
            again = host.admit(f"again{number}", ids)
            serve(f"again{number}", ids, 0)
            assert again.state == "captured"
            captured.append(ids)
        assert tracked.state == receipt["state"]
    counters = host.session.counters()
    reader = host.close()
    assert missing
    assert counters["shared_rows"] == shared > 0
    assert counters["needs_recompute"] == missing
    assert len(reader) == len({tuple(ids) for ids in captured})
    for ids in captured:
        assert_captured(reader, ids)
    report = verify(host.path, samples=((str(i), ids, b"") for i, ids in enumerate(captured)))
    assert {problem.kind for problem in report.problems} <= {"nan", "inf"}  # the made-up bits have some


def test_cached_rows_of_a_prompt_that_is_not_whole_are_nobodys(tmp_path: Path) -> None:
    """The cache has a prompt's chunks as soon as they are computed; it may still be aborted."""
    host = Host(tmp_path, capture_prefix_cache="on")
    first = prompt(1, 100)
    other = first[:50] + prompt(2, 20)
    early = host.admit("first", first)
    host.forward(("first", first[:50], 0))
    hasty = host.admit("other", other)
    host.forward(("other", other[50:], 50))
    assert (early.state, hasty.state) == ("capturing", NEEDS_RECOMPUTE)
    host.forward(("first", first[50:], 50))
    patient = host.admit("again", other)
    host.forward(("again", other[50:], 50))
    assert (early.state, patient.state) == ("captured", "captured")
    reader = host.close()
    for ids in (first, other):
        assert_captured(reader, ids)


def test_other_tokens_than_the_prompts_never_become_a_record(host: Host) -> None:
    """The forward consumed something else than the request asked for: the proof does not add up."""
    ids = prompt(6, 50)
    tracked = host.admit("x", ids)
    host.forward(("x", [*ids[:20], ids[20] + 1, *ids[21:]], 0))
    assert tracked.state == "captured"
    assert len(host.close()) == 0
    assert host.session.counters()["failed_proofs"] == 1


def test_a_request_that_dies_is_forgotten(host: Host) -> None:
    ids, whole = prompt(7, 50), prompt(8, 20)
    tracked = host.admit("dies", ids)
    host.forward(("dies", ids[:30], 0))
    del tracked
    gc.collect()
    kept = host.admit("lives", whole)
    assert host.forward(("dies", ids[30:], 30)) is None
    host.forward(("lives", whole, 0))
    del kept  # done before the writer is
    gc.collect()
    reader = host.close()
    assert len(reader) == 1
    assert_captured(reader, whole)
    counters = host.session.counters()
    assert counters["ring_used_bytes"] == 0
    assert (counters["admitted"], counters["captured"], counters["aborted"]) == (2, 1, 1)


def test_a_refused_prompt_has_a_receipt_and_no_rows(host: Host) -> None:
    ids = prompt(9, 10)
    tracked = host.admit("lora", ids, salt=b'{"lora":"a"}', refuse="adapters are not supported")
    receipts = host.forward(("lora", ids, 0))
    assert receipts is not None
    assert receipts[0] is not None
    assert (receipts[0]["state"], receipts[0]["rows"]) == ("refused", 0)
    assert tracked.reason == "adapters are not supported"
    del tracked
    gc.collect()
    assert (host.session.counters()["refused"], host.session.counters()["aborted"]) == (1, 0)
    assert len(host.close()) == 0


def test_a_full_ring_holds_back_and_then_drops(tmp_path: Path) -> None:
    host = Host(tmp_path, capture_wait_s=5.0)
    taken = host.session._ring.take(host.session._ring.capacity_bytes - 4096)
    assert taken is not None
    assert not host.session.may_admit()
    host.now = 4.9
    assert not host.session.may_admit()
    host.now = 5.0
    assert host.session.may_admit()
    ids = prompt(10, 200)
    tracked = host.admit("full", ids)
    receipts = host.forward(("full", ids, 0))
    assert receipts is not None
    assert receipts[0] is not None
    assert (receipts[0]["state"], receipts[0]["reason"]) == ("dropped", "the ring was full")
    host.session._ring.give_back(taken)
    assert host.session.may_admit()
    again = host.admit("again", ids)
    host.forward(("again", ids, 0))
    assert_captured(host.close(), ids)
    assert (tracked.state, again.state) == ("dropped", "captured")


def test_a_new_epoch_takes_nothing_half_done_along(host: Host) -> None:
    old, half, new = prompt(11, 30), prompt(12, 60), prompt(13, 20)
    kept = [host.admit("old", old), host.admit("half", half)]
    host.forward(("old", old, 0), ("half", half[:30], 0))
    host.session.end_epoch()
    host.session.begin_epoch("e1", cache_is_empty=True)
    receipts = host.forward(("half", half[30:], 30))
    assert receipts is not None
    assert receipts[0] is not None
    assert receipts[0]["state"] == "incomplete"
    assert "weights were updated" in receipts[0]["reason"]
    kept.append(host.admit("new", new))
    host.forward(("new", new, 0))
    host.session.close()
    epochs = {}
    for epoch in ("e0", "e1"):
        reader = hashtap.Reader(host.path, epoch=epoch)
        epochs[epoch] = [capture.token_ids.tolist() for capture in reader]
    assert epochs == {"e0": [old], "e1": [new]}


def test_cached_rows_of_other_weights_are_nobodys(tmp_path: Path) -> None:
    """New weights, and the server's cache keeps what the old ones computed: a donor of the new ones cannot tell."""
    host = Host(tmp_path, capture_prefix_cache="on")
    first = prompt(1, 100)
    others = [first[:50] + prompt(seed, 20) for seed in (2, 3, 4)]

    def serve(rid: str, ids: list[int], prefix: int, **more: Any) -> str:
        tracked = host.admit(rid, ids, **more)
        host.forward((rid, ids[prefix:], prefix))
        return tracked.state

    assert [serve("old", first, 0), serve("shares", others[0], 50)] == ["captured", "captured"]
    waiting = host.admit("waiting", others[1])
    host.session.end_epoch()
    host.session.begin_epoch("e1", cache_is_empty=False)
    assert waiting.state == NEEDS_RECOMPUTE
    assert serve("first", first, 50) == NEEDS_RECOMPUTE
    assert serve("past the cache", first, 0, past_cache=True) == "captured"
    assert serve("stale", others[1], 50) == NEEDS_RECOMPUTE
    assert serve("its later chunks may be", others[1], 0) == NEEDS_RECOMPUTE
    host.session.cache_flushed()
    assert [serve("fresh", first, 0), serve("shares again", others[2], 50)] == ["captured", "captured"]
    host.close()
    reader = hashtap.Reader(host.path, epoch="e1")
    assert sorted(len(capture) for capture in reader) == [70, 100]
    for ids in (first, others[2]):
        assert_captured(reader, ids)


def test_nothing_is_captured_while_weights_move(host: Host) -> None:
    """An update in several steps, between which somebody writes to the weights."""
    waiting, ids = host.admit("waits", prompt(1, 30)), prompt(2, 30)
    host.session.end_epoch()
    host.session.begin_epoch("e1", cache_is_empty=True, weights_move=True)
    late = host.admit("late", ids)
    host.forward(("waits", prompt(1, 30), 0), ("late", ids, 0))
    assert {(one.state, one.reason) for one in (waiting, late)} == {("incomplete", "the weights are being updated")}
    host.session.begin_epoch("e2", cache_is_empty=True)
    again = host.admit("again", ids)
    host.forward(("again", ids, 0))
    assert again.state == "captured"
    reader = host.close()
    assert len(reader) == 1
    assert_captured(reader, ids)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda b: {"aux": b.aux[:2]}, "brought 2 auxiliary layers, 3 were asked for"),
        (lambda b: {"aux": None}, "brought no auxiliary layers"),
        (lambda b: {"aux": torch.cat(b.aux[:2], dim=1)}, r"packed auxiliary states are \(9, 48\), not \[T, 72\]"),
        (lambda b: {"aux": [*b.aux[:2], b.aux[2][:3]]}, "source 2 has 3 rows, the plan reads 4"),
        (lambda b: {"final": b.final[:, :16]}, r"source 3 has shape \(9, 16\)"),
        (lambda b: {"final": [b.final, b.final]}, "brought 2 final states, 1 were asked for"),
    ],
    ids=["layer missing", "none", "packed short", "rows missing", "narrow", "two finals"],
)
def test_a_forward_that_lacks_something_is_an_error(host: Host, spoil: Any, message: str) -> None:
    ids = prompt(14, 4)
    tracked = host.admit("t", ids)
    states = torch.cat([host.states(ids), torch.zeros(5, LAYERS, HIDDEN, dtype=torch.bfloat16)])
    layers = [states[:, layer].contiguous() for layer in range(LAYERS)]
    whole = Batch(["t"], [4], [0], torch.tensor(ids), torch.arange(4), layers[:-1], layers[-1])
    fields = {name: getattr(whole, name) for name in Batch.__slots__}
    with pytest.raises(ValueError, match=message):
        host.session.capture(Batch(**(fields | spoil(whole))))
    assert tracked.rows == 0


def test_a_ring_that_cannot_hold_two_forwards(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="holds less than two forwards of 8192 tokens"):
        Host(tmp_path, capture_ring_gib=0.001, forward_tokens=8192)


def test_a_ring_larger_than_memory(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"--capture-ring-gib 4096 .* give a smaller ring"):
        Host(tmp_path, capture_ring_gib=4096)
