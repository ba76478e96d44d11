"""Whole frames and whole prompts in bytes that nobody indexed."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hashtap.catalog import Catalog
from hashtap.errors import FormatError
from hashtap.facts import ShardFacts
from hashtap.flight import Record
from hashtap.frame import StoredFrame
from hashtap.header import Header, parse_header
from hashtap.identity import prompt_key
from hashtap.shard import MAX_FRAMES, Shard, record_row
from hashtap_kernels.layout import FRAME_ALIGN, HEADER_BYTES, MAGIC, Payload
from hashtap_kernels.proof import prompt_proof

__all__ = ["Whole", "whole_frames", "whole_records"]

U8Array = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole frame: its header, its token ids int64 ``[n]``, its stored bytes."""

    header: Header
    token_ids: npt.NDArray[np.int64]
    stored: U8Array


def whole_frames(data: U8Array, facts: ShardFacts) -> tuple[list[Whole], list[U8Array]]:
    """The whole frames in ``data``, in order, as many as a shard may have, and the stretches beside them.

    Stretches of mere zeros are left out.
    """
    frames: list[Whole] = []
    torn: list[U8Array] = []
    tables: set[int] = set()
    at = begin = 0
    while at < len(data) and len(frames) < MAX_FRAMES:
        frame = _whole_frame(data[at:], facts, tables)
        if frame is not None:
            torn += [data[begin:at]] if begin < at else []
            frames.append(frame)
            at = begin = at + frame.header.stored_bytes
        else:
            at = _next_magic(data, at + FRAME_ALIGN)
    torn += [data[begin:]] if begin < len(data) else []
    return frames, [piece for piece in torn if piece.any()]


def _whole_frame(data: U8Array, facts: ShardFacts, tables: set[int]) -> Whole | None:
    """The frame at the beginning of ``data``, if it is whole and of these facts; ``tables`` are those before it."""
    try:
        header = parse_header(data[:HEADER_BYTES])
        stored = data[: header.stored_bytes]
        frame = StoredFrame.parse(stored)
        if header.geometry != facts.geometry:
            return None
        if header.payload is Payload.TABLE:
            frame.table()
            tables.add(header.table)
        elif header.payload is Payload.PLANES and header.table not in tables:
            return None
    except FormatError:
        return None
    return Whole(header, frame.token_ids, stored)


def _next_magic(data: U8Array, at: int) -> int:
    """Where the next frame may begin: they lie at multiples of 64 bytes."""
    words = data[at : len(data) - len(data) % 8].view(np.uint64)[:: FRAME_ALIGN // 8]
    for start in range(0, len(words), 1 << 16):
        hits = np.flatnonzero(words[start : start + (1 << 16)] == np.uint64(MAGIC))
        if len(hits):
            return at + (start + int(hits[0])) * FRAME_ALIGN
    return len(data)


def whole_records(frames: Sequence[Whole], facts: ShardFacts, sealed: Catalog) -> list[tuple[int, ...]]:
    """Rows for ``records``: the prompts that ``frames`` complete and that no reader of these weights is given yet."""
    known = sealed.keys
    passes: dict[int, list[Whole]] = defaultdict(list)
    for frame in frames:
        if frame.header.tokens:
            passes[frame.header.serial].append(frame)
    for frame in _earlier_frames(passes, facts, sealed.shards):
        passes[frame.header.serial].append(frame)
    rows = []
    for parts in passes.values():
        key = parts[0].header.key
        if key not in known and (row := _row(parts, facts)):
            known.add(key)
            rows.append(row)
    return rows


def _earlier_frames(passes: dict[int, list[Whole]], facts: ShardFacts, sealed: Sequence[Shard]) -> Iterator[Whole]:
    """Frames of these passes that the same writer has sealed in earlier shards."""
    for shard in sealed:
        if shard.facts.writer != facts.writer:
            continue
        rows = np.flatnonzero(np.isin(shard.index[:, 3], np.array(list(passes), np.uint64)))
        for offset, size, _, serial, positions, *_ in shard.index[rows].tolist():
            if serial in passes and positions >> 32:
                with shard.path.open("rb") as file, suppress(FormatError):
                    file.seek(shard.frames_at + offset)
                    data = np.frombuffer(file.read(size), np.uint8)
                    frame = StoredFrame.parse(data)
                    yield Whole(frame.header, frame.token_ids, data)


def _row(parts: list[Whole], facts: ShardFacts) -> tuple[int, ...] | None:
    """The row of a pass with these frames; None when they are not one whole prompt, computed from its own tokens."""
    parts.sort(key=lambda part: part.header.first_position)
    first = parts[0].header
    token_ids = np.concatenate([part.token_ids for part in parts])
    record = Record(first.serial, first.key, token_ids)
    for part in parts:
        header = part.header
        if (header.key, header.total_tokens, header.salt_sum) != (first.key, first.total_tokens, first.salt_sum):
            return None
        record.take(header)
    if len(token_ids) != first.total_tokens or not record.tiles():
        return None
    if record.proof != prompt_proof(token_ids, 0, facts.seed):
        return None
    if first.salt_sum == 0 and prompt_key(token_ids) != first.key:
        return None
    return record_row(first.key, first.serial, len(token_ids), record.proof, first.salt_sum)
