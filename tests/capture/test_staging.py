"""Order of streams and events, on a device that does its work as late and as badly as the rules allow.

The recording device below runs nothing when it is asked to. Each stream is a queue; work runs only when
somebody waits, in an order drawn at random among what the recorded events allow.
"""

import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.capture.test_session import HIDDEN, LAYERS, Host, assert_captured, prompt

from hashtap.ring_memory import Bytes
from hashtap.staging import Slot, StagedTransport
from hashtap.transport import HostTransport, Transport
from hashtap_kernels import gather_reference
from hashtap_kernels.layout import Geometry
from hashtap_kernels.plan import FramePlan, Piece, plan_frames

GEOMETRY = Geometry(2, 16)
SEED = (3, 4)


class Event:
    def __init__(self, device: "RecordingDevice") -> None:
        self.device, self.recorded, self.reached = device, 0, 0

    def record(self, stream: "Stream") -> None:
        self.recorded += 1
        number = self.recorded
        self.device.log.append("record")
        stream.put(lambda: setattr(self, "reached", max(self.reached, number)))

    def query(self) -> bool:
        return self.reached >= self.recorded

    def synchronize(self) -> None:
        self.device.log.append("synchronize")
        number = self.recorded
        while self.reached < number:
            self.device.step()


class Stream:
    def __init__(self, device: "RecordingDevice") -> None:
        self.device = device
        self.queue: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()
        device.streams.append(self)

    def put(self, work: Callable[[], None], may_run: Callable[[], bool] = lambda: True) -> None:
        self.queue.append((may_run, work))

    def wait_event(self, event: Event) -> None:
        number = event.recorded
        self.put(lambda: None, lambda: event.reached >= number)


class RecordingDevice:
    """Stands in for ``torch.cuda`` and for the kernel's launcher."""

    def __init__(self, choice: random.Random, geometry: Geometry = GEOMETRY) -> None:
        self.choice, self.geometry = choice, geometry
        self.streams: list[Stream] = []
        self.log: list[str] = []
        self.allocated = 0
        self.main = self.current = Stream(self)
        self.table: Any = None

    def Stream(self) -> Stream:  # noqa: N802
        return Stream(self)

    def Event(self) -> Event:  # noqa: N802
        self.allocated += 1
        return Event(self)

    def current_stream(self) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def step(self) -> None:
        """Run one piece of work that may run, of a stream drawn at random."""
        able = [stream for stream in self.streams if stream.queue and stream.queue[0][0]()]
        assert able, "every stream waits for another: a deadlock"
        _, work = self.choice.choice(able).queue.popleft()
        work()

    def set_table(self, table: Any) -> None:
        self.table = table

    def launch(
        self, sources: Any, ids: Any, positions: Any, plan: FramePlan, out: Any, *, seed: Any, forward: int
    ) -> None:
        self.log.append("launch")
        table = self.table

        def run() -> None:
            out[:] = 0xEE  # whoever reads the slot too late sees this
            gather_reference(
                sources, ids, positions, plan, out, geometry=self.geometry, seed=seed, table=table, forward=forward
            )

        self.current.put(run)

    def copy(self, target: Any, source: Any) -> None:
        self.log.append("copy")
        assert len(target) == len(source)
        half = len(target) // 2
        # A slow copy: in two steps, with room for mischief between them.
        self.current.put(lambda: target[:half].copy_(source[:half]))
        self.current.put(lambda: target[half:].copy_(source[half:]))


def transport(
    device: RecordingDevice, stage_bytes: int, memory: Bytes | None = None, seed: tuple[int, int] = SEED
) -> StagedTransport:
    slots = [Slot(torch.zeros(stage_bytes, dtype=torch.uint8), Event(device), Event(device)) for _ in range(2)]
    ring = torch.from_numpy(np.empty(1 << 20, np.uint8) if memory is None else memory).fill_(0xA5)
    return StagedTransport(device, slots, ring, seed, device, device.copy)


def forward_of(number: int, tokens: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor, FramePlan]:
    """Sources, ids, positions and plan of one forward of two prompts; different bits in every forward."""
    bits = np.random.default_rng(number).integers(0, 1 << 16, (2, tokens, 16), dtype=np.uint16)
    sources = [torch.from_numpy(layer.view(np.int16).copy()).view(torch.bfloat16) for layer in bits]
    first = tokens // 3
    pieces = [Piece(0, first, 0, first, 2 * number + 1, b"a" * 16)] if first else []
    pieces.append(Piece(first, tokens - first, 0, tokens - first, 2 * number + 2, b"b" * 16))
    return sources, torch.arange(tokens), torch.arange(tokens), plan_frames(pieces, GEOMETRY)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 700), min_size=1, max_size=8), st.integers(0, 2**32), st.booleans())
def test_no_byte_is_read_early_and_no_slot_written_too_soon(sizes: list[int], seed: int, planes: bool) -> None:
    device = RecordingDevice(random.Random(seed))
    staged = transport(device, stage_bytes=GEOMETRY.frame_bytes(256) + 64)
    table = np.full((2, 16), 7, np.uint8) if planes else None
    offset, flights = 0, []
    for number, tokens in enumerate(sizes):
        sources, ids, positions, plan = forward_of(number, tokens)
        wait = staged.send(sources, ids, positions, plan, offset, table=table, forward=number)
        flights.append((wait, offset, (sources, ids, positions, plan), number))
        offset += plan.bytes
    for wait, at, arguments, number in device.choice.sample(flights, len(flights)):
        plan = arguments[3]
        wait()
        expected = np.zeros(plan.bytes, np.uint8)
        gather_reference(*arguments, expected, geometry=GEOMETRY, seed=SEED, table=table, forward=number)
        assert np.array_equal(staged.memory[at : at + plan.bytes], expected)
    assert (staged.memory[offset:] == 0xA5).all()


def test_one_launch_one_copy_no_wait_no_allocation() -> None:
    device = RecordingDevice(random.Random(1))
    staged = transport(device, stage_bytes=1 << 16)
    for number in range(5):
        sources, ids, positions, plan = forward_of(number, 100)
        device.log.clear()
        allocated = device.allocated
        wait = staged.send(sources, ids, positions, plan, 0, table=None, forward=number)
        assert device.log == ["launch", "record", "copy", "record", "record"]
        assert device.allocated - allocated == (number == 0)
        wait()


def test_a_forward_larger_than_a_slot_takes_several_launches() -> None:
    """As few as hold its frames, one event for all of them, and what lies around its range stays as it was."""
    device = RecordingDevice(random.Random(4))
    staged = transport(device, stage_bytes=2 * GEOMETRY.frame_bytes(256))
    sources, ids, positions, plan = forward_of(0, 256 * 7)
    allocated = device.allocated
    wait = staged.send(sources, ids, positions, plan, 4096, table=None, forward=0)
    launches = len(plan.split(2 * GEOMETRY.frame_bytes(256)))
    assert launches == 4
    assert device.log == ["launch", "record", "copy", "record"] * launches + ["record"]
    assert device.allocated == allocated + 1
    wait()
    expected = np.full(len(staged.memory), 0xA5, np.uint8)
    frames = expected[4096 : 4096 + plan.bytes]
    gather_reference(sources, ids, positions, plan, frames, geometry=GEOMETRY, seed=SEED, table=None, forward=0)
    assert np.array_equal(staged.memory, expected)


@pytest.mark.parametrize("transport_of", ["staged", "host"])
@pytest.mark.parametrize("beyond", [1, 64, 1 << 20])
def test_frames_past_the_end_of_the_ring_are_refused(transport_of: str, beyond: int) -> None:
    device = RecordingDevice(random.Random(5))
    memory = np.zeros(1 << 16, np.uint8)
    to_ring: Transport
    to_ring = transport(device, 1 << 16, memory) if transport_of == "staged" else HostTransport(GEOMETRY, memory, SEED)
    before = to_ring.memory.copy()
    sources, ids, positions, plan = forward_of(0, 100)
    offset = len(memory) - plan.bytes + beyond
    with pytest.raises(ValueError, match="bytes"):
        to_ring.send(sources, ids, positions, plan, offset, table=None, forward=0)
    assert device.log == []
    assert np.array_equal(to_ring.memory, before)
    to_ring.send(sources, ids, positions, plan, len(memory) - plan.bytes, table=None, forward=0)()
    assert not np.array_equal(to_ring.memory, before)


def test_a_frame_larger_than_a_slot_is_refused() -> None:
    device = RecordingDevice(random.Random(6))
    staged = transport(device, stage_bytes=GEOMETRY.frame_bytes(256) - 64)
    sources, ids, positions, plan = forward_of(0, 256 * 3)
    with pytest.raises(ValueError, match="does not fit a limit of"):
        staged.send(sources, ids, positions, plan, 0, table=None, forward=0)
    assert device.log == []


@pytest.mark.parametrize("seed", range(3))
def test_a_session_on_a_slow_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Quick forwards, a copy that is late, a writer that is slow and a ring of a few forwards: all of it is right."""
    device = RecordingDevice(random.Random(seed), Geometry(LAYERS, HIDDEN))
    monkeypatch.setattr(
        "hashtap.session.open_transport",
        lambda _device, geometry, memory, _stage_bytes, _tokens, seed: transport(
            device, 2 * geometry.frame_bytes(256), memory, seed
        ),
    )
    host = Host(tmp_path, forward_tokens=1500, capture_ring_gib=0.0015, capture_writers=1)
    prompts = [prompt(number, device.choice.randint(1, 1500)) for number in range(20)]
    kept = []
    held_back = 0
    for number, ids in enumerate(prompts):
        while not host.session.may_admit():
            held_back += 1
            time.sleep(1e-3)
        kept.append(host.admit(str(number), ids))
        host.forward((str(number), ids, 0))
    reader = host.close()
    assert held_back
    assert [tracked.state for tracked in kept] == ["captured"] * 20
    assert len(reader) == 20
    for ids in prompts:
        assert_captured(reader, ids)
    assert host.session._writers.table is not None
    counts = host.session.counters()
    assert (counts["bad_frames"], counts["failed_proofs"], counts["ring_used_bytes"]) == (0, 0, 0)


def test_backpressure_asks_for_the_next_slot() -> None:
    device = RecordingDevice(random.Random(2))
    staged = transport(device, stage_bytes=1 << 16)
    waits = []
    for number in range(2):
        assert staged.ready()
        sources, ids, positions, plan = forward_of(number, 50)
        waits.append(staged.send(sources, ids, positions, plan, number * plan.bytes, table=None, forward=number))
    assert not staged.ready()
    waits[0]()
    assert staged.ready()


def test_a_missing_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device above does catch a copy that does not wait for its kernel."""
    device = RecordingDevice(random.Random(3))
    staged = transport(device, stage_bytes=1 << 16)
    monkeypatch.setattr(staged._side, "wait_event", lambda event: None)
    wrong = 0
    for number in range(20):
        sources, ids, positions, plan = forward_of(number, 90)
        staged.send(sources, ids, positions, plan, 0, table=None, forward=number)()
        expected = np.zeros(plan.bytes, np.uint8)
        gather_reference(
            sources, ids, positions, plan, expected, geometry=GEOMETRY, seed=SEED, table=None, forward=number
        )
        wrong += not np.array_equal(staged.memory[: plan.bytes], expected)
    assert wrong
