"""Captures put together by the restore kernel: the bits of the other way, and nothing around them is touched."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.capture.build import TORCH_DTYPE, Host, states_of

from hashtap import Reader
from hashtap.errors import FormatError
from hashtap.restored import Restorer
from hashtap_kernels.layout import Dtype, Geometry, Payload

PROMPTS = [list(range(length)) for length in (300, 1, 17, 600, 256)]
MARGIN = 4


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.fixture(params=[(3, 24, Dtype.BF16), (1, 72, Dtype.FP16), (2, 16, Dtype.FP32), (4, 8, Dtype.FP8_E4M3)], ids=str)
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> Reader:
    """Five prompts in chunks of 200; of the two-byte types the earlier frames RAW, the later ones PLANES."""
    geometry = Geometry(*request.param)
    with Host(tmp_path, geometry, table_rows=400 if geometry.dtype.element_bytes == 2 else 0) as host:
        for ids in PROMPTS:
            host.capture([ids], chunk=200)
            host.writer.drain()
    return Reader(tmp_path)


def test_the_same_bits_as_on_the_cpu(reader: Reader) -> None:
    geometry = reader.facts.geometry
    payloads = set()
    for ids in PROMPTS:
        capture = reader.by_token_ids(ids)
        whole = torch.full((len(ids) + 2 * MARGIN, geometry.layers, geometry.hidden), -1.0)
        whole = whole.to(TORCH_DTYPE[geometry.dtype])
        before = bits(whole[:MARGIN])
        capture.restore_into(whole[MARGIN:-MARGIN])
        assert bits(whole[MARGIN:-MARGIN]) == capture.hidden_states.tobytes() == states_of(ids, geometry).tobytes()
        assert bits(whole[:MARGIN]) == bits(whole[-MARGIN:]) == before
        payloads |= {frame.header.payload for _, frame in capture._frames()}
    two_bytes = geometry.dtype.element_bytes == 2
    assert payloads == ({Payload.RAW, Payload.PLANES} if two_bytes else {Payload.RAW})


def test_a_cuda_tensor_is_made_there(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the CPU in the GPU's place; the states in host memory are not even made."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, device="cpu", **more: empty(*shape, **more))
    capture = reader.by_token_ids(PROMPTS[3])
    states = capture.tensor("cuda:0")
    assert bits(states) == states_of(PROMPTS[3], reader.facts.geometry).tobytes()
    assert capture._hidden_states is None


@pytest.mark.parametrize("payload", [Payload.RAW, Payload.PLANES])
def test_the_first_rows_of_a_frame(tmp_path: Path, payload: Payload) -> None:
    """A record that shares its beginning with another ends inside a frame of it."""
    geometry = Geometry(1, 24)
    table = np.full((1, 24), 126, np.uint8) if payload is Payload.PLANES else None
    with Host(tmp_path, geometry, table=table) as host:
        host.capture([PROMPTS[2]])
    ((_, frame),) = Reader(tmp_path).by_token_ids(PROMPTS[2])._frames()
    out = torch.zeros((9, 1, 24), dtype=torch.bfloat16)
    Restorer(out, geometry).put(frame, 2, 5, table)
    assert frame.header.payload is payload
    assert bits(out[2:7]) == states_of(PROMPTS[2], geometry)[:5].tobytes()
    assert not out[:2].any()
    assert not out[7:].any()


def test_damage_is_named(tmp_path: Path) -> None:
    with Host(tmp_path) as host:
        host.capture([PROMPTS[2]])
    (shard,) = tmp_path.glob("*.safetensors")
    capture = Reader(tmp_path).by_token_ids(PROMPTS[2])
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(FormatError, match=rf"{shard.name}, frame 0 at byte \d+: .*checksum is wrong"):
        capture.restore_into(torch.zeros((17, 4, 72), dtype=torch.bfloat16))
