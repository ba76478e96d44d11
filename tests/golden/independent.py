"""A second reader, written from FORMAT.md alone: it shares no code with hashtap."""

import json
from collections import defaultdict
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard

ELEMENT = {"bfloat16": "<u2", "float16": "<u2", "float32": "<u4", "float8_e4m3fn": "u1"}
RAW, PLANES, TABLE = 0, 1, 2


def read_shard(path: Path) -> tuple[dict[str, str], Any, Any, Any]:
    """Facts, frames, index and records (§2)."""
    data = np.fromfile(path, np.uint8)
    begin = 8 + int(data[:8].view("<u8")[0])
    header = json.loads(data[8:begin].tobytes())
    facts = {name.removeprefix("hashtap."): text for name, text in header.pop("__metadata__").items()}
    assert [facts["format"], *header] == ["1", "frames", "index", "records", "trailer"]
    offsets = [part["data_offsets"] for part in header.values()]
    frames, index, records, trailer = (data[begin + start : begin + stop] for start, stop in offsets)
    guarded = data[:begin].tobytes() + index.tobytes() + records.tobytes()
    assert trailer.tobytes() == xxhash.xxh3_128_intdigest(guarded).to_bytes(16, "little")
    return facts, frames, index.view("<u8").reshape(-1, 8), records.view("<u8").reshape(-1, 12)


class Frame:
    """A stored frame (§3 to §5): its header's fields, ``sums``, ``ids`` and ``values``; a table joins ``tables``."""

    def __init__(self, data: Any, row: Any, facts: dict[str, str], tables: dict[int, Any]) -> None:
        def word(at: int, kind: str = "<u8") -> int:
            return int(data[at : at + np.dtype(kind).itemsize].view(kind)[0])

        assert data[:12].tobytes() == b"HASHTAP1\x01\x00\x80\x00"
        self.header, self.facts = data[:128], facts
        self.payload, self.n, self.first, self.total = data[13], word(20, "<u4"), word(24, "<u4"), word(28, "<u4")
        self.serial, self.key, self.table = word(32), data[40:56].tobytes(), word(72)
        zeroed = np.concatenate([data[:104], np.zeros(8, np.uint8), data[112:]])
        assert word(104) == xxhash.xxh3_64_intdigest(zeroed.tobytes())
        assert [word(96), word(104), self.serial, self.first + (self.n << 32)] == row[1:5].tolist()

        shape = (self.n, int(facts["layers"]), int(facts["hidden"]))
        elements, element = int(np.prod(shape)), np.dtype(ELEMENT[facts["dtype"]])
        size = {RAW: elements * element.itemsize, PLANES: elements, TABLE: shape[1] * shape[2]}[int(self.payload)]
        end = 128 + word(88, "<u4")
        plain = data[128:end]
        if data[92] == 1:
            assert zstandard.get_frame_parameters(plain.tobytes()).content_size == size
            plain = np.frombuffer(zstandard.ZstdDecompressor().decompress(plain.tobytes()), np.uint8)
        assert len(plain) == size
        if self.payload == TABLE:
            tables[self.table] = plain.reshape(shape[1:])
        elif self.payload == PLANES:
            high = (plain.reshape(shape) + tables[self.table]).astype(np.uint16)
            rotated = high << 8 | data[end : end + elements].reshape(shape)
            self.values, end = rotated >> 1 | rotated << 15, end + elements
        else:
            self.values = plain.copy().view(element).reshape(shape)
        self.sums = data[end : end + 8 * self.n].copy().view("<u8")
        self.ids = data[end + 8 * self.n : end + 16 * self.n].copy().view("<i8")


def read_frames(path: Path) -> Iterator[tuple[Frame, dict[int, Any]]]:
    """The frames of a shard in order, with the tables so far."""
    facts, data, index, _ = read_shard(path)
    tables: dict[int, Any] = {}
    for row in index:
        yield Frame(data[int(row[0]) : int(row[0] + row[1])], row, facts, tables), tables


def read_directory(path: Path) -> Iterator[tuple[bytes, str, Any, Any]]:
    """Key, epoch, token ids and values of every record (§7) that is not set aside (§1)."""
    lines = [line for listed in path.glob("set-aside.jsonl") for line in listed.read_text().splitlines()]
    aside = {(one["writer"], one["serial"]) for one in map(json.loads, lines)}
    passes: dict[Any, list[Frame]] = defaultdict(list)
    records: dict[tuple[bytes, str], Any] = {}
    for shard in sorted(path.glob("[!.]*.safetensors")):
        facts, _, _, rows = read_shard(shard)
        for frame, _ in read_frames(shard):
            passes[facts["writer"], facts["epoch"], frame.serial].append(frame)
        for row in (row for row in rows if (facts["writer"], int(row[2])) not in aside):
            records.setdefault((row[:2].tobytes(), facts["epoch"]), (facts["writer"], row.tolist(), row[7:9].tobytes()))

    def load(key: bytes, epoch: str) -> tuple[Any, Any]:
        writer, row, donor = records[key, epoch]
        ids, values = (part[: row[6]] for part in load(donor, epoch)) if row[6] else ([], None)
        for frame in sorted(passes[writer, epoch, row[2]], key=lambda frame: frame.first):
            assert (frame.first, frame.key, frame.total) == (len(ids), key, row[3])
            ids = np.concatenate([ids, frame.ids]).astype("<i8")
            values = frame.values if values is None else np.concatenate([values, frame.values])
        preimage = len(ids).to_bytes(8, "little") + ids.tobytes()
        assert row[9] or blake2b(preimage, digest_size=16, person=b"hashtap-key-1").digest() == key
        return ids, values

    yield from ((key, epoch, *load(key, epoch)) for key, epoch in records)
