"""Shards whose index or records lie, every checksum being right."""

import json
import os
from pathlib import Path

import numpy as np
import xxhash
from tests.attacks.attack import Attack
from tests.attacks.files import Edit

from hashtap.shard import INDEX_COLUMNS, read_shard, record_row, sealed_header, trailer_words
from hashtap_kernels.layout import HEADER_BYTES, MAX_FRAME_TOKENS

__all__ = ["INDEX", "RECORDS", "resealed_with"]

TOP = 1 << 64


def resealed_with(path: Path, table: str, row: int, column: int, value: int) -> None:
    """Change one number of index or records, and make the trailer right again."""
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    offsets = {name: part["data_offsets"] for name, part in json.loads(data[8:begin]).items() if name != "__metadata__"}
    width = {"index": 8, "records": 12}[table]
    at = begin + offsets[table][0] + 8 * (width * row + column)
    data[at : at + 8] = value.to_bytes(8, "little")
    guarded = data[:begin] + data[begin + offsets["index"][0] : begin + offsets["records"][1]]
    data[-16:] = xxhash.xxh3_128_intdigest(bytes(guarded)).to_bytes(16, "little")
    path.write_bytes(data)


def entry(table: str, column: int, value: int, row: int = 0) -> Edit:
    return lambda path: resealed_with(path, table, row, column, value)


def overlapping(path: Path) -> None:
    """The second frame begins in the middle of the first one."""
    resealed_with(path, "index", 1, 0, int(read_shard(path).index[1, 0]) - 64)


def exchanged(path: Path) -> None:
    first, second = read_shard(path).index[[1, 2], 0].tolist()
    resealed_with(path, "index", 1, 0, second)
    resealed_with(path, "index", 2, 0, first)


def sums_to_the_same(path: Path) -> None:
    """Two sizes that are wrong together: no offset but the second frame's is."""
    index = read_shard(path).index
    resealed_with(path, "index", 1, 1, int(index[1, 1]) + 64)
    resealed_with(path, "index", 2, 0, int(index[2, 0]) + 64)
    resealed_with(path, "index", 2, 1, int(index[2, 1]) - 64)


def unheld_table(path: Path) -> None:
    planes = int(np.flatnonzero(read_shard(path).index[:, 6] & np.uint64(0xFF) == 1)[0])
    resealed_with(path, "index", planes, 5, 0xABC)


def claiming(frames: int) -> Edit:
    """A shard of one prompt, in so many frames of 256 tokens that are a hole in the file."""

    def edit(path: Path) -> None:
        facts = read_shard(path).facts
        index = np.zeros((frames, len(INDEX_COLUMNS)), "<u8")
        count = np.arange(frames, dtype=np.uint64)
        index[:, 0], index[:, 1], index[:, 3] = count * HEADER_BYTES, HEADER_BYTES, 1
        index[:, 4] = count * MAX_FRAME_TOKENS | MAX_FRAME_TOKENS << 32
        frames_bytes = frames * HEADER_BYTES
        head = sealed_header(facts, frames_bytes, frames, 1)
        record = np.array(record_row(b"k" * 16, 1, frames * MAX_FRAME_TOKENS, (0, 0), 0), "<u8").tobytes()
        with path.open("wb") as file:
            file.write(head)
            file.seek(frames_bytes, os.SEEK_CUR)
            file.write(index.tobytes() + record + trailer_words(head, index.tobytes(), record))

    return edit


SIZE, ORDER, TOKENS = "impossible size", "one behind the other", "impossible number of tokens"
NO_ROOM = "does not fit this machine's memory"

INDEX = {
    "frames that overlap": Attack(overlapping, ORDER),
    "frames in another order": Attack(exchanged, ORDER),
    "sizes that are wrong together": Attack(sums_to_the_same, "a frame of .* bytes says|does not begin|self-check"),
    # The victim has 256 MB: the ids of the first fit in and its states do not, of the second neither.
    "states that do not fit": Attack(claiming(2_500), NO_ROOM, limit_mb=16),
    "token ids that do not fit": Attack(claiming(140_000), NO_ROOM, limit_mb=200),
    "a table that is not there": Attack(unheld_table, "the table 0000000000000abc, which it does not hold"),
    **{
        f"index column {column} = {value:#x}": Attack(entry("index", column, value), reason)
        for column, value, reason in (
            (0, 64, ORDER),
            (0, 1 << 40, ORDER),
            (0, TOP - 64, ORDER),
            *((1, value, SIZE) for value in (0, 63, 1 << 40, TOP - 64)),
            (1, 64 * 5, ORDER),
            (2, 5, "not the one that the index says"),
            (4, 1 << 32, TOKENS),
            (4, 257 << 32, TOKENS),
            (5, 0, "lacks its table"),
            (6, 3, "unknown kind"),
            (6, 2 | 2 << 8, "unknown kind"),
            (6, 0, "lacks its table|impossible number"),
            (6, 1 << 63, "unknown kind"),
        )
    },
    **{
        f"second row, column {column} = {value:#x}": Attack(entry("index", column, value, row=1), reason)
        for column, value, reason in (
            (4, 0, TOKENS),
            (4, 200 << 32 | 0xFFFFFFFF, "past the last position"),
            (5, 0, "lacks its table"),
            (2, 1, "not the one that the index says"),
            (7, 1 << 40, "not the one that the index says"),
        )
    },
}

RECORDS = {
    f"records column {column} = {value:#x}": Attack(entry("records", column, value), reason)
    for column, value, reason in (
        (3, 0, TOKENS),
        (3, 1 << 32, TOKENS),
        (3, TOP - 1, TOKENS),
        (6, 1 << 30, TOKENS),
        (10, 1, "reserves"),
        (11, 1, "reserves"),
    )
}
