"""Frames that lie, every checksum being right: what their headers say, and what their zstd frames hold."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import zstandard
from tests.attacks.attack import Attack
from tests.attacks.files import Edit
from tests.capture.tamper import Tampered

from hashtap_kernels.layout import HEADER_BYTES

__all__ = ["FRAMES", "SECTIONS", "section"]

FRAME = 1  # of the target; the first one holds the table


def field(name: str, value: int) -> Edit:
    def edit(path: Path) -> None:
        tampered = Tampered(path)
        tampered.fields(FRAME)[name] = value
        guards = {"header", "size", "sum", "trailer"} - {{"stored_bytes": "size", "stored_sum": "sum"}.get(name, "")}
        tampered.reseal(checks=guards)

    return edit


def section(change: Callable[[bytes], bytes]) -> Edit:
    """Another coded section in a frame of PLANES."""

    def edit(path: Path) -> None:
        tampered = Tampered(path)
        frame, fields = tampered.frames[FRAME].tobytes(), tampered.fields(FRAME)
        assert int(fields["codec"][0]) == 1
        end = HEADER_BYTES + int(fields["coded_bytes"][0])
        tokens, layers, hidden = (int(fields[name][0]) for name in ("tokens", "layers", "hidden"))
        behind = frame[end : end + tokens * layers * hidden + 16 * tokens]
        coded = change(frame[HEADER_BYTES:end])
        whole = frame[:HEADER_BYTES] + coded + behind
        tampered.frames[FRAME] = np.frombuffer(bytearray(whole + bytes(-len(whole) % 64)), np.uint8)
        tampered.fields(FRAME)["coded_bytes"] = len(coded)
        tampered.reseal()

    return edit


def plain(coded: bytes) -> bytes:
    return bytes(zstandard.ZstdDecompressor().decompress(coded))


def streamed(coded: bytes) -> bytes:
    stream = zstandard.ZstdCompressor().compressobj()
    return bytes(stream.compress(plain(coded)) + stream.flush())


def claims(size: int, descriptor: int = 0xE0) -> bytes:
    """Magic, a descriptor with an 8-byte content size, a window where it has one, that size, an empty last block."""
    window = b"" if descriptor & 0x20 else b"\xff"
    return bytes.fromhex("28b52ffd") + bytes([descriptor]) + window + size.to_bytes(8, "little") + b"\x01\x00\x00"


def claims_right(coded: bytes) -> bytes:
    """The size that belongs, a window of 2^41 bytes, and nothing behind it."""
    return claims(len(plain(coded)), 0xC0)


def run_of_zeros(coded: bytes) -> bytes:
    """More than it declares: a block that repeats one byte 128 KiB often, a thousand times."""
    block = ((131072 << 3) | 2).to_bytes(3, "little") + b"\0"
    return claims(len(plain(coded)))[:-3] + block * 1000 + ((1 << 3) | 3).to_bytes(3, "little") + b"\0"


CODE = "its zstd frame"

SECTIONS = {
    "a zstd frame that claims 2^40 bytes": Attack(section(lambda _: claims(1 << 40)), "declares 1099511627776 bytes"),
    "a zstd frame that claims 2^64 - 1 bytes": Attack(section(lambda _: claims((1 << 64) - 1)), CODE),
    "a zstd frame with a window of 2^41 bytes": Attack(section(claims_right), CODE),
    "a zstd frame that grows": Attack(section(run_of_zeros), CODE),
    "a cut zstd frame": Attack(section(lambda coded: coded[:-1]), CODE),
    "half a zstd frame": Attack(section(lambda coded: coded[: len(coded) // 2]), CODE),
    "five bytes of a zstd frame": Attack(section(lambda coded: coded[:5]), CODE),
    "two zstd frames": Attack(section(lambda coded: coded + zstandard.compress(b"")), CODE),
    "a zstd frame and junk": Attack(section(lambda coded: coded + b"7 bytes"), CODE),
    "a zstd frame and one to skip": Attack(section(lambda c: c + bytes.fromhex("502a4d18 03000000 000000")), CODE),
    "only a zstd frame to skip": Attack(section(lambda _: bytes.fromhex("502a4d18 03000000 000000")), CODE),
    "a zstd frame without a size": Attack(section(streamed), CODE),
    "a zstd frame that wants a dictionary": Attack(section(lambda c: with_dictionary(c)), CODE),
    "zstd of another size": Attack(section(lambda coded: zstandard.compress(plain(coded)[:-1])), CODE),
    "no zstd at all": Attack(section(lambda coded: b"x" * len(coded)), CODE),
}


def with_dictionary(coded: bytes) -> bytes:
    values = plain(coded)
    dictionary = zstandard.ZstdCompressionDict(values[:4096], dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    data = zstandard.ZstdCompressor(dict_data=dictionary).compress(values)
    # A raw dictionary has no id: give the frame one.
    return bytes(data[:4] + bytes([data[4] | 3]) + data[5:7] + (77).to_bytes(4, "little") + data[7:])


LIES, NOT = "contradicts itself", "cannot have"

FRAMES = {
    f"a frame with {name} {value:#x}": Attack(field(name, value), reason)
    for name, value, reason in (
        ("magic", 0, "does not begin with HASHTAP1"),
        ("version", 2, "has version 2, and this hashtap reads 1"),
        ("header_bytes", 64, "has version 1"),
        ("dtype", 9, "9 is not a valid Dtype"),
        ("dtype", 3, "PLANES of FP32|cannot have|contradicts"),
        ("payload", 3, "3 is not a valid Payload"),
        ("payload", 0, LIES),
        ("payload", 2, LIES),
        ("layers", 0, "0 layers"),
        ("layers", 9, "9 layers"),
        ("hidden", 0, "hidden size 0"),
        ("hidden", 1 << 31, "hidden size 2147483648"),
        ("hidden", 16384, NOT),
        ("tokens", 0, LIES),
        ("tokens", 257, LIES),
        ("tokens", 0xFFFFFFFF, LIES),
        ("tokens", 6, NOT),
        ("first_position", 0xFFFFFFFF, LIES),
        ("total_tokens", 1, LIES),
        ("table", 0, LIES),
        ("table", 5, "not the one that the index says"),
        ("serial", 99, "not the one that the index says"),
        ("unused", 1, "that this format reserves"),
        ("codec", 2, NOT),
        ("codec", 0, NOT),
        ("coded_bytes", 0, NOT),
        ("coded_bytes", 0xFFFFFFFF, NOT),
        ("stored_bytes", 1 << 60, "says that it has"),
        ("stored_bytes", 0, "says that it has"),
        ("stored_sum", 0, "checksum is wrong"),
    )
}
