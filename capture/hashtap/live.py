"""Batches for a trainer that runs while the captures are still being made.

    stream = LiveStream("captures", batch_size=8)
    for batch in DataLoader(stream, batch_size=None, num_workers=2):
        ...
        checkpoint["data"] = batch["state"]    # and later: stream.load_state_dict(checkpoint["data"])

It hands out records in the order in which they were sealed (:mod:`hashtap.order`), each once. Needs torch and pyarrow.
"""

import os
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from hashtap.collate import Batch, Sample, pad_right
from hashtap.datasets import Collate, as_sample, largest_batch, place
from hashtap.directory import CaptureDirectory
from hashtap.errors import UsageError
from hashtap.logs import log
from hashtap.manifest import Manifest
from hashtap.order import SealingOrder
from hashtap.reader import NotCaptured, Reader

__all__ = ["LiveStream"]


class LiveStream(IterableDataset[Batch]):
    """Whole batches of the records of a directory, as they are sealed, until no more come.

    It ends behind the last record when ``hashtap extract`` has finished (of several at a time, the last; one with
    ``--remote`` says nothing), or when nothing was sealed for ``idle_s`` of waiting, or with the first ``count``
    records. Where an earlier extraction has finished, start the next one before the stream.

    A record is one sample, under the name and loss mask of the first that the manifest has for it. Ranks take turns at
    the batches; none is handed out before each rank can have one, and the last ones, fewer than there are ranks, are
    left out. The workers of a rank take turns too, with ``DataLoader(stream, batch_size=None)``. All write down how far
    they are, for ``hashtap extract --ahead-samples``: the directory must be writable.

    A record that is set aside (:mod:`hashtap.set_aside`) keeps its place and is left out of its batch. A batch that it
    would leave empty has the nearest record once more, so that ranks and workers stay in step.

    Each batch carries ``batch["state"]``: :meth:`load_state_dict` with it goes on right after it, whatever the number
    of workers or ranks was.

    Args:
        directory: the capture directory; the server may yet have to seal its first shard.
        batch_size: samples of a batch; or
        max_tokens: as many samples as fit, one behind the other. A longer sample is a batch of its own.
        collate: makes a batch of samples.
        epoch: records of these weights; None takes those of the first shard.
        idle_s: end when nothing was sealed in so long a wait; None waits for an extraction to finish.
        count: end with so many records of the directory, over all ranks and runs.
        poll_s: how often to look for news when there is nothing to hand out.
        rank: of this process, of ``world_size``; ``torch.distributed``'s when it is initialised, else 0 of 1.

    Raises:
        UsageError: when it is no capture directory, or not exactly one of ``batch_size`` and ``max_tokens`` is given.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        collate: Collate = pad_right,
        epoch: str | None = None,
        idle_s: float | None = None,
        count: int | None = None,
        poll_s: float = 0.5,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._size = largest_batch(batch_size, max_tokens)
        self._rank, self._world_size = place(rank, world_size)
        found = CaptureDirectory.open(directory)
        self._directory, self._uuid = Path(found.path), found.uuid
        self._batch_size, self._max_tokens, self._collate = batch_size, max_tokens, collate
        self._epoch, self._idle_s, self._count, self._poll_s = epoch, idle_s, count, poll_s
        self._row = 0

    def __iter__(self) -> Iterator[Batch]:
        """Begin at the first record, or at the state that was loaded.

        Raises:
            UsageError: when the loaded state lies behind the last record.
            MismatchError: when the first shards are of several weights and none was chosen.
            FormatError: when a shard is damaged.
            NotCaptured: when a record's shard was moved away, or all records are set aside.
        """
        worker = get_worker_info()
        workers, mine = (1, 0) if worker is None else (worker.num_workers, worker.id)
        reader = self._first_shard()
        if reader is None:
            return
        live = _Live(self, reader)
        row, turn = self._row, 0
        while spans := live.round(row):
            row = spans[-1].stop
            if turn % workers == mine:
                samples = live.samples(spans[self._rank])
                state = {"directory": self._uuid, "epoch": live.epoch, "row": row}
                yield {**self._collate(samples), "state": state}
            turn += 1

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the batch that carried ``state``, the next time that an iteration begins.

        Raises:
            UsageError: when it is of another directory or of other weights.
        """
        if state["directory"] != self._uuid:
            raise UsageError(f"the state is of the capture directory {state['directory']}, this is {self._uuid}")
        if self._epoch not in (None, state["epoch"]):
            raise UsageError(f"the state is of the weights {state['epoch']}, this stream's are {self._epoch}")
        self._epoch, self._row = state["epoch"], state["row"]

    def _first_shard(self) -> Reader | None:
        """A reader of the stream's epoch, as soon as there is one; None when that takes longer than ``idle_s``."""
        started_s = time.monotonic()
        reader = Reader(self._directory, epoch=self._epoch)
        while not reader.shards:
            if self._idle_s is not None and time.monotonic() - started_s > self._idle_s:
                return None
            time.sleep(self._poll_s)
            reader.refresh()
        return reader if self._epoch is not None else Reader(self._directory, epoch=reader.facts.epoch)


class _Live:
    """One iteration over a stream."""

    def __init__(self, stream: LiveStream, reader: Reader) -> None:
        self._stream, self._reader = stream, reader
        self.epoch = reader.facts.epoch
        self._manifest = Manifest.load(stream._directory)
        self._order = SealingOrder(stream._directory, self.epoch)
        self._order.look()
        self._order.extend(reader)
        self._changed = False
        self._left_out = False  # whether the log says that records are
        if stream._row > len(self._order):
            raise UsageError(
                f"the state lies at record {stream._row} of {len(self._order)}: the order of {stream._directory} was "
                "made anew since; start from the beginning"
            )
        # Records came after an earlier end, so that it was not the end.
        self._passed = self._order.end if self._order.end is not None and self._order.end < len(self._order) else None

    def round(self, row: int) -> list[range]:
        """Rows of the next batch of each rank, from ``row`` on, as soon as all are there; empty at the end."""
        order, stream = self._order, self._stream
        news_at_s = time.monotonic()
        while True:
            end = self._end()
            spans = self._cut(row, len(order) if end is None else end, closed=end is not None)
            if spans or end is not None:
                order.ask(spans[-1].stop if spans else row)
                return spans
            wanted = row + (stream._batch_size or 0) * stream._world_size
            order.ask(max(wanted, len(order) + 1))
            if self._found():
                news_at_s = time.monotonic()
            elif stream._idle_s is not None and time.monotonic() - news_at_s > stream._idle_s:
                order.finish()
            else:
                time.sleep(stream._poll_s)

    def samples(self, rows: range) -> list[Sample]:
        """The samples of these rows, those set aside left out; where that leaves none, the one of the nearest row."""
        samples = [sample for sample in map(self._sample, rows) if sample is not None]
        if samples:
            return samples
        others = chain(reversed(range(rows.start)), range(rows.stop, len(self._order)))
        nearest = next((sample for sample in map(self._sample, others) if sample is not None), None)
        if nearest is None:
            raise NotCaptured(
                f"all {len(self._order)} records of {self._stream._directory} with the weights {self.epoch} are set "
                "aside: extract their samples again"
            )
        return [nearest]

    def _is_set_aside(self, key: bytes) -> bool:
        """Whether the record of a key is, or one that it shares rows with."""
        aside = {entry.key for entry in self._reader.set_aside}
        donors = {part.entry.key: part.entry.donor_key for part in self._reader.incomplete}
        while key not in aside and key in donors:
            key = donors.pop(key)
        return key in aside

    def _sample(self, row: int) -> Sample | None:
        """The sample of one row; None when its record, or one that it shares rows with, is set aside."""
        key = self._order.key(row)
        try:
            capture = self._reader.by_key(key)
        except NotCaptured:
            self._refresh()  # another process has seen it sealed
            if self._is_set_aside(key):
                if not self._left_out:
                    log.warning("record %s is set aside: batches go without it, and others that are", key.hex())
                self._left_out = True
                return None
            capture = self._reader.by_key(key)
        names = self._manifest.sample_ids_of(key)
        if not names:
            self._manifest = Manifest.load(self._stream._directory)
            names = self._manifest.sample_ids_of(key)
        if not names:
            return as_sample(key.hex(), capture, None)
        return as_sample(names[0], capture, self._manifest.loss_mask_of(names[0]))

    def _end(self) -> int | None:
        """How many rows there are in all, if that is known by now."""
        end = None if self._order.end == self._passed else self._order.end
        known = [rows for rows in (end, self._stream._count) if rows is not None and rows <= len(self._order)]
        return min(known, default=None)

    def _cut(self, row: int, stop: int, *, closed: bool) -> list[range]:
        """One batch for each rank of the rows ``[row, stop)``; empty where that is not possible yet."""
        stream, spans, first, tokens = self._stream, list[range](), row, 0
        # More cannot be needed: a record has a token at least, and one behind the last shows that it is full.
        stop = min(stop, row + stream._size * stream._world_size + 1)
        for at, length in enumerate(self._order.tokens(row, stop).tolist(), row):
            if stream._max_tokens is not None and at > first and tokens + length > stream._max_tokens:
                spans.append(range(first, at))
                first, tokens = at, 0
            if len(spans) == stream._world_size:
                return spans
            tokens += length
            if at + 1 - first == stream._batch_size:
                spans.append(range(first, at + 1))
                first = at + 1
                if len(spans) == stream._world_size:
                    return spans
        if closed and first < stop:
            spans.append(range(first, stop))
        return spans if len(spans) == stream._world_size else []

    def _found(self) -> bool:
        """Look for news; whether there are any."""
        order, known = self._order, (len(self._order), self._order.end)
        order.look()
        self._refresh()
        if self._changed:
            order.extend(self._reader)
            self._changed = False
        return (len(order), order.end) != known

    def _refresh(self) -> None:
        # Whatever is new in the reader must go into the order, whoever has asked for it.
        self._changed = self._reader.refresh() or self._changed
