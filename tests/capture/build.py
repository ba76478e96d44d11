"""Builds capture directories: real frames of made-up states, through the real writer.

    with Host(tmp_path) as host:
        host.capture([[1, 2, 3], [4, 5]])

The states of a prompt follow from its ids (:func:`states_of`), so that whoever knows the ids knows what must come back.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import torch

from hashtap.directory import CaptureDirectory
from hashtap.exponents import TableBuilder
from hashtap.facts import ShardFacts
from hashtap.frame import NUMPY_DTYPE, Table
from hashtap.identity import prompt_key
from hashtap.writer import Flight, Record, Writer
from hashtap_kernels.layout import Dtype, Geometry
from hashtap_kernels.plan import Piece, plan_frames
from hashtap_kernels.proof import table_id
from hashtap_kernels.reference import gather_reference

torch.set_num_threads(1)  # tests fork, and OpenMP's threads do not come along

GEOMETRY = Geometry(4, 72)
SEED = (0x0123456789ABCDEF, 0xFEDCBA9876543210)
WRITER = "0123456789abcdef0123456789abcdef"
TORCH_DTYPE = {
    Dtype.BF16: torch.bfloat16,
    Dtype.FP16: torch.float16,
    Dtype.FP32: torch.float32,
    Dtype.FP8_E4M3: torch.float8_e4m3fn,
}

States = npt.NDArray[Any]
Part = tuple[Record, States, int, int]
"""Rows ``[first, first + tokens)`` of a record whose states are ``[T, L, H]``."""


def facts(geometry: Geometry = GEOMETRY, **changes: Any) -> ShardFacts:
    values: dict[str, Any] = {
        "model": "made-up",
        "epoch": "weights-1",
        "boundaries": tuple(range(2, 1 + geometry.layers)),
        "final_norm": "post",
        "geometry": geometry,
        "seed": SEED,
        "directory_uuid": "00000000-0000-4000-8000-000000000000",
        "writer": WRITER,
        "rank": 0,
        "versions": {"hashtap": "0.1.0", "sglang": "0.5.23", "torch": "2.13.0"},
        "server_flags": {"chunked_prefill_size": 128},
    }
    return ShardFacts(**{**values, **changes})


def states_of(token_ids: Sequence[int], geometry: Geometry = GEOMETRY) -> States:
    """Gaussian states ``[T, L, H]``, each channel of its own scale, as ``NUMPY_DTYPE`` holds them."""
    rng = np.random.default_rng([len(token_ids), *(int(token) & 0xFFFFFFFF for token in token_ids)])
    shape = (len(token_ids), geometry.layers, geometry.hidden)
    channel = 2.0 ** (np.arange(geometry.hidden) % 9 - 4)
    values = torch.from_numpy(rng.standard_normal(shape) * channel).to(TORCH_DTYPE[geometry.dtype])
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[geometry.dtype.element_bytes]
    states: States = values.view(bits).numpy().view(NUMPY_DTYPE[geometry.dtype])
    return states


class Host:
    """What a server's session is to the writer: it numbers passes and sends forwards.

    Args:
        path: the capture directory; made if missing.
        table: reference exponents from the start.
        table_rows: or make a table from so many rows; until then, and for good when it is 0, frames are RAW.
        options: of the writer.
    """

    def __init__(
        self,
        path: Path,
        geometry: Geometry = GEOMETRY,
        *,
        table: Table | None = None,
        table_rows: int = 0,
        changes: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.directory = CaptureDirectory.create(path)
        self.facts = facts(
            geometry, **{"directory_uuid": self.directory.uuid, "writer": uuid4().hex, **(changes or {})}
        )
        self.geometry = geometry
        self.table = table
        self.known_tables = {} if table is None else {table_id(table): table}
        self.tables = TableBuilder(geometry, table_rows)
        self.released = 0
        self._lock = threading.Lock()
        self._serial = 0
        self._forward = 0
        settings: dict[str, Any] = {"threads": 2, "codec": "zstd", "shard_bytes": 1 << 30, "seal_after_s": 3600}
        if table_rows:
            settings["observe"] = self.tables.observe
        self.writer = Writer(self.directory, self.facts, tables=self._by_id, **{**settings, **options})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.writer.close()

    def record(self, token_ids: Sequence[int], salt: bytes = b"") -> Record:
        """A new pass of a prompt."""
        self._serial += 1
        return Record(self._serial, prompt_key(token_ids, salt), np.array(token_ids, np.int64), salt)

    def capture(self, prompts: Iterable[Sequence[int]], chunk: int = 1 << 30) -> list[Record]:
        """Send each prompt, the chunks of all in turns, one forward for each turn."""
        records = [self.record(ids) for ids in prompts]
        states = [states_of(record.token_ids.tolist(), self.geometry) for record in records]
        longest = max((len(record.token_ids) for record in records), default=0)
        for first in range(0, longest, chunk):
            self.forward(
                [
                    (record, rows, first, min(chunk, len(rows) - first))
                    for record, rows in zip(records, states, strict=True)
                    if first < len(rows)
                ]
            )
        return records

    def forward(
        self,
        parts: Sequence[Part],
        *,
        consumed: Sequence[int] | None = None,
        owner: Record | None = None,
        spoil: Callable[[npt.NDArray[np.uint8]], None] | None = None,
        wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Send one forward.

        Args:
            parts: which rows of which records it computes.
            consumed: the ids that it really consumed, where they are not the records' own.
            owner: the record that the frames are said to belong to, where it is not their own.
            spoil: is given the frames' bytes before they are sent.
            wait: what the writer waits by.
        """
        self._forward += 1
        pieces, rows, ids, positions = [], [], [], []
        row = 0
        for record, states, first, tokens in parts:
            total = len(record.token_ids)
            pieces.append(Piece(row, tokens, first, total, record.serial, record.key))
            rows.append(states[first : first + tokens])
            ids.append(record.token_ids[first : first + tokens])
            positions.append(np.arange(first, first + tokens))
            row += tokens
        plan = plan_frames(pieces, self.geometry)
        batch = torch.from_numpy(np.concatenate(rows)).view(TORCH_DTYPE[self.geometry.dtype])
        buffer = np.zeros(plan.bytes + 64, np.uint8)
        buffer = buffer[-buffer.ctypes.data % 64 :][: plan.bytes]
        gather_reference(
            [batch[:, layer] for layer in range(self.geometry.layers)],
            torch.from_numpy(np.concatenate(ids) if consumed is None else np.array(consumed)),
            torch.from_numpy(np.concatenate(positions)),
            plan,
            buffer,
            geometry=self.geometry,
            seed=self.facts.seed,
            table=self.tables.table if self.table is None else self.table,
            forward=self._forward,
        )
        if spoil is not None:
            spoil(buffer)
        by_serial = {record.serial: owner or record for record, *_ in parts}
        sizes = plan.frame_bytes.tolist()
        frames = [(row[3], size, by_serial[row[5]]) for row, size in zip(plan.descriptors.tolist(), sizes, strict=True)]

        def release() -> None:
            self._release(buffer)

        self.writer.submit(Flight(buffer, wait, frames, release))

    def settle(self) -> None:
        """Wait until all that was sent is in the file, sealed or not."""
        end = time.monotonic() + 20
        while self.writer.counters()["queue"] or ((shard := self.writer._shards.current) is not None and shard.dirty):
            assert time.monotonic() < end
            time.sleep(0.002)

    @property
    def forwards(self) -> int:
        """How many were sent."""
        return self._forward

    def _release(self, buffer: npt.NDArray[np.uint8]) -> None:
        # Whoever still reads the buffer now reads rubbish.
        buffer[:] = 0xA5
        with self._lock:
            self.released += 1

    def _by_id(self, identity: int) -> Table:
        return self.known_tables[identity] if self.table is not None else self.tables.by_id(identity)
