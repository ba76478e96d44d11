"""What the GPU scripts share: where they run, how they time, batches to gather, the way to the host, the record.

Import it first: with ``--dry`` it makes Triton interpret its kernels, so that a script runs from end to end on a CPU
with tiny sizes. A dry run shows that the script works; it measures nothing, and its record says so.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"

import numpy as np  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402

from hashtap.ring_memory import RingMemory  # noqa: E402
from hashtap.staging import Slot, StagedTransport, open_staged  # noqa: E402
from hashtap_kernels.gather import NUM_WARPS, Gather, compile_constants, control_words  # noqa: E402
from hashtap_kernels.gather_kernel import gather_kernel  # noqa: E402
from hashtap_kernels.layout import HEADER, Geometry, Payload  # noqa: E402
from hashtap_kernels.plan import OFFSET, Piece, plan_frames  # noqa: E402
from hashtap_kernels.proof import header_check, row_sums, table_id  # noqa: E402
from hashtap_kernels.reference import gather_reference  # noqa: E402

__all__ = [
    "DEVICE",
    "DRY",
    "SEED",
    "Bare",
    "Batch",
    "Bench",
    "Way",
    "bar_line",
    "clock",
    "event",
    "on",
    "pinned",
    "seconds",
    "stream",
    "synchronize",
]

DEVICE = torch.device("cpu" if DRY else "cuda:0")
_SLEEP_CYCLES = 2_000_000  # about a millisecond
SEED = (0x0123456789ABCDEF, 0xFEDCBA9876543210)


class Bench:
    """One run of one script: its figures, their bars, and the record that it leaves."""

    def __init__(self, name: str, budget_s: float = 300) -> None:
        parser = argparse.ArgumentParser(description=f"hashtap on a GPU: {name}")
        parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU, in Triton's interpreter")
        parser.add_argument("--record", type=Path, help="where to write the record (JSON)")
        parser.add_argument(
            "--part", default="0/1", help="I/N: of the checks that measure nothing, the I-th of N parts"
        )
        parser.add_argument(
            "--budget-s", type=float, default=budget_s, help="begin nothing long after that [%(default)s]"
        )
        options = parser.parse_args()
        self._path = options.record or Path(os.environ.get("OUT", ".")) / f"device-{name}.json"
        self._part, self._parts = map(int, options.part.split("/"))
        self._checks = 0
        self._until = time.monotonic() + options.budget_s
        self._bars: list[dict[str, Any]] = []
        self._tables: dict[str, list[dict[str, Any]]] = {}
        properties = None if DRY else torch.cuda.get_device_properties(DEVICE)
        self.processors = properties.multi_processor_count if properties else 2
        self._facts = {
            "script": name,
            "dry": DRY,
            "device": properties.name if properties else "cpu",
            "torch": torch.__version__,
            "triton": triton.__version__,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }

    def left_s(self) -> float:
        """Seconds left of the script's budget; it starts nothing long when few are."""
        return self._until - time.monotonic()

    def mine(self) -> bool:
        """Whether the next check is in this process's part."""
        self._checks += 1
        return self._checks % self._parts == self._part

    def row(self, table: str, **columns: Any) -> None:
        """Add a row to a table of the record and print it."""
        self._tables.setdefault(table, []).append(columns)
        shown = " ".join(f"{name}={_short(value)}" for name, value in columns.items())
        print(f"{'dry ' if DRY else ''}{table}: {shown}", flush=True)

    def bar(self, figure: str, value: float, *, least: float | None = None, most: float | None = None) -> None:
        """Hold a figure against its bar. In a dry run every measured one is left open."""
        good = (least is None or value >= least) and (most is None or value <= most)
        measured: dict[str, Any] = {"value": None, "ok": None} if DRY else {"value": value, "ok": good}
        self._bars.append({"figure": figure, "least": least, "most": most} | measured)
        self._write(ended=False)

    def exact(self, figure: str, good: bool) -> None:
        """Note a check that must hold anywhere, in a dry run too."""
        self._bars.append({"figure": figure, "value": good, "least": True, "most": None, "ok": bool(good)})
        self._write(ended=False)

    def finish(self) -> None:
        """Print the bars, write the record and exit: 1 when one was missed."""
        for bar in self._bars:
            print(bar_line(bar))
        self._write(ended=True)
        print(f"record: {self._path}")
        sys.exit(any(bar["ok"] is False for bar in self._bars))

    def _write(self, ended: bool) -> None:
        """Write the record: also under way, so that what was measured outlasts a script that is stopped."""
        record = self._facts | {"ended": ended, "bars": self._bars, "tables": self._tables}
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(record, indent=1) + "\n")
        partial.replace(self._path)


def bar_line(bar: dict[str, Any]) -> str:
    """``name value bar ok``, or ``SHORT``; ``open`` where nothing was measured."""
    wanted = "exact" if bar["least"] is True else f">={bar['least']}" if bar["most"] is None else f"<={bar['most']}"
    verdict = {None: "open", True: "ok", False: "SHORT"}[bar["ok"]]
    return f"{bar['figure'].replace(' ', '_')} {_short(bar['value'])} {wanted} {verdict}"


class Batch:
    """T rows of R requests with random bits, in ``sets`` copies of different values, and what gathers them."""

    def __init__(self, tokens: int, requests: int, geometry: Geometry, sets: int = 1, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.geometry, self.tokens = geometry, tokens
        self.lengths = [len(part) for part in np.array_split(np.arange(tokens), requests)]
        self.sets = [[self._random(tokens, geometry.hidden) for _ in range(geometry.layers)] for _ in range(sets)]
        self.input_ids = torch.from_numpy(rng.integers(0, 150_000, tokens)).to(DEVICE)
        self.positions = torch.cat([torch.arange(n) for n in self.lengths]).to(DEVICE)
        starts = np.cumsum(self.lengths) - self.lengths
        self.pieces = [
            Piece(int(start), n, 0, n, serial, rng.bytes(16))
            for serial, (start, n) in enumerate(zip(starts, self.lengths, strict=True))
        ]
        self.plan = plan_frames(self.pieces, geometry)
        self.payload_bytes = tokens * geometry.row_bytes
        self.table = rng.integers(100, 140, (geometry.layers, geometry.hidden), np.uint8)

    def launch(self, gather: Gather, out: torch.Tensor, turn: int = 0) -> None:
        sources = self.sets[turn % len(self.sets)]
        gather.launch(sources, self.input_ids, self.positions, self.plan, out, seed=SEED, forward=1)

    def expected(self, turn: int = 0, table: np.ndarray | None = None) -> np.ndarray:
        """The frames by the reference, uint8 ``[plan.bytes]``."""
        out = np.empty(self.plan.bytes, np.uint8)
        sources = [source.cpu() for source in self.sets[turn % len(self.sets)]]
        arguments = (sources, self.input_ids.cpu(), self.positions.cpu(), self.plan, out)
        gather_reference(*arguments, geometry=self.geometry, seed=SEED, table=table, forward=1)
        return out

    def whole(self, frames: np.ndarray) -> bool:
        """Whether headers and row sums of RAW frames agree with what they stand beside: nothing stale, nothing torn."""
        for offset, size in zip(self.plan.descriptors[:, OFFSET], self.plan.frame_bytes, strict=True):
            frame = frames[offset : offset + size]
            words, header = frame[:128].view(np.uint64), frame[:128].view(HEADER)[0]
            n = int(header["tokens"])
            if header_check(words) != int(header["self_check"]) or n > 256 or 128 + n * self.geometry.row_bytes > size:
                return False
            body, tail = np.split(frame[128:], [n * self.geometry.row_bytes])
            rows = body.view(np.uint64).reshape(n, self.geometry.layers, -1)
            sums = row_sums(rows, int(header["first_position"]) + np.arange(n))
            if not np.array_equal(sums, tail[: 8 * n].view(np.uint64)):
                return False
        return True

    def _random(self, rows: int, columns: int) -> torch.Tensor:
        bits = torch.randint(-(1 << 15), 1 << 15, (rows, columns), dtype=torch.int16, device=DEVICE)
        return bits.view(torch.bfloat16)


class Bare:
    """The kernel alone: its control array is on the device already, a launch uploads nothing."""

    def __init__(self, batch: Batch, payload: Payload, programs: int, turn: int = 0) -> None:
        self._constants = compile_constants(batch.geometry, payload)
        self._table = torch.from_numpy(batch.table.reshape(-1)).to(DEVICE)
        self._programs = programs
        self.control = torch.from_numpy(self.words(batch, payload, turn)).to(DEVICE)

    def words(self, batch: Batch, payload: Payload, turn: int = 0) -> np.ndarray:
        """What the control array must hold for a batch, int64."""
        named = table_id(batch.table) if payload == Payload.PLANES else 0
        arguments = (batch.sets[turn % len(batch.sets)], batch.input_ids, batch.positions, batch.plan)
        return control_words(*arguments, seed=SEED, table_id=named, forward=1)

    def launch(self, out: torch.Tensor) -> None:
        gather_kernel[(self._programs,)](self.control, self._table, out, **self._constants, num_warps=NUM_WARPS)


class Way:
    """A forward's way to the host, as a server goes it: hashtap's own transport; the ring holds two forwards."""

    def __init__(self, batch: Batch) -> None:
        self._range_bytes = -(-batch.plan.bytes // 4096) * 4096
        ring_bytes, stage_bytes = 2 * self._range_bytes, max(self._range_bytes, batch.geometry.frame_bytes(256))
        self._ring = RingMemory.create(ring_bytes)
        if DRY:
            slots = [Slot(torch.empty(stage_bytes, dtype=torch.uint8), event(), event()) for _ in range(2)]
            gather, ring = Gather(batch.geometry, DEVICE, len(batch.plan)), torch.from_numpy(self._ring.bytes)
            gather.warm_up()
            self.transport = StagedTransport(gather, slots, ring, SEED, _Cpu(), torch.Tensor.copy_)
        else:
            self.transport = open_staged(
                str(DEVICE), batch.geometry, self._ring.bytes, stage_bytes, len(batch.plan), SEED
            )
        self._turn = 0

    def send(
        self, batch: Batch, turn: int = 0, table: np.ndarray | None = None
    ) -> tuple[np.ndarray, Callable[[], None]]:
        """Start one forward's way without a wait: the frames as they will lie in the ring, and what waits for them."""
        self._turn += 1
        offset = self._turn % 2 * self._range_bytes
        wait = self.transport.send(
            batch.sets[turn % len(batch.sets)],
            batch.input_ids,
            batch.positions,
            batch.plan,
            offset,
            table=table,
            forward=1,
        )
        return self.transport.memory[offset : offset + batch.plan.bytes], wait


class _Cpu:
    """Stands for ``torch.cuda`` where there is only the CPU."""

    def Stream(self) -> Any:  # noqa: N802
        return _Nothing()

    def Event(self) -> Any:  # noqa: N802
        return _Nothing()

    def current_stream(self) -> Any:
        return _Nothing()

    def stream(self, side: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext(side)


class _Nothing:
    """Stands for a stream or event where there is only the CPU: all is done when a call returns."""

    at = 0.0

    def record(self, stream: Any = None) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, later: "_Nothing") -> float:
        return (later.at - self.at) * 1e3

    def query(self) -> bool:
        return True

    def wait_event(self, other: Any) -> None: ...
    def synchronize(self) -> None: ...


def event() -> Any:
    return _Nothing() if DRY else torch.cuda.Event()


def clock() -> Any:
    return _Nothing() if DRY else torch.cuda.Event(enable_timing=True)


def stream() -> Any:
    return _Nothing() if DRY else torch.cuda.Stream()


def on(side: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if DRY else torch.cuda.stream(side)


def synchronize() -> None:
    if not DRY:
        torch.cuda.synchronize()


def pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=not DRY)


def seconds(work: Callable[[int], object], repeats: int = 2 if DRY else 12, warm_up: int = 1 if DRY else 3) -> float:
    """Median seconds that ``work`` takes the current stream; it is given the number of the repetition.

    The device sleeps before each, so that the host's own time for the launch is over when the work begins.
    """
    for turn in range(warm_up):
        work(turn)
    synchronize()
    times = []
    for turn in range(repeats):
        before, after = clock(), clock()
        if not DRY:
            torch.cuda._sleep(_SLEEP_CYCLES)
        before.record()
        work(turn)
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) / 1e3)
    return statistics.median(times)


def _short(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
