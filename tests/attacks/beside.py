"""Other files of a capture directory: identity, cache, manifest, what is set aside, order, what a dead writer left."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from tests.attacks.attack import EPOCH, OUTSIDE, TARGET, Attack
from tests.attacks.files import FACTS, Edit, trap
from tests.attacks.frames import FRAMES, SECTIONS

from hashtap.directory import IDENTITY_FILE, PARTIAL_SUFFIX, host_name
from hashtap.index_cache import CACHE_NAME, identity_of, store_cache
from hashtap.manifest import MANIFEST_NAME
from hashtap.quarantine import QUARANTINE_NAME
from hashtap.recover import TORN_SUFFIX
from hashtap.set_aside import SET_ASIDE_NAME
from hashtap.shard import INDEX_COLUMNS, RECORD_COLUMNS, read_shard

__all__ = ["ASIDE", "BESIDE", "IDENTITY", "LIES", "MANIFEST", "NO_FILES", "ORDER", "SPOILT", "WRITTEN"]


def beside(name: str, make: Callable[[Path], object]) -> Edit:
    """Something under another name in the shard's directory, in place of what was there."""

    def edit(path: Path) -> None:
        file = path.with_name(name)
        file.unlink(missing_ok=True)
        make(file)

    return edit


def filled(text: bytes) -> Edit:
    return lambda path: path.write_bytes(text)


def terabyte(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def pickled(path: Path) -> None:
    path.write_bytes(trap(path))


IDENTITY = {
    name: Attack(beside(IDENTITY_FILE, make), reason)
    for name, make, reason in (
        ("an identity that is half a brace", filled(b"{"), "is damaged"),
        ("an identity that is a tower", filled(b"[" * 60_000), "is damaged"),
        ("an identity that is a number", filled(b"7"), "is damaged"),
        ("an identity whose uuid is one of ..", filled(b'{"format": 1, "uuid": "../../x"}'), "is damaged"),
        ("an identity of the next format", filled(json.dumps({"format": 2, "uuid": "0" * 32}).encode()), "format 2"),
        ("an identity that is a terabyte", terabyte, "is damaged"),
        ("an identity that is a pickle", pickled, "is damaged"),
        ("an identity that is a pipe", os.mkfifo, "is damaged"),
        ("an identity that is a folder", Path.mkdir, "is damaged|cannot read"),
        ("an identity that is endless", lambda path: path.symlink_to("/dev/zero"), "is damaged"),
    )
}


def cache(body: object, tail: bytes = b"") -> bytes:
    """An index cache whose checksum is right."""
    text = json.dumps(body).encode()
    text += b" " * (-len(text) % 8)
    rest = len(text).to_bytes(8, "little") + text + tail
    return b"HASHTAPX" + xxhash.xxh3_128_digest(rest) + rest


def lying(rows: slice = slice(None), **lies: int) -> Edit:
    """A whole cache that knows the files, and lies of the target: of an attribute, or of columns of its tables.

    Columns that both tables have are those of the index, of which only ``rows`` are changed.
    """

    def edit(path: Path) -> None:
        shards = {shard: (identity_of(shard), read_shard(shard)) for shard in path.parent.glob("*.safetensors")}
        identity, shard = shards[path.with_name(TARGET)]
        index, records = shard.index.copy(), shard.records.copy()
        attributes = {}
        for name, value in lies.items():
            if name in INDEX_COLUMNS:
                index[rows, INDEX_COLUMNS.index(name)] = value
            elif name in RECORD_COLUMNS:
                records[:, RECORD_COLUMNS.index(name)] = value
            else:
                attributes[name] = value
        shards[shard.path] = (identity, replace(shard, index=index, records=records, **attributes))
        store_cache(path.parent, shards)

    return edit


MOST_TOKENS = 0x7FFFFFFF
TABLE_ROW, FRAME_ROWS = slice(0, 1), slice(1, None)  # of the target's index

CACHE = {
    f"a cache that {name}": Attack(beside(CACHE_NAME, make), "")
    for name, make in (
        ("is a pickle", pickled),
        ("is a pipe", os.mkfifo),
        ("is a folder", Path.mkdir),
        ("is a terabyte", terabyte),
        ("is endless", lambda path: path.symlink_to("/dev/zero")),
        ("begins well and is a terabyte", lambda path: (path.write_bytes(cache({"version": 1})), terabyte(path))),
        ("is a tower", lambda path: path.write_bytes(cache([])[:32] + b"[" * 60_000)),
        ("names ..", filled(cache({"version": 1, "facts": [], "shards": [[f"../{OUTSIDE}"] * 8]}))),
        (
            "has numbers for nothing",
            filled(cache({"version": 1, "facts": [{}], "shards": [["x", [], 0, *[1 << 62] * 5]]})),
        ),
        ("has numbers past all", filled(cache({"version": 1, "facts": [], "shards": [["x", [], 0, *[1 << 70] * 5]]}))),
        ("has infinite numbers", filled(cache({"version": 1, "facts": [], "shards": [["x", [], 0, *[1e999] * 5]]}))),
        ("names another table than its shard's", lying(TABLE_ROW, table=5)),
        ("has a frame of another table", lying(slice(1, 2), table=5)),
        ("has frames of too many tokens", lying(FRAME_ROWS, total_tokens=MOST_TOKENS, positions=MOST_TOKENS << 32)),
        ("has a record without tokens", lying(total_tokens=0)),
        ("has a record that shares more than it has", lying(shared_tokens=1 << 30)),
        ("has a frame of no size", lying(FRAME_ROWS, stored_bytes=0)),
        ("has frames in front of the file", lying(frames_at=-8)),
    )
}
LIES = {
    f"a cache that lies of {name} {value:#x}": Attack(beside(CACHE_NAME, lying(**{name: value})), ".*")
    for name, value in (
        ("offset", 1 << 40),
        ("stored_bytes", 1 << 40),
        ("table", 5),
        ("kind", 1),
        ("positions", (1 << 64) - 1),
        ("serial", 1),
        ("frames_at", 1 << 60),
        ("frames_at", 1 << 70),
        ("frames_at", -8),
        ("frames_bytes", 1 << 60),
        ("file_bytes", -1),
    )
}


def repeated(value: str, rows: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array([value]))


def table(rows: int = 1, *, sample_id: str = "a", mask_tokens: int = 1) -> Edit:
    """A manifest whose rows are all the same: a few kB, whatever their number and size."""
    mask = pa.FixedSizeListArray.from_arrays(pa.array(np.ones(rows * mask_tokens, np.uint8)), mask_tokens)
    columns = {
        **{name: repeated(value, rows) for name, value in (("sample_id", sample_id), ("key", "0" * 32), ("epoch", ""))},
        "tokens": pa.array(np.ones(rows, np.int32)),
        "loss_mask": mask.cast(pa.list_(pa.uint8())),
    }
    required = [pa.field(name, column.type, name == "loss_mask") for name, column in columns.items()]
    made = pa.table(list(columns.values()), pa.schema(required))
    return lambda path: pq.write_table(made, path, compression="zstd", store_schema=False, row_group_size=rows)


def footer(thrift: bytes, size: int) -> Edit:
    """A Parquet file whose footer has a size, and begins so."""

    def make(path: Path) -> None:
        with path.open("wb") as file:
            file.write(b"PAR1" + thrift)
            file.seek(4 + size)
            file.write(size.to_bytes(4, "little") + b"PAR1")

    return make


MANIFEST = {
    f"a manifest that {name}": Attack(beside(MANIFEST_NAME, make), "cannot read the manifest")
    for name, make in (
        ("has a row of 64 million tokens", table(mask_tokens=1 << 26)),
        ("names a megabyte a thousand times", table(1000, sample_id="a" * (1 << 20))),
        ("has two million rows in a few kB", table(2_000_000)),
        ("has a footer of 4 GB", footer(b"", (1 << 32) - 1)),
        ("has a footer of a million columns", footer(b"\x15\x02\x19\xfc\xbf\x84\x3d", 7)),
        ("is a pickle", pickled),
        ("is noise", filled(b"PAR1" + os.urandom(200) + b"PAR1")),
        ("is half a header", filled(b"PAR1")),
        ("is a terabyte", terabyte),
        ("is a folder", Path.mkdir),
        ("is a pipe", os.mkfifo),
        ("is endless", lambda path: path.symlink_to("/dev/zero")),
    )
}

NAMES = {
    name: Attack(edit, "")
    for name, edit in (
        ("a shard whose name is hidden", beside("..safetensors", filled(b"x"))),
        ("a shard whose name has no stem", beside(".safetensors", filled(b"x"))),
        ("a folder of another name", beside("..hashtap", Path.mkdir)),
        ("a link to the folder above", beside("up", lambda path: path.symlink_to(".."))),
        ("a draft of a recovery", beside(".a-good.safetensors.x.partial", filled(b"x"))),
    )
}


def aside(**changes: object) -> bytes:
    """A line of the set-aside list."""
    return json.dumps({"writer": "a", "serial": 1, **changes}).encode() + b"\n"


ASIDE = {
    f"a set-aside list {name}": Attack(beside(SET_ASIDE_NAME, make), reason, limit_mb)
    for name, make, reason, limit_mb in (
        *(
            (f"with the serial {value}", filled(aside().replace(b" 1}", f" {value}}}".encode())), "line 1 of", 8)
            for value in ("1e999", "-1", "1.5", "true", '"1"', "null", str(1 << 64), "9" * 5000)
        ),
        *((f"with the writer {value}", filled(aside(writer=value)), "line 1 of", 8) for value in (7, None, ["a"])),
        ("without a serial", filled(b'{"writer": "a"}\n'), "line 1 of", 8),
        ("whose second line is a tower", filled(aside() + b"[" * 60_000), "line 2 of", 8),
        ("of 340,000 lists", filled(b"[" + b"[]," * 340_000 + b"[]]"), "line 1 of", 48),
        ("of a million empty lines", filled(b"\n" * 1_000_000), "line 1 of", 8),
        ("that is a line of 32 MiB", filled(b" " * (32 << 20) + aside()), "line 1 of", 80),
        ("that is a pickle", pickled, "line 1 of", 8),
        ("that is a terabyte", terabyte, "over the limit", 8),
        ("that is a folder", Path.mkdir, "not a regular file", 8),
        ("that is a pipe", os.mkfifo, "not a regular file", 8),
        ("that is endless", lambda path: path.symlink_to("/dev/zero"), "not a regular file", 8),
    )
}


def order(*, rows: bytes = b"", size: int = 0) -> Edit:
    """An order of sealing with a whole header, and zeros up to a size."""

    def make(path: Path) -> None:
        path.write_bytes(b"hashtap order 1\n" + bytes(8) + b"\xff" * 8 + rows)
        os.truncate(path, max(size, path.stat().st_size))

    return make


ORDER = {
    f"an order that {name}": Attack(beside(f".hashtap-order-{xxhash.xxh3_64_hexdigest(EPOCH.encode())}", make), reason)
    for name, make, reason in (
        ("is a terabyte", order(size=1 << 40), ""),
        ("begins with rows and is a terabyte", order(rows=b"x" * 24 * 1000, size=1 << 40), ""),
        ("ends in half a row", order(rows=b"x" * 36), ""),
        ("is a terabyte of zeros", terabyte, "not an order of records"),
        ("is a pickle", lambda path: path.write_bytes(trap(path).ljust(64)), "not an order of records"),
        ("is a pipe", os.mkfifo, "cannot use"),
        ("is a folder", Path.mkdir, "cannot use"),
        ("is endless", lambda path: path.symlink_to("/dev/zero"), "cannot use"),
        ("leads out of the directory", lambda path: path.symlink_to(f"../{OUTSIDE}"), "cannot use"),
    )
}

DEAD = f"hashtap-{host_name()}-1-r0-00000000-000000.safetensors{PARTIAL_SUFFIX}"


def left(edit: Edit) -> Edit:
    """The shard once more, spoilt, as a writer leaves it that was killed."""

    def make(path: Path) -> None:
        good = path.read_bytes()
        edit(path)
        spoilt = path.read_bytes()
        path.write_bytes(good)
        path.with_name(DEAD).write_bytes(bytes(8) + spoilt[8:])

    return make


def unsealed(text: bytes) -> Edit:
    return beside(DEAD, filled(bytes(8) + text))


SPOILT = {
    f"left behind: {name}": Attack(edit, "", limit_mb)
    for name, edit, limit_mb in (
        *((name, left(attack.make), 8) for name, attack in (FACTS | FRAMES | SECTIONS).items()),
        ("a pickle", beside(DEAD, pickled), 8),
        ("a tower", unsealed(b"[" * 900_000), 8),
        ("a number of 500,000 digits", unsealed(b"1" * 500_000), 8),
        ("a pipe", beside(DEAD, lambda path: (os.mkfifo(path), os.utime(path, (0, 0)))), 8),  # an empty file may be new
        ("340,000 lists", unsealed(b"[" + b"[]," * 340_000 + b"[]]"), 48),
        ("a list of facts", unsealed(b'{"__metadata__": [["hashtap.format", "1"], [1, 2]]}'), 8),
        ("facts that are numbers", unsealed(b'{"__metadata__": {"hashtap.format": "1", "hashtap.layout": 7}}'), 8),
    )
}
NO_FILES = {
    f"left behind: {name}": Attack(beside(DEAD, make), "")
    for name, make in (
        ("a link out", lambda path: path.symlink_to(f"../{OUTSIDE}")),
        ("a link to endless zeros", lambda path: path.symlink_to("/dev/zero")),
        ("a folder", Path.mkdir),
        ("a terabyte", terabyte),  # more than there is address space for
    )
}


def quarantined(samples: object) -> bytes:
    return json.dumps({"samples": samples}).encode() + b"\n"


QUARANTINE = {
    f"a quarantine that {name}": Attack(beside(QUARANTINE_NAME, make), reason, limit_mb)
    for name, make, reason, limit_mb in (
        ("is noise", filled(b"\xff\xfe\x00\xd8" * 1000), "", 8),
        ("is a tower", filled(b"[" * 60_000 + b"\n" + quarantined("x")), "", 8),
        ("is a line of 200 MiB", lambda path: (path.touch(), os.truncate(path, 200 << 20)), "", 8),
        ("has 340,000 lists in a line", filled(b"[" + b"[]," * 340_000 + b"[]]\n"), "", 48),
        ("has 200,000 lines of others", filled(quarantined("x" * 100) * 200_000), "", 8),
        ("is a pickle", pickled, "", 8),
        ("is a terabyte", terabyte, "over the limit .* remove it", 8),
        ("is a folder", Path.mkdir, "not a regular file; remove it", 8),
        ("is a pipe", os.mkfifo, "not a regular file; remove it", 8),
        ("is endless", lambda path: path.symlink_to("/dev/zero"), "not a regular file; remove it", 8),
        ("leads out of the directory", lambda path: path.symlink_to(f"../{OUTSIDE}"), "", 8),
    )
}


def led_out(name: str, to: str = OUTSIDE) -> Edit:
    """A link under a name that hashtap might write to, and a dead writer's file that is partly whole."""

    def edit(path: Path) -> None:
        outside = path.parent.with_name(OUTSIDE).read_bytes()
        path.with_name(DEAD).write_bytes(bytes(8) + outside[8:])
        beside(name, lambda link: link.symlink_to(f"../{to}"))(path)

    return edit


RUNNING = ".hashtap-extracting"
LINKS = {
    f"a link out called {name}": Attack(led_out(name), "")
    for name in (
        DEAD.removesuffix(PARTIAL_SUFFIX) + TORN_SUFFIX,
        *(f"{name}{PARTIAL_SUFFIX}" for name in (SET_ASIDE_NAME, MANIFEST_NAME, QUARANTINE_NAME, CACHE_NAME)),
    )
}
LOCKS = {
    "a client's lock that leads out": Attack(led_out(RUNNING), "cannot lock .* Remove it"),
    "a client's lock that leads to what is not there": Attack(led_out(RUNNING, "new"), "cannot lock .* Remove it"),
    "a client's lock that is a folder": Attack(beside(RUNNING, Path.mkdir), "cannot lock .* Remove it"),
    "a client's lock that is a pipe": Attack(beside(RUNNING, os.mkfifo), ""),  # it locks as well as any file
}
WRITTEN = QUARANTINE | LINKS | LOCKS

BESIDE = IDENTITY | CACHE | LIES | MANIFEST | ASIDE | ORDER | SPOILT | NO_FILES | NAMES | WRITTEN
