import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from tests.capture.build import GEOMETRY, Host, facts, states_of

from hashtap.errors import FormatError, UsageError
from hashtap.facts import ShardFacts
from hashtap.header import salt_sum
from hashtap.shard import (
    HEADER_LIMIT_BYTES,
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
    assert message.endswith("move it away, start the server anew and run hashtap extract again")


def test_every_length_short_of_the_whole(path: Path) -> None:
    size = path.stat().st_size
    for length in range(size - 1, -1, -97):
        os.truncate(path, length)
        refused(path, "cut off|it has .* bytes where its header describes")


def test_a_header_that_was_never_patched(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(4096))
    refused(path, "its writer did not finish")
