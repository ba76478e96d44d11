"""Files that are no shard, are cut or joined, or whose header is a bomb."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from tests.attacks.attack import OUTSIDE, Attack
from tests.capture.tamper import Tampered

from hashtap.shard import HEADER_LIMIT_BYTES, MAX_FRAMES, encode_header, read_shard

__all__ = ["FACTS", "FILES", "HEADERS", "LENGTHS", "Edit", "trap"]

Edit = Callable[[Path], object]


class Trap:
    """Whoever unpickles it leaves a file behind."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, (self.path,)


def trap(path: Path) -> bytes:
    return pickle.dumps(Trap(str(path.parent.parent / "pickle-was-loaded")))


def holds(data: bytes) -> Edit:
    return lambda path: path.write_bytes(data)


def changed(change: Callable[[bytes], bytes]) -> Edit:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def instead(make: Callable[[Path], object]) -> Edit:
    """Something else under the shard's name."""

    def replace(path: Path) -> None:
        path.unlink()
        make(path)

    return replace


CUT = r"cut off|it has \d+ bytes where its header describes|never written"

FILES = {
    "empty": Attack(holds(b""), "cut off at 0 bytes"),
    "an archive": Attack(holds(b"PK\x03\x04 not a shard at all"), "its header claims"),
    "noise": Attack(holds(np.random.default_rng(0).bytes(9000)), "its header claims"),
    "a pickle": Attack(lambda path: path.write_bytes(trap(path)), "its header claims|cut off"),
    "a pickle in the header": Attack(lambda path: with_header(path, trap(path)), "no JSON"),
    "other tensors": Attack(lambda path: safetensors.numpy.save_file({"x": np.zeros(3)}, path), "but not hashtap's"),
    "other metadata": Attack(
        lambda path: safetensors.numpy.save_file({"x": np.zeros(3)}, path, {"format": "pt"}), "but not hashtap's"
    ),
    "a folder": Attack(instead(Path.mkdir), "not a regular file"),
    "a pipe": Attack(instead(os.mkfifo), "not a regular file"),
    "a link out of the directory": Attack(
        instead(lambda path: path.symlink_to(path.parent.parent / OUTSIDE)), "symbolic link"
    ),
    "a link upwards": Attack(instead(lambda path: path.symlink_to(f"../{OUTSIDE}")), "symbolic link"),
    "a link to itself": Attack(instead(lambda path: path.symlink_to(path)), "symbolic link"),
    "a link to nothing": Attack(instead(lambda path: path.symlink_to("nothing")), "symbolic link"),
    "a link to endless zeros": Attack(instead(lambda path: path.symlink_to("/dev/zero")), "symbolic link"),
    **{f"cut to {size}": Attack(changed(lambda data, size=size: data[:size]), CUT) for size in (1, 7, 8, 9, 100, 4096)},
    "cut in half": Attack(changed(lambda data: data[: len(data) // 2]), CUT),
    **{f"cut by {left}": Attack(changed(lambda data, left=left: data[:-left]), CUT) for left in (1, 16, 17, 100)},
    "junk behind": Attack(changed(lambda data: data + b"7 bytes"), "bytes where its header describes"),
    "junk in front": Attack(changed(lambda data: b"7 bytes" + data), "its header claims"),
    "twice in a row": Attack(changed(lambda data: data + data), "bytes where its header describes"),
    "a terabyte behind": Attack(lambda path: os.truncate(path, 1 << 40), "bytes where its header describes"),
    "a terabyte of zeros": Attack(
        instead(lambda path: (path.touch(), os.truncate(path, 1 << 40))), "its header was never written"
    ),
}


def length(value: int) -> Edit:
    return changed(lambda data: value.to_bytes(8, "little") + data[8:])


LENGTHS = {
    f"a header of {value:,} bytes": Attack(length(value), reason)
    for value, reason in (
        *((value, "over the limit") for value in (HEADER_LIMIT_BYTES + 1, 1 << 40, 1 << 63, (1 << 64) - 1)),
        (0, "never written"),
        (2, "no JSON"),
        (HEADER_LIMIT_BYTES, "inside its header"),
    )
}


def with_header(path: Path, text: bytes) -> None:
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[begin:])


def as_header(text: bytes) -> Edit:
    return lambda path: with_header(path, text)


def tensor(name: str, field: str, value: object) -> Edit:
    def edit(path: Path) -> None:
        header = Tampered(path).header
        header.setdefault(name, {})[field] = value
        with_header(path, json.dumps(header).encode())

    return edit


def most_frames(path: Path) -> None:
    """As many frames and records as there may be, in a file of zeros: no checksum was worked out."""
    frames_bytes = MAX_FRAMES * 128
    text = encode_header(read_shard(path).facts, frames_bytes, MAX_FRAMES, MAX_FRAMES)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + frames_bytes + MAX_FRAMES * (64 + 96) + 16)


def too_many_records(path: Path) -> None:
    """One frame, and a record more than there may be, in a file of zeros."""
    text = encode_header(read_shard(path).facts, 128, 1, MAX_FRAMES + 1)
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + 128 + 64 + (MAX_FRAMES + 1) * 96 + 16)


OTHER = "its header|it claims|it has"

HEADERS = {
    "an empty header": Attack(as_header(b""), "never written"),
    "half a brace": Attack(as_header(b"{"), "no JSON"),
    "no text": Attack(as_header(b"\xff" * 40), "no JSON"),
    "a tower of lists": Attack(as_header(b"[" * 100_000), "no JSON"),
    "a tower of objects": Attack(as_header(b'{"":' * 100_000), "no JSON"),
    "a number of 500,000 digits": Attack(as_header(b"1" * 500_000), "no JSON"),
    "half a million lists": Attack(as_header(b"[" + b"[]," * 340_000 + b"[]]"), "no JSON object", limit_mb=48),
    "a hundred thousand names": Attack(
        as_header(json.dumps({f"{n}": 0 for n in range(80_000)}).encode()), "but not hashtap's", limit_mb=32
    ),
    "a list": Attack(as_header(b"[]"), "no JSON object"),
    "a number": Attack(as_header(b"7"), "no JSON object"),
    "nothing in it": Attack(as_header(b"{}"), "not hashtap's"),
    "metadata that is a number": Attack(as_header(b'{"__metadata__":7}'), "not hashtap's"),
    "metadata that holds one": Attack(as_header(b'{"__metadata__":{"a":1}}'), "not hashtap's"),
    "facts that lack all": Attack(as_header(b'{"__metadata__":{"hashtap.format":"1"}}'), "its facts are damaged"),
    "the next format": Attack(as_header(b'{"__metadata__":{"hashtap.format":"2"}}'), "format '2' and this hashtap re"),
    **{
        f"{name} with {field} {value}": Attack(tensor(name, field, value), OTHER)
        for name, field, value in (
            *(("index", "shape", shape) for shape in ([1 << 61, 8], [-1, 8], [4.0, 8], [True, 8], [4, 9], [], 4)),
            ("index", "dtype", "I64"),
            ("records", "shape", [1 << 61, 12]),
            ("frames", "shape", [1 << 62]),
            ("frames", "data_offsets", [-1, 5]),
            ("frames", "data_offsets", [0, 1 << 40]),
            ("trailer", "shape", [3]),
            ("extra", "shape", [3]),
            ("../../tensor", "shape", [3]),
        )
    },
    "the most frames that there may be": Attack(most_frames, "its trailer is wrong", limit_mb=176),
    "more records than there may be": Attack(too_many_records, "it claims 1 frames and 1048577 records"),
}


def fact(name: str, text: str) -> Edit:
    def edit(path: Path) -> None:
        header = Tampered(path).header
        header["__metadata__"][f"hashtap.{name}"] = text
        with_header(path, json.dumps(header).encode())

    return edit


FACTS = {
    f"{name} {text[:20]!r}": Attack(fact(name, text), "its facts are damaged")
    for name, text in (
        ("layout", "layer,token,hidden"),
        ("boundaries", "7"),
        ("boundaries", "[1, 2]"),
        *(("boundaries", f"[2, 3, {value}]") for value in ("1e999", "1.5", "-1", "true", '"4"', 1 << 64, "9" * 5000)),
        ("final_norm", "neither"),
        ("layers", "9"),
        ("hidden", "1e9"),
        ("hidden", str(1 << 40)),
        ("dtype", "bfloat17"),
        ("seed", "00"),
        ("seed", "x" * 32),
        ("versions", "7"),
        ("server_flags", "[" * 50_000),
    )
}
