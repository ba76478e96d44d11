"""Other files of a capture directory: its identity, the index cache, the manifest, what a dead writer left, names."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import xxhash
from tests.attacks.attack import OUTSIDE, TARGET, Attack
from tests.attacks.files import Edit, trap

from hashtap.directory import IDENTITY_FILE
from hashtap.index_cache import CACHE_NAME, identity_of, store_cache
from hashtap.manifest import MANIFEST_NAME
from hashtap.shard import INDEX_COLUMNS, read_shard

__all__ = ["BESIDE", "IDENTITY", "LIES", "MANIFEST"]


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


def lying(**lies: object) -> Edit:
    """A whole cache that knows the files, and lies of the target: of an attribute, or of a column of its index."""

    def edit(path: Path) -> None:
        shards = {shard: (identity_of(shard), read_shard(shard)) for shard in path.parent.glob("*.safetensors")}
        identity, shard = shards[path.with_name(TARGET)]
        index = shard.index.copy()
        for name in set(INDEX_COLUMNS) & lies.keys():
            index[:, INDEX_COLUMNS.index(name)] = lies[name]
        attributes = {name: value for name, value in lies.items() if name not in INDEX_COLUMNS}
        shards[shard.path] = (identity, replace(shard, index=index, **attributes))
        store_cache(path.parent, shards)

    return edit


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
        ("frames_at", -8),
        ("frames_bytes", 1 << 60),
        ("file_bytes", -1),
    )
}

MANIFEST = {
    f"a manifest that {name}": Attack(beside(MANIFEST_NAME, make), "cannot read the manifest")
    for name, make in (
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
        ("a draft of a recovery", beside(".a-good.safetensors.x.recovering", filled(b"x"))),
    )
}

BESIDE = IDENTITY | CACHE | LIES | MANIFEST | NAMES
