import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import xxhash
from tests.capture.build import GEOMETRY, Host, facts, states_of
from tests.capture.tamper import Tampered

from hashtap.errors import FormatError, UsageError
from hashtap.facts import ShardFacts
from hashtap.header import salt_sum
from hashtap.shard import (
    HEADER_LIMIT_BYTES,
    Shard,
    encode_header,
    read_shard,
    reserved_bytes,
)
from hashtap_kernels.layout import Dtype, Geometry

PROMPTS = [[1, 2, 3], list(range(300)), [7]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A sealed shard: RAW frames, a table, PLANES frames, three records."""
    with Host(tmp_path, table_rows=250) as host:
        host.capture(PROMPTS[:1])
        host.writer.drain()
        host.capture(PROMPTS[1:2], chunk=256)
        # The table exists now.
        wait_for(lambda: host.tables.table is not None)
        host.capture(PROMPTS[2:])
    return host.directory.shards()[-1]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize(
    "value",
    [
        facts(),
        facts(Geometry(1, 8, Dtype.FP8_E4M3), final_norm="pre", rank=7),
        facts(
            Geometry(8, 16384, Dtype.FP32),
            model="Kimi “K2.5”\n",
            epoch="",
            seed=((1 << 64) - 1, 0),
            server_flags={"a": [1, None, {"b": 2.5}], "layout": "x"},
        ),
    ],
)
def test_facts_there_and_back(value: ShardFacts) -> None:
    metadata = value.to_metadata()
    assert all(isinstance(text, str) for text in metadata.values())
    assert ShardFacts.from_metadata(metadata) == value


def test_facts_name_the_layers() -> None:
    value = facts(boundaries=(2, 15, 27))
    assert [value.layer_name(layer) for layer in range(4)] == [
        "boundary 2",
        "boundary 15",
        "boundary 27",
        "final (post-norm)",
    ]
    assert facts(boundaries=(2, 15, 27), final_norm="pre").layer_name(3) == "final (pre-norm)"
    both = facts(boundaries=(2, 15), final_norm="both")
    assert [both.layer_name(layer) for layer in (2, 3)] == ["final (pre-norm)", "final (post-norm)"]


def test_facts_that_contradict_themselves() -> None:
    with pytest.raises(ValueError, match="are not 4 layers"):
        facts(boundaries=(2, 15))
    with pytest.raises(ValueError, match="are not 4 layers"):
        facts(boundaries=(2, 15, 27), final_norm="both")
    with pytest.raises(ValueError, match="final_norm is 'before', not one of post, pre, both"):
        facts(final_norm="before")


def test_facts_too_long_for_a_header() -> None:
    with pytest.raises(UsageError, match="shorten the server flags"):
        reserved_bytes(facts(server_flags={"chat_template": "x" * HEADER_LIMIT_BYTES}))


def test_room_is_reserved_for_any_header() -> None:
    reserved = reserved_bytes(facts())
    assert reserved % 4096 == 0
    assert 8 + len(encode_header(facts(), 10**14, 1 << 20, 1 << 20)) <= reserved


def test_safetensors_opens_it(path: Path) -> None:
    tensors = safetensors.numpy.load_file(path)
    shard = read_shard(path)
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()} == {
        "frames": (np.dtype("u1"), (shard.frames_bytes,)),
        "index": (np.dtype("u8"), (4, 8)),
        "records": (np.dtype("u8"), (2, 12)),
        "trailer": (np.dtype("u8"), (2,)),
    }
    assert (tensors["index"] == shard.index).all()
    assert (tensors["records"] == shard.records).all()
    with safetensors.safe_open(path, "numpy") as file:
        assert ShardFacts.from_metadata(file.metadata()) == shard.facts
        assert file.metadata()["hashtap.layout"] == "token,layer,hidden"


def test_a_shard_is_little_more_than_its_states(tmp_path: Path) -> None:
    """Not the buffer that its frames were cut from."""
    with Host(tmp_path) as host:
        host.capture([[1, 2, 3, 4, 5], *([n] * 700 for n in range(3))])
    (path,) = host.directory.shards()
    raw_bytes = (5 + 3 * 700) * GEOMETRY.row_bytes
    assert path.stat().st_size < 1.05 * raw_bytes + 8192


def test_a_header_is_small_however_many_the_records(tmp_path: Path) -> None:
    geometry = Geometry(1, 8)
    with Host(tmp_path, geometry) as host:
        states = states_of([1], geometry)
        host.forward([(host.record([n]), states, 0, 1) for n in range(4000)])
    (path,) = host.directory.shards()
    assert len(read_shard(path).records) == 4000
    assert int.from_bytes(path.read_bytes()[:8], "little") == 4088


def test_salts_are_told_from_none() -> None:
    assert salt_sum(b"") == 0
    assert salt_sum(b'{"lora":"ad1"}') not in (0, salt_sum(b'{"lora":"ad2"}'))


def refused(path: Path, reason: str) -> None:
    with pytest.raises(FormatError, match=reason) as caught:
        read_shard(path)
    message = str(caught.value)
    assert message.startswith(f"{path} is no valid shard: ")
    assert message.endswith("Restore it from a copy, or move it away and capture its samples again")


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 100, 4095, 4096, 0.5, -1, -16, -17])
def test_a_cut_shard(path: Path, cut: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * cut) if cut == 0.5 else int(cut)])
    refused(path, "cut off|it has .* bytes where its header describes")


def test_every_length_short_of_the_whole(path: Path) -> None:
    size = path.stat().st_size
    for length in range(size - 1, -1, -97):
        os.truncate(path, length)
        refused(path, "cut off|it has .* bytes where its header describes")


def test_trailing_junk(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"7 bytes")
    refused(path, "it has .* bytes where its header describes")


def test_a_header_that_was_never_patched(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(4096))
    refused(path, "its writer did not finish")


def test_every_flipped_bit_outside_frames_is_noticed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    shard = read_shard(path)
    frames = range(shard.frames_at, shard.frames_at + shard.frames_bytes)
    with path.open("r+b", buffering=0) as file:
        for position in (position for position in range(len(data)) if position not in frames):
            file.seek(position)
            file.write(bytes([data[position] ^ 1 << position % 8]))
            with pytest.raises(FormatError):
                read_shard(path)
            file.seek(position)
            file.write(data[position : position + 1])
    read_shard(path)


def test_files_that_are_not_shards(path: Path, tmp_path: Path) -> None:
    good = path.read_bytes()
    path.write_bytes(b"PK\x03\x04 not a shard at all")
    refused(path, "its header claims")
    path.write_bytes(np.random.default_rng(0).bytes(9000))
    refused(path, "its header claims")
    safetensors.numpy.save_file({"x": np.zeros(3)}, path)
    refused(path, "a safetensors file, but not hashtap's")
    safetensors.numpy.save_file({"x": np.zeros(3)}, path, {"format": "pt"})
    refused(path, "a safetensors file, but not hashtap's")
    path.unlink()
    path.mkdir()
    refused(path, "not a regular file")
    path.rmdir()
    os.mkfifo(path)
    refused(path, "not a regular file")
    path.unlink()
    refused(path, "No such file")
    (tmp_path / "elsewhere").write_bytes(good)
    path.symlink_to(tmp_path / "elsewhere")
    refused(path, "symbolic link")


def with_header(path: Path, text: bytes) -> None:
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[begin:])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "never written"),
        (b"{", "no JSON"),
        (b"\xff" * 40, "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "no JSON object"),
        (b"7", "no JSON object"),
        (b"{}", "not hashtap's"),
        (b'{"__metadata__":7}', "not hashtap's"),
        (b'{"__metadata__":{"a":1}}', "not hashtap's"),
        (b'{"__metadata__":{"hashtap.format":"1"}}', "its facts are damaged"),
        (b'{"__metadata__":{"hashtap.format":"2"}}', "written in format '2' and this hashtap reads 1"),
        (b" " * (HEADER_LIMIT_BYTES + 1), "over the limit"),
    ],
)
def test_hostile_headers(path: Path, text: bytes, reason: str) -> None:
    with_header(path, text)
    refused(path, reason)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("index", "shape", [1 << 61, 8]),
        ("index", "shape", [-1, 8]),
        ("index", "shape", [4.0, 8]),
        ("index", "shape", [True, 8]),
        ("index", "shape", [4, 9]),
        ("index", "shape", []),
        ("index", "shape", 4),
        ("index", "dtype", "I64"),
        ("records", "shape", [1 << 61, 12]),
        ("frames", "shape", [1 << 62]),
        ("frames", "data_offsets", [-1, 5]),
        ("trailer", "shape", [3]),
        ("extra", "shape", [3]),
    ],
)
def test_hostile_tensors(path: Path, name: str, field: str, value: object) -> None:
    tampered = Tampered(path)
    tampered.header.setdefault(name, {})[field] = value
    with_header(path, json.dumps(tampered.header).encode())
    refused(path, "its header|it claims|it has")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("layout", "layer,token,hidden"),
        ("boundaries", "7"),
        ("boundaries", "[1, 2]"),
        ("final_norm", "both"),
        ("layers", "9"),
        ("hidden", "1e9"),
        ("dtype", "bfloat17"),
        ("seed", "00"),
        ("seed", "x" * 32),
        ("versions", "7"),
        ("server_flags", "[" * 50_000),
    ],
)
def test_hostile_facts(path: Path, name: str, text: str) -> None:
    tampered = Tampered(path)
    tampered.header["__metadata__"][f"hashtap.{name}"] = text
    with_header(path, json.dumps(tampered.header).encode())
    refused(path, "its facts are damaged")


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


def test_resealing_alone_changes_nothing(path: Path) -> None:
    shard: Shard = read_shard(path)
    resealed_with(path, "index", 0, 0, 0)
    Tampered(path).reseal()
    assert (read_shard(path).index == shard.index).all()


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        (0, 64, "one behind the other"),
        (0, (1 << 64) - 64, "one behind the other"),
        (1, 0, "impossible size"),
        (1, 63, "impossible size"),
        (1, 1 << 40, "impossible size"),
        (1, (1 << 64) - 64, "impossible size"),
        (1, 64 * 3, "one behind the other"),
        (4, 0, "impossible number of tokens"),
        (4, 257 << 32, "impossible number of tokens"),
        (4, 200 << 32 | 0xFFFFFFFF, "past the last position"),
        (5, 12345, "lacks its table"),
        (6, 3, "unknown kind"),
        (6, 2 << 8, "unknown kind"),
        (6, 1, "lacks its table"),
        (6, 1 << 63, "unknown kind"),
    ],
)
def test_hostile_index(path: Path, column: int, value: int, reason: str) -> None:
    resealed_with(path, "index", 0, column, value)
    refused(path, reason)


def test_a_table_that_the_shard_does_not_hold(path: Path) -> None:
    shard = read_shard(path)
    planes = int(np.flatnonzero(shard.index[:, 6] & np.uint64(0xFF) == 1)[0])
    resealed_with(path, "index", planes, 5, 0xABC)
    refused(path, "the table 0000000000000abc, which it does not hold")


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        (3, 0, "impossible number of tokens"),
        (3, 1 << 32, "impossible number of tokens"),
        (6, 1 << 30, "impossible number of tokens"),
        (10, 1, "reserves"),
        (11, 1, "reserves"),
    ],
)
def test_hostile_records(path: Path, column: int, value: int, reason: str) -> None:
    resealed_with(path, "records", 0, column, value)
    refused(path, reason)
