"""A shard: one safetensors file of stored frames, their index and the records that they complete.

::

    8 bytes    header length, u64 little endian
    header     JSON, padded with spaces to the size that was reserved for it
    frames     U8  [bytes]   stored frames, one behind the other
    index      U64 [F, 8]    one row a frame
    records    U64 [R, 12]   one row a record listed in this shard
    trailer    U64 [2]       xxh3_128 of everything but frames and trailer

Here are its facts, its header, and the checks that a file must pass before anything in it is used.
"""

import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from hashtap.codec import Codec
from hashtap.errors import FormatError, UsageError
from hashtap.facts import ShardFacts
from hashtap.frame import stored_bytes_limit
from hashtap.header import Header
from hashtap_kernels.layout import FRAME_ALIGN, HEADER_BYTES, MAX_FRAME_TOKENS, Payload

__all__ = [
    "HEADER_LIMIT_BYTES",
    "INDEX_COLUMNS",
    "MAX_FRAMES",
    "RECORD_COLUMNS",
    "TRAILER_BYTES",
    "Shard",
    "ShardFacts",
    "check_sizes",
    "check_tables",
    "encode_header",
    "index_row",
    "read_shard",
    "record_row",
    "reserved_bytes",
    "sealed_header",
    "trailer_words",
    "unsealed_facts",
    "unsealed_header",
]

U64Array = npt.NDArray[np.uint64]

INDEX_COLUMNS = ("offset", "stored_bytes", "stored_sum", "serial", "positions", "table", "kind", "forward")
RECORD_COLUMNS = (
    *("key0", "key1", "serial", "total_tokens", "proof0", "proof1"),
    *("shared_tokens", "donor_key0", "donor_key1", "salt_sum", "reserved0", "reserved1"),
)
TRAILER_BYTES = 16
HEADER_LIMIT_BYTES = 1 << 20
"""The longest header; safetensors itself stops at 100 MB."""
MAX_FRAMES = 1 << 20
"""The most frames, and records, of a shard: what bounds a reader's memory."""

_HEADER_STEP_BYTES = 4096
_OFFSET_SPACE = 10**15  # as long as any offset gets, to reserve space by


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A sealed shard whose header, index and records were read and checked; its frames were not touched.

    Attributes:
        path: the file.
        file_bytes: how long it is.
        facts: its metadata.
        frames_at: where ``frames`` begins in the file.
        frames_bytes: how long it is.
        index: uint64 ``[F, 8]``, see FORMAT.md.
        records: uint64 ``[R, 12]``, see FORMAT.md.
    """

    path: Path
    file_bytes: int
    facts: ShardFacts
    frames_at: int
    frames_bytes: int
    index: U64Array
    records: U64Array


def encode_header(facts: ShardFacts, frames_bytes: int, frames: int, records: int) -> bytes:
    """The JSON header of a shard, not padded."""
    sizes = {
        "frames": ("U8", [frames_bytes], frames_bytes),
        "index": ("U64", [frames, len(INDEX_COLUMNS)], frames * len(INDEX_COLUMNS) * 8),
        "records": ("U64", [records, len(RECORD_COLUMNS)], records * len(RECORD_COLUMNS) * 8),
        "trailer": ("U64", [2], TRAILER_BYTES),
    }
    header: dict[str, Any] = {"__metadata__": facts.to_metadata()}
    begin = 0
    for name, (dtype, shape, size) in sizes.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + size]}
        begin += size
    return json.dumps(header, separators=(",", ":")).encode()


def reserved_bytes(facts: ShardFacts) -> int:
    """Bytes to reserve for the header, its length field included: a multiple of 4,096.

    Raises:
        UsageError: when the facts are too long for a header.
    """
    longest = 8 + len(encode_header(facts, _OFFSET_SPACE, MAX_FRAMES, MAX_FRAMES))
    if longest > HEADER_LIMIT_BYTES:
        raise UsageError(f"a shard's facts take {longest} bytes, over {HEADER_LIMIT_BYTES}: shorten the server flags")
    return -(-longest // _HEADER_STEP_BYTES) * _HEADER_STEP_BYTES


def unsealed_header(facts: ShardFacts) -> bytes:
    """What stands in a ``.partial`` before its frames: a length of 0, the facts, and spaces up to the reserved size."""
    return bytes(8) + encode_header(facts, 0, 0, 0).ljust(reserved_bytes(facts) - 8)


def sealed_header(facts: ShardFacts, frames_bytes: int, frames: int, records: int) -> bytes:
    """What takes its place at the end, of the same size."""
    padded_bytes = reserved_bytes(facts) - 8
    return padded_bytes.to_bytes(8, "little") + encode_header(facts, frames_bytes, frames, records).ljust(padded_bytes)


def unsealed_facts(data: npt.NDArray[np.uint8]) -> tuple[ShardFacts, int]:
    """The facts at the beginning of a ``.partial``, and where its frames begin.

    Raises:
        FormatError: when they are not there.
    """
    text = data[8:HEADER_LIMIT_BYTES].tobytes()
    try:
        header, end = json.JSONDecoder().raw_decode(text.decode("latin-1"))
        metadata = header["__metadata__"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"it does not begin with a shard's facts ({type(error).__name__})") from None
    facts = ShardFacts.from_metadata(metadata)
    frames_at = (8 + len(text) - len(text[end:].lstrip(b" "))) // _HEADER_STEP_BYTES * _HEADER_STEP_BYTES
    if frames_at < 8 + end:
        raise FormatError("its facts run into its frames")
    return facts, frames_at


def index_row(header: Header, offset: int) -> tuple[int, ...]:
    """The row in ``index`` of a stored frame at ``offset`` in ``frames``."""
    positions = header.first_position | header.tokens << 32
    kind = header.payload | header.codec << 8
    about = (header.serial, positions, header.table, kind, header.forward)
    return (offset, header.stored_bytes, header.stored_sum, *about)


def record_row(
    key: bytes,
    serial: int,
    tokens: int,
    proof: tuple[int, int],
    salt_sum: int,
    *,
    shared_tokens: int = 0,
    donor_key: bytes = b"",
) -> tuple[int, ...]:
    """The row in ``records`` of a record; its first ``shared_tokens`` rows are those of the record ``donor_key``."""
    keys = np.frombuffer(key + donor_key.ljust(16, b"\0"), "<u8").tolist()
    return (*keys[:2], serial, tokens, *proof, shared_tokens, *keys[2:], salt_sum, 0, 0)


def trailer_words(header: bytes, index: bytes, records: bytes) -> bytes:
    """The trailer, 16 bytes: xxh3_128 of the padded header with its length field, the index and the records."""
    digest = xxhash.xxh3_128(header)
    digest.update(index)
    digest.update(records)
    value: int = digest.intdigest()
    return value.to_bytes(TRAILER_BYTES, "little")


def read_shard(path: Path) -> Shard:
    """Read and check everything of a sealed shard but its frames.

    Raises:
        FormatError: naming file, reason and remedy, when it is not a whole, valid shard. Nothing is allocated that
            the file's own size does not bound.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode):
                raise FormatError("it is not a regular file")
            return _parse(path, descriptor, state.st_size)
        finally:
            os.close(descriptor)
    except OSError as error:
        reason = "it is a symbolic link" if path.is_symlink() else f"it cannot be read: {error.strerror}"
    except FormatError as error:
        reason = str(error)
    raise FormatError(
        f"{path} is no valid shard: {reason}. Restore it from a copy, or move it away, start the server anew and run "
        f"hashtap extract again"
    )


def _parse(path: Path, descriptor: int, file_bytes: int) -> Shard:
    head = _read(descriptor, 0, min(8, file_bytes))
    if len(head) < 8:
        raise FormatError(f"it is cut off at {file_bytes} bytes")
    header_bytes = int.from_bytes(head, "little")
    if header_bytes == 0:
        raise FormatError("its header was never written: its writer did not finish")
    if header_bytes > HEADER_LIMIT_BYTES:
        raise FormatError(f"its header claims {header_bytes} bytes, over the limit of {HEADER_LIMIT_BYTES}")
    if 8 + header_bytes > file_bytes:
        raise FormatError(f"it is cut off at {file_bytes} bytes, inside its header")
    text = _read(descriptor, 8, header_bytes)
    facts, ends, frames, records = _parse_header(text)
    frames_at = 8 + header_bytes
    frames_bytes, index_end, records_end = ends
    check_sizes(file_bytes, frames_at, frames_bytes, frames, records)
    index = _read(descriptor, frames_at + frames_bytes, index_end - frames_bytes)
    rows = _read(descriptor, frames_at + index_end, records_end - index_end)
    if _read(descriptor, frames_at + records_end, TRAILER_BYTES) != trailer_words(head + text, index, rows):
        raise FormatError("its trailer is wrong: header, index or records were changed")
    shard = Shard(
        path=path,
        file_bytes=file_bytes,
        facts=facts,
        frames_at=frames_at,
        frames_bytes=frames_bytes,
        index=np.frombuffer(index, "<u8").reshape(frames, len(INDEX_COLUMNS)),
        records=np.frombuffer(rows, "<u8").reshape(records, len(RECORD_COLUMNS)),
    )
    check_tables([shard], shard.index, shard.records)
    return shard


def _read(descriptor: int, offset: int, size: int) -> bytes:
    pieces = []
    while size and (piece := os.pread(descriptor, size, offset)):
        pieces.append(piece)
        offset, size = offset + len(piece), size - len(piece)
    if size:
        raise FormatError("it was cut off while it was read")
    return b"".join(pieces)


def _parse_header(text: bytes) -> tuple[ShardFacts, tuple[int, int, int], int, int]:
    """Facts, the end of each tensor but the trailer, and the numbers of frames and records."""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"its header is no JSON ({type(error).__name__})") from None
    if not isinstance(header, dict):
        raise FormatError("its header is no JSON object")
    facts = ShardFacts.from_metadata(header.get("__metadata__"))
    try:
        frames, records = header["index"]["shape"][0], header["records"]["shape"][0]
        frames_bytes = header["frames"]["shape"][0]
        # bool is an int to Python, and json has floats: only plain counts go on.
        if not all(type(count) is int and 0 <= count < 1 << 62 for count in (frames_bytes, frames, records)):
            raise FormatError("its header holds a shape that is no count")
        # What the header must say, given these three counts: nothing else is accepted.
        expected = json.loads(encode_header(facts, frames_bytes, frames, records))
    except (KeyError, TypeError, IndexError):
        raise FormatError("its header describes other tensors than a shard has") from None
    tensors = ("frames", "index", "records", "trailer")
    if set(header) != set(expected) or any(header[name] != expected[name] for name in tensors):
        raise FormatError("its header describes other tensors than a shard has")
    ends = [int(expected[name]["data_offsets"][1]) for name in tensors]
    return facts, (ends[0], ends[1], ends[2]), frames, records


def check_sizes(file_bytes: int, frames_at: int, frames_bytes: int, frames: int, records: int) -> None:
    """Check that a shard's parts add up to its file, and that there may be so many of them.

    Args:
        file_bytes, frames_at, frames_bytes: as of :class:`Shard`; none of these numbers is negative.
        frames: rows of the index.
        records: rows of the records.

    Raises:
        FormatError: when they do not, or there may not.
    """
    tables_bytes = 8 * (frames * len(INDEX_COLUMNS) + records * len(RECORD_COLUMNS))
    described = frames_at + frames_bytes + tables_bytes + TRAILER_BYTES
    if described != file_bytes:
        raise FormatError(f"it has {file_bytes} bytes where its header describes {described}")
    if frames * HEADER_BYTES > frames_bytes or not 0 < frames <= MAX_FRAMES or records > MAX_FRAMES:
        raise FormatError(f"it claims {frames} frames and {records} records in {frames_bytes} bytes of frames")


def check_tables(shards: Sequence[Shard], index: U64Array, records: U64Array) -> None:
    """Check what index and records claim, of many shards at once: then every offset, size and table is safe to use.

    Args:
        shards: of sizes that :func:`check_sizes` let pass.
        index: their indices, one behind the other.
        records: their records, likewise.

    Raises:
        FormatError: naming what is wrong with one of them.
    """
    _check_index(shards, index)
    _check_records(records)


def _check_index(shards: Sequence[Shard], index: U64Array) -> None:
    """The frames must tile ``frames``, and be of known kinds and possible sizes."""
    offset, stored_bytes, _, _, positions, table, kind, _ = index.T
    counts = [len(shard.index) for shard in shards]
    payload, codec = kind & np.uint64(0xFF), kind >> np.uint64(8)
    tokens, first = positions >> np.uint64(32), positions & np.uint64(0xFFFFFFFF)
    is_table = payload == Payload.TABLE
    limits = [stored_bytes_limit(shard.facts.geometry, MAX_FRAME_TOKENS) for shard in shards]
    limit = np.repeat(np.array(limits, np.uint64), counts)
    if (stored_bytes % FRAME_ALIGN).any() or (stored_bytes < HEADER_BYTES).any() or (stored_bytes > limit).any():
        raise FormatError("its index holds a frame of impossible size")
    ends = np.cumsum(stored_bytes)
    borders = np.append(np.uint64(0), ends[np.cumsum(counts, dtype=np.int64) - 1])
    begins = np.repeat(borders[:-1], counts)
    frames_bytes = np.array([shard.frames_bytes for shard in shards], np.uint64)
    if (offset != ends - stored_bytes - begins).any() or (np.diff(borders) != frames_bytes).any():
        raise FormatError("its index does not cover its frames one behind the other")
    if (payload > max(Payload)).any() or (codec > max(Codec)).any():
        raise FormatError("its index holds a frame of unknown kind")
    if (tokens[is_table] != 0).any() or (tokens[~is_table] == 0).any() or (tokens > MAX_FRAME_TOKENS).any():
        raise FormatError("its index holds a frame with an impossible number of tokens")
    if (first + tokens > np.uint64(0xFFFFFFFF)).any():
        raise FormatError("its index holds a frame past the last position that there can be")
    if ((table != 0) != (payload != Payload.RAW)).any():
        raise FormatError("its index holds a frame that lacks its table")
    planes = payload == Payload.PLANES
    if planes.any():
        # A table serves the frames of its own shard only.
        names, which = np.unique(table, return_inverse=True)
        held = which + len(names) * np.repeat(np.arange(len(shards)), counts)
        missing = table[planes][~np.isin(held[planes], held[is_table])]
        if len(missing):
            raise FormatError(f"its frames name the table {int(missing[0]):016x}, which it does not hold")


def _check_records(records: U64Array) -> None:
    total, shared = records[:, 3], records[:, 6]
    if (total == 0).any() or (total > np.uint64(0x7FFFFFFF)).any() or (shared > total).any():
        raise FormatError("its records hold an impossible number of tokens")
    if records[:, 10:].any():
        raise FormatError("its records use a column that this format reserves")
