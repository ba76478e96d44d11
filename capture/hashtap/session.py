"""One capturing rank: spans, kernel, ring and writer joined together. Knows no SGLang.

The caller tells of each request once (:meth:`Session.admit`), of each prefill forward
(:meth:`Session.capture`) and asks before it schedules another (:meth:`Session.may_admit`). All three
are called on one thread, the scheduler's; files, compression and waiting are the writer's.
"""

import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hashtap.config import CaptureConfig
from hashtap.directory import CaptureDirectory
from hashtap.donors import Donors
from hashtap.errors import SetupError
from hashtap.flight import Flight, Record
from hashtap.identity import NEEDS_RECOMPUTE, TokenIds, as_token_ids, prompt_key
from hashtap.logs import log
from hashtap.ring import Ring
from hashtap.ring_memory import RingMemory
from hashtap.shard import ShardFacts
from hashtap.spans import prompt_spans
from hashtap.transport import Transport, open_transport
from hashtap.writers import Writers
from hashtap_kernels.plan import OFFSET, SERIAL, FramePlan, Piece, plan_frames

__all__ = ["Batch", "Session", "Tracked"]

Receipt = dict[str, Any]

_ENDS = ("captured", "refused", "aborted", "incomplete", "needs_recompute", "dropped")  # of what was admitted
_COUNTS = ("admitted", *_ENDS, "restarted", "shared_rows")


@dataclass(frozen=True, slots=True)
class Batch:
    """One prefill forward, rows in the order of its requests (R requests, T rows, maybe padded behind).

    ``aux`` is a list of B tensors ``[>= T, H]`` or one packed ``[>= T, B * H]``, one for each of the boundaries in
    rising order; ``final`` is ``[>= T, H]``, or a list of such in the order of :attr:`ShardFacts.finals`; ``input_ids``
    and ``positions`` are int64 ``[>= T]``.
    """

    rids: Sequence[str]  # [R]
    extend_lens: Sequence[int]  # [R], rows of each request in this batch
    prefix_lens: Sequence[int]  # [R], position of each request's first row
    input_ids: Any
    positions: Any
    aux: Any
    final: Any


@dataclass(slots=True, weakref_slot=True)
class Tracked:
    """A request under capture. The caller keeps it alive exactly as long as the request."""

    rid: str
    record: Record
    state: str = "capturing"  # then captured, incomplete, needs recompute, dropped or refused
    reason: str | None = None
    rows: int = 0  # prompt rows taken or shared so far, always a prefix of the prompt
    past_cache: bool = False
    # Forgets the frames of the present pass unless it is whole; at the latest when this object dies.
    ending: "weakref.finalize[[Writers, Record, dict[str, int]], Tracked] | None" = None


class Session:
    """Captures the prompts of one rank into one directory.

    Args:
        config: the capture options.
        facts: what the shards will say about model, layers and versions.
        directory: where shards go; it must hold nothing of another model, epoch or layers.
        device: where the states lie, ``cpu`` or ``cuda``.
        max_forward_tokens: the most prompt rows that one forward can bring.

    Raises:
        SetupError: when the ring is too small for two forwards, its memory cannot be had, or no writer can be started.
    """

    def __init__(
        self,
        config: CaptureConfig,
        facts: ShardFacts,
        directory: CaptureDirectory,
        *,
        device: str,
        max_forward_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.facts = facts
        self._config = config
        self._directory = directory
        self._clock = clock
        # Every request of a forward may end in a frame of its own.
        self._forward_bytes = facts.geometry.piece_bytes(max_forward_tokens) + max_forward_tokens * 192
        if config.ring_bytes < 2 * self._forward_bytes:
            raise SetupError(
                f"--capture-ring-gib {config.capture_ring_gib:g} holds less than two forwards of {max_forward_tokens} "
                f"tokens: give at least {2 * self._forward_bytes / 2**30:.3f}, or a smaller --chunked-prefill-size"
            )
        memory = RingMemory.create(config.ring_bytes)
        self._transport: Transport = open_transport(
            device, facts.geometry, memory.bytes, config.stage_bytes, max_forward_tokens, facts.seed
        )
        self._ring = Ring(config.ring_bytes)
        # A record and its donor must be with one writer.
        processes, threads = config.capture_writers, 1
        if config.capture_prefix_cache == "on":
            processes, threads = threads, processes
        self._writers = Writers(
            directory,
            facts,
            memory,
            processes=processes,
            threads=threads,
            codec=config.capture_codec,
            shard_bytes=config.shard_bytes,
            seal_after_s=config.capture_seal_after_s,
        )
        self._donors = Donors() if config.capture_prefix_cache == "on" else None
        self._weights_move = False
        self._tracked: weakref.WeakValueDictionary[str, Tracked] = weakref.WeakValueDictionary()
        self._serials = itertools.count(1)
        self._forwards = itertools.count(1)
        self._full_since: float | None = None
        self._counts = dict.fromkeys(_COUNTS, 0)

    def admit(
        self,
        rid: str,
        token_ids: TokenIds,
        salt: bytes = b"",
        refuse: str | None = None,
        past_cache: bool = False,
    ) -> Tracked:
        """Track a request whose prompt is to be captured; computes its key.

        Args:
            rid: the request's id while it runs; nothing is paired by it afterwards.
            token_ids: int64 ``[T]``, the request's own prompt; copied.
            salt: what besides the ids changes the states, see :func:`hashtap.identity.salt_of`.
            refuse: why this prompt must not be captured; its receipt will say so.
            past_cache: whether the server's prefix cache has nothing for it.
        """
        ids = as_token_ids(token_ids).copy()
        tracked = Tracked(rid, Record(next(self._serials), prompt_key(ids, salt), ids, salt), past_cache=past_cache)
        self._counts["admitted"] += 1
        self._begin_pass(tracked, tracked.record)
        if refuse is not None:
            self._fail(tracked, "refused", refuse)
        else:
            self._check_weights(tracked)
        self._tracked[rid] = tracked
        return tracked

    def may_admit(self) -> bool:
        """Whether another prefill forward may be scheduled now.

        A full ring is felt here, before a forward, never inside one. After ``capture_wait_s`` of
        waiting it says yes again, and the prompts that then find no room are dropped whole.
        """
        if self._config.capture_when_full == "drop":
            return True
        if self._ring.fits(self._forward_bytes) and self._transport.ready():
            self._full_since = None
            return True
        now = self._clock()
        if self._full_since is None:
            self._full_since = now
            log.warning("the ring is full: new prompts wait for the writer")
        return now - self._full_since >= self._config.capture_wait_s

    def capture(self, batch: Batch) -> list[Receipt | None] | None:
        """Take the prompt rows of a forward; no wait, no file, no loop over tokens.

        Returns the receipts so far in the order of the batch, None for requests that are not tracked;
        None when there is none.

        Raises:
            ValueError: when the tensors are not what the facts say (a layer missing, another width).
        """
        members = [self._tracked.get(rid) for rid in batch.rids]
        if not any(members):
            return None
        prompt_lens = [len(m.record.token_ids) if m and m.state == "capturing" else None for m in members]
        sources = self._sources(batch)
        pieces: list[Piece] = []
        records: dict[int, Record] = {}
        taking: list[tuple[Tracked, int]] = []
        make = tuple.__new__  # a third of the time of Piece(...)
        for request, row, tokens, first_position in prompt_spans(batch.extend_lens, batch.prefix_lens, prompt_lens):
            tracked = members[request]
            if tracked is None or (tracked.rows != first_position and not self._goes_on(tracked, first_position)):
                continue
            record = tracked.record
            serial = record.serial
            pieces.append(make(Piece, (row, tokens, first_position, prompt_lens[request], serial, record.key)))
            records[serial] = record
            taking.append((tracked, tokens))
        if pieces:
            self._send(batch, sources, plan_frames(pieces, self.facts.geometry), records, taking)
        return [self._receipt(tracked) if tracked else None for tracked in members]

    def tracks(self, rids: Sequence[str]) -> bool:
        """Whether prompt rows of one of these requests are still to be captured."""
        members = (self._tracked.get(rid) for rid in rids)
        return any(member is not None and member.state == "capturing" for member in members)

    def end_epoch(self) -> None:
        """The weights are about to change: what is in flight ends here, and is written. May wait."""
        for tracked in list(self._tracked.values()):
            if tracked.state == "capturing" and tracked.rows:
                self._fail(tracked, "incomplete", "the weights were updated between two chunks")
        self._writers.drain()

    def begin_epoch(self, epoch: str, *, cache_is_empty: bool, weights_move: bool = False) -> None:
        """The weights changed: new shards name the new epoch.

        Args:
            epoch: its name.
            cache_is_empty: whether nothing that the old weights computed is left in the server's prefix cache.
            weights_move: whether they go on changing, until the next epoch.
        """
        self._weights_move = weights_move
        if self._donors is not None:
            self._donors.clear()
            self._donors.trusted = cache_is_empty
        self.facts = replace(self.facts, epoch=epoch)
        self._writers.set_facts(self.facts)
        for tracked in list(self._tracked.values()):
            self._check_weights(tracked)

    def cache_flushed(self) -> None:
        """The server's prefix cache is empty: what it will hold is of the present weights."""
        if self._donors is not None:
            self._donors.trusted = True

    def counters(self) -> dict[str, int]:
        """What has been counted since the start, the writer's counters included."""
        return {**self._counts, **self._writers.counters(), "ring_used_bytes": self._ring.used_bytes}

    def close(self) -> None:
        """Write and seal everything that was captured. May wait."""
        self._writers.close()

    def _sources(self, batch: Batch) -> list[Any]:
        """The L tensors ``[>= T, H]`` of a batch; their number is checked here, each by the kernel's contract."""
        asked, hidden = len(self.facts.boundaries), self.facts.geometry.hidden
        aux = batch.aux
        if aux is None:
            raise ValueError(f"the forward brought no auxiliary layers, {asked} were asked for")
        if not isinstance(aux, list | tuple):
            if aux.ndim != 2 or aux.shape[1] != asked * hidden:
                raise ValueError(f"packed auxiliary states are {tuple(aux.shape)}, not [T, {asked * hidden}]")
            aux = [aux[:, i * hidden : (i + 1) * hidden] for i in range(asked)]
        if len(aux) != asked:
            raise ValueError(f"the forward brought {len(aux)} auxiliary layers, {asked} were asked for")
        final = batch.final if isinstance(batch.final, list | tuple) else [batch.final]
        if len(final) != len(self.facts.finals):
            raise ValueError(f"the forward brought {len(final)} final states, {len(self.facts.finals)} were asked for")
        return [*aux, *final]

    def _goes_on(self, tracked: Tracked, first_position: int) -> bool:
        """Whether rows that do not begin where the request's rows ended begin a new pass; else the request fails."""
        record, donor = tracked.record, None
        if first_position and self._donors is not None:
            donor = self._donors.find(record.token_ids, first_position, record.salt)
        if first_position == 0 or donor is not None:
            # Prefilled past cached rows, or retracted and prefilled anew: an earlier pass's frames belong to no record.
            self._counts["restarted"] += tracked.rows > 0
            self._counts["shared_rows"] += first_position
            serial = next(self._serials)
            self._begin_pass(tracked, replace(record, serial=serial, shared_tokens=first_position, donor=donor))
            tracked.rows = first_position
            return True
        if first_position > tracked.rows:
            state = "incomplete" if self._donors is None else NEEDS_RECOMPUTE
            reason = f"{first_position - tracked.rows} rows from position {tracked.rows} came from the prefix cache"
        else:
            state, reason = (
                "incomplete",
                f"rows from position {first_position} were computed again after {tracked.rows}",
            )
        self._fail(tracked, state, reason)
        return False

    def _send(
        self,
        batch: Batch,
        sources: Sequence[Any],
        plan: FramePlan,
        records: dict[int, Record],
        taking: Sequence[tuple[Tracked, int]],
    ) -> None:
        offset = self._ring.take(plan.bytes)
        if offset is None:
            trouble = self._writers.trouble
            reason = f"the ring was full: {trouble}" if trouble else "the ring was full"
            log.warning("prompts are dropped: %s", reason)
            for tracked, _ in taking:
                self._fail(tracked, "dropped", reason)
            return
        wait = self._transport.send(
            sources,
            batch.input_ids,
            batch.positions,
            plan,
            offset,
            table=self._writers.table,
            forward=next(self._forwards),
        )
        for tracked, tokens in taking:
            tracked.rows += tokens
            if tracked.rows == len(tracked.record.token_ids):
                tracked.state = "captured"
                tracked.record.captured = True
                if self._donors is not None:
                    self._donors.add(tracked.record)
                self._counts["captured"] += 1
        frames = _frames(plan, records, offset)
        release = partial(self._ring.give_back, offset)
        self._writers.submit(Flight(self._transport.memory, wait, frames, release))

    def _check_weights(self, tracked: Tracked) -> None:
        """A prompt that is about to begin fails where its rows may be of several weights."""
        if tracked.state != "capturing":
            return
        if self._weights_move:
            self._fail(tracked, "incomplete", "the weights are being updated")
        elif self._donors is not None and not self._donors.trusted and not tracked.past_cache:
            # Also where it begins at its first row: later chunks may continue on what the cache has.
            self._fail(tracked, NEEDS_RECOMPUTE, "the prefix cache may hold rows of other weights until it is flushed")

    def _begin_pass(self, tracked: Tracked, record: Record) -> None:
        """From here on the request's frames carry the record's serial; those of an earlier pass are waste."""
        self._end_pass(tracked)
        tracked.record = record
        tracked.ending = weakref.finalize(tracked, _died, self._writers, record, self._counts)
        tracked.ending.atexit = False  # at exit the writer seals what is whole and leaves the rest

    def _end_pass(self, tracked: Tracked) -> None:
        """No more rows will come under the present serial."""
        if tracked.ending is not None and tracked.ending.detach() and not tracked.record.captured:
            self._writers.abandon(tracked.record)

    def _fail(self, tracked: Tracked, state: str, reason: str) -> None:
        """The request gets no record; its receipt will say why."""
        tracked.state, tracked.reason = state, reason
        self._end_pass(tracked)
        self._counts[state.replace(" ", "_")] += 1

    def _receipt(self, tracked: Tracked) -> Receipt:
        return {
            "key": tracked.record.key.hex(),
            "epoch": self.facts.epoch,
            "rows": tracked.rows,
            "state": tracked.state,
            "reason": tracked.reason,
            "directory": self._directory.uuid,
        }


def _died(writers: Writers, record: Record, counts: dict[str, int]) -> None:
    """The server forgot a request that was neither captured nor failed: it was aborted."""
    if not record.captured:
        counts["aborted"] += 1
        writers.abandon(record)


def _frames(plan: FramePlan, records: dict[int, Record], start: int) -> Iterator[tuple[int, int, Record]]:
    """``(offset in the ring, frame_bytes, record)`` of each frame; consumed off the scheduler's thread."""
    offsets, serials = plan.descriptors[:, OFFSET], plan.descriptors[:, SERIAL]
    for offset, size, serial in zip(offsets.tolist(), plan.frame_bytes.tolist(), serials.tolist(), strict=True):
        yield start + offset, size, records[serial]
