"""A cache of what the indices of a directory's shards say, so that opening it again reads one file.

It is no truth of its own: a shard whose file is not exactly the one that was read (inode, size, times) is read afresh,
and a cache that is damaged, of another version, not readable or says what no shard may say is as good as none.

::

    magic      8 bytes   HASHTAPX
    checksum   16 bytes  xxh3_128 of all that follows
    text       u64       bytes of the JSON behind it: distinct facts, and one row a shard
    indices    U64 [F, 8], then records U64 [R, 12], of all shards in that order
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from hashtap.directory import read_regular, whole_file
from hashtap.errors import FormatError
from hashtap.facts import ShardFacts
from hashtap.shard import INDEX_COLUMNS, RECORD_COLUMNS, Shard, check_sizes, check_tables

__all__ = ["CACHE_NAME", "Identity", "identity_of", "load_cache", "store_cache"]

CACHE_NAME = ".hashtap-index"
_MAGIC = b"HASHTAPX"
_VERSION = 1
_HEAD_BYTES = 32

Identity = tuple[int, ...]
"""What tells a file from another that had its name."""


def identity_of(path: Path) -> Identity:
    """Inode, size and times of a file; empty when it cannot be looked at."""
    try:
        state = os.lstat(path)
    except OSError:
        return ()
    return (state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


def load_cache(directory: Path) -> dict[Path, tuple[Identity, Shard]]:
    """The cached shards of a directory; empty when there is no cache that can be used."""
    try:
        # It holds less than the shards do, of which it holds a part.
        limit_bytes = sum(entry.stat().st_blocks * 512 for entry in os.scandir(directory) if entry.name[:1] != ".")
        data = read_regular(directory / CACHE_NAME, limit_bytes)
        return _parse(directory, data)
    except (OSError, FormatError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return {}


def store_cache(directory: Path, shards: Mapping[Path, tuple[Identity, Shard]]) -> None:
    """Cache these shards. A directory that cannot be written to is left without a cache."""
    facts: dict[str, int] = {}
    rows = []
    for path, (identity, shard) in shards.items():
        text = json.dumps(shard.facts.to_metadata())
        number = facts.setdefault(text, len(facts))
        sizes = (shard.file_bytes, shard.frames_at, shard.frames_bytes, len(shard.index), len(shard.records))
        rows.append([path.name, identity, number, *sizes])
    body = json.dumps({"version": _VERSION, "facts": [json.loads(text) for text in facts], "shards": rows}).encode()
    body += b" " * (-len(body) % 8)
    pieces = [len(body).to_bytes(8, "little"), body]
    pieces += [shard.index.tobytes() for _, shard in shards.values()]
    pieces += [shard.records.tobytes() for _, shard in shards.values()]
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    with suppress(OSError), whole_file(directory / CACHE_NAME, sync=False) as file:
        file.writelines([_MAGIC, digest.digest(), *pieces])


def _parse(directory: Path, data: bytes) -> dict[Path, tuple[Identity, Shard]]:
    if data[:8] != _MAGIC or data[8:24] != xxhash.xxh3_128_digest(memoryview(data)[24:]):
        return {}
    body_bytes = int.from_bytes(data[24:_HEAD_BYTES], "little")
    body: dict[str, Any] = json.loads(data[_HEAD_BYTES : _HEAD_BYTES + body_bytes])
    if body["version"] != _VERSION:
        return {}
    facts = [ShardFacts.from_metadata(metadata) for metadata in body["facts"]]
    rows = body["shards"]
    words = np.frombuffer(data, "<u8", offset=_HEAD_BYTES + body_bytes)
    for *_, file_bytes, frames_at, frames_bytes, frames, records in rows:
        sizes = (file_bytes, frames_at, frames_bytes, frames, records)
        # bool is an int to Python, and json has floats: only plain counts go on.
        if not all(type(size) is int and 0 <= size < 1 << 62 for size in sizes):
            raise FormatError("it holds a size that is no count")
        check_sizes(*sizes)
    frames, records = (sum(row[column] for row in rows) for column in (6, 7))
    indices = words[: frames * len(INDEX_COLUMNS)].reshape(-1, len(INDEX_COLUMNS))
    tables = words[frames * len(INDEX_COLUMNS) :].reshape(records, len(RECORD_COLUMNS))
    found = {}
    frame = record = 0
    for name, identity, number, file_bytes, frames_at, frames_bytes, frames, records in rows:
        path = directory / name
        index, table = indices[frame : frame + frames], tables[record : record + records]
        shard = Shard(path, file_bytes, facts[number], frames_at, frames_bytes, index, table)
        found[path] = (tuple(identity), shard)
        frame, record = frame + frames, record + records
    check_tables([shard for _, shard in found.values()], indices, tables)
    return found
