"""Feeds a writer with real states at full speed: the last hidden layers of SmolLM2, as a kernel would hand them over.

One frame is made by the reference kernel and then sent under ever new keys, from a few buffers in turn, so that what is
measured is the writer. The exponent table comes from the first two thirds of the states, the frames from the rest.
"""

import itertools
import math
import uuid
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open

from hashtap.directory import CaptureDirectory
from hashtap.exponents import TableBuilder
from hashtap.facts import ShardFacts
from hashtap.flight import Flight, Record
from hashtap.identity import prompt_key
from hashtap.ring_memory import RingMemory
from hashtap.writer import Writer
from hashtap.writers import Writers
from hashtap_kernels.layout import HEADER, HEADER_BYTES, Geometry
from hashtap_kernels.plan import Piece, plan_frames
from hashtap_kernels.proof import header_check
from hashtap_kernels.reference import gather_reference

ROOT = Path(__file__).parents[1]
HIDDEN = 576
SEED = (0x0123456789ABCDEF, 0xFEDCBA9876543210)
FORWARD = 8  # frames that come at a time: a forward holds several prompts, or 8,192 tokens of one
RING_BYTES = 256 << 20  # of all buffers: more than a core's cache, and enough for two writers to have work


class Feed:
    """Frames of ``rows`` rows of real states, ``copies`` of them side by side to make a wide model's.

    Attributes:
        rows: bit patterns uint16 ``[rows, 4, H]``.
        planes: the exponent plane of such a frame, uint8, what the codec is given; one for each place in the buffers.
        rests: what follows it, uint8: the rest plane and the row sums, which are stored as they are.
    """

    def __init__(self, rows: int, copies: int = 1) -> None:
        path = ROOT / "tests" / "golden" / "smollm2_states.safetensors"
        with safe_open(path, "pt") as file:  # type: ignore[no-untyped-call]
            states = file.get_tensor("hidden_states").view(torch.int16).numpy().view(np.uint16)
        known = len(states) * 2 // 3
        self.geometry = Geometry(4, HIDDEN * copies)
        self._tables = TableBuilder(self.geometry, known)
        self._tables.observe(np.tile(states[:known], (1, 1, copies)))
        order = np.arange(rows) % (len(states) - known) + known
        shifted = [np.roll(states[order], 11 * copy, axis=0) for copy in range(copies)]
        self.rows: npt.NDArray[np.uint16] = np.concatenate(shifted, axis=2)
        self.ids = np.arange(rows)
        frame = self._frame()
        shape = max(2, RING_BYTES // (FORWARD * len(frame))), FORWARD, len(frame)
        self._ring = RingMemory.create(math.prod(shape))
        self._buffers = self._ring.bytes.reshape(shape)
        self._buffers[:] = frame
        frames = [frame for buffer in self._buffers for frame in buffer]
        self.planes = [frame[HEADER_BYTES : HEADER_BYTES + self.rows.nbytes // 2] for frame in frames]
        self.rests = [frame[HEADER_BYTES + self.rows.nbytes // 2 :] for frame in frames]
        self._free: SimpleQueue[int] = SimpleQueue()  # numbers of buffers
        for number in range(len(self._buffers)):
            self._free.put(number)
        self._endless: Writers | Writer | None = None
        self._numbers = itertools.count(1)  # of what is sent; two threads never get the same

    def open(self, directory: CaptureDirectory, writers: int, shard_bytes: int = 2 << 30) -> Writers:
        """Writers for what :meth:`send` sends, each a process."""
        options = {"codec": "zstd", "shard_bytes": shard_bytes, "seal_after_s": 3600.0}
        facts = self._facts(directory)
        return Writers(directory, facts, self._ring, processes=writers, threads=1, table=self._tables.table, **options)

    def open_in_process(self, directory: CaptureDirectory) -> Writer:
        """A writer on a thread of this process."""
        return Writer(
            directory,
            self._facts(directory),
            threads=1,
            codec="zstd",
            shard_bytes=2 << 30,
            seal_after_s=3600,
            tables=self._tables.by_id,
        )

    def _facts(self, directory: CaptureDirectory) -> ShardFacts:
        return ShardFacts(
            model="SmolLM2-135M-Instruct",
            epoch="bench",
            boundaries=(2, 15, 27),
            final_norm="post",
            geometry=self.geometry,
            seed=SEED,
            directory_uuid=directory.uuid,
            writer=uuid.uuid4().hex,
            rank=0,
            versions={},
            server_flags={},
        )

    def send(self, writer: Writers | Writer, count: int) -> None:
        """Send ``count`` prompts of one frame, some whenever a buffer is free; returns when all are written."""
        for sent in range(0, count, FORWARD):
            self._send(writer, self._free.get(), min(FORWARD, count - sent))
        self._wait_for_all()

    def keep_sending(self, writer: Writers | Writer) -> None:
        """Send without end, each buffer again as soon as it is written, on the thread that hears of it."""
        self._endless = writer
        while not self._free.empty():
            self._send(writer, self._free.get(), FORWARD)

    def stop_sending(self) -> None:
        """Let what was sent be written, and send nothing more."""
        self._endless = None
        self._wait_for_all()

    def _send(self, writer: Writers | Writer, at: int, count: int) -> None:
        """Send the first frames of a buffer, under new keys."""
        frames = []
        for place, frame in enumerate(self._buffers[at, :count]):
            number = next(self._numbers)
            key, salt = self._new_key(number)
            header = frame[:HEADER_BYTES].view(HEADER)
            header["serial"], header["key"] = number, np.frombuffer(key, np.uint64)
            header["self_check"] = header_check(frame[:HEADER_BYTES].view(np.uint64))
            record = Record(number, key, self.ids, salt, captured=True)
            frames.append(((at * FORWARD + place) * len(frame), len(frame), record))
        writer.submit(Flight(self._ring.bytes, lambda: None, frames, lambda: self._give_back(at)))

    def _new_key(self, number: int) -> tuple[bytes, bytes]:
        """A key and its salt; of two writers each gets as many as the other, as it would of a million prompts."""
        salts = (f"{number}-{attempt}".encode() for attempt in itertools.count())
        return next((key, salt) for salt in salts if (key := prompt_key(self.ids, salt))[0] % 2 == number % 2)

    def _give_back(self, at: int) -> None:
        if self._endless is not None:
            self._send(self._endless, at, FORWARD)
        else:
            self._free.put(at)

    def _wait_for_all(self) -> None:
        for number in [self._free.get() for _ in self._buffers]:
            self._free.put(number)

    def _frame(self) -> npt.NDArray[np.uint8]:
        """What the kernel would write for a prompt of these rows."""
        count = len(self.rows)
        plan = plan_frames([Piece(0, count, 0, count, 1, bytes(16))], self.geometry)
        frame = np.zeros(plan.bytes, np.uint8)
        batch = torch.from_numpy(self.rows.copy()).view(torch.bfloat16)
        gather_reference(
            [batch[:, layer] for layer in range(4)],
            torch.from_numpy(self.ids),
            torch.arange(count),
            plan,
            frame,
            geometry=self.geometry,
            seed=SEED,
            table=self._tables.table,
            forward=1,
        )
        return frame
