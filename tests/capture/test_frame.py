import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
import xxhash
from tests.capture.build import GEOMETRY, SEED, TORCH_DTYPE, States, states_of

from hashtap.codec import Codec
from hashtap.errors import FormatError
from hashtap.exponents import TableBuilder
from hashtap.frame import (
    NUMPY_DTYPE,
    StoredFrame,
    Table,
    payload_values,
    store_frame,
    store_table,
    stored_bytes_limit,
)
from hashtap.header import Header, parse_header
from hashtap.identity import prompt_key
from hashtap_kernels.layout import HEADER, HEADER_BYTES, Dtype, Geometry, Payload
from hashtap_kernels.plan import Piece, plan_frames
from hashtap_kernels.proof import header_check, row_sums, table_id
from hashtap_kernels.reference import gather_reference

GOLDEN = Path(__file__).parent.parent / "golden"
IDS = [11, 22, 33, 44, 55, 66, 77]


def kernel_frame(states: States, geometry: Geometry = GEOMETRY, table: Table | None = None) -> npt.NDArray[np.uint8]:
    """The frame of a prompt of at most 256 tokens, whose ids are IDS over and over."""
    ids = np.resize(np.array(IDS), len(states))
    plan = plan_frames([Piece(0, len(states), 0, len(states), 9, prompt_key(ids))], geometry)
    frame = np.zeros(plan.bytes + 64, np.uint8)
    frame = frame[-frame.ctypes.data % 64 :][: plan.bytes]
    rows = torch.from_numpy(states).view(TORCH_DTYPE[geometry.dtype])
    sources = [rows[:, layer] for layer in range(geometry.layers)]
    ids_tensor, positions = torch.from_numpy(ids), torch.arange(len(states))
    gather_reference(sources, ids_tensor, positions, plan, frame, geometry=geometry, seed=SEED, table=table, forward=5)
    return frame


def stored(frame: npt.NDArray[np.uint8], codec: Codec = Codec.ZSTD) -> tuple[Header, npt.NDArray[np.uint8]]:
    header = parse_header(frame)
    completed, pieces = store_frame(frame, header, np.resize(np.array(IDS), header.tokens), 0, codec)
    return completed, np.frombuffer(b"".join(pieces), np.uint8)


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("tokens", [1, 2, 7, 255, 256])
@pytest.mark.parametrize(
    ("dtype", "planes"), [*((dtype, False) for dtype in Dtype), (Dtype.BF16, True), (Dtype.FP16, True)]
)
def test_there_and_back(tokens: int, dtype: Dtype, planes: bool, codec: Codec) -> None:
    geometry = Geometry(3, 40, dtype)
    states = states_of(range(tokens), geometry)
    table = np.random.default_rng(1).integers(0, 256, (3, 40), np.uint8) if planes else None

    header, data = stored(kernel_frame(states, geometry, table), codec)
    frame = StoredFrame.parse(data)

    assert frame.header == header
    assert (header.payload, header.tokens, header.geometry) == (Payload(planes), tokens, geometry)
    assert len(data) % 64 == 0
    assert len(data) <= stored_bytes_limit(geometry, tokens)
    assert frame.token_ids.tolist() == np.resize(IDS, tokens).tolist()
    assert (frame.row_sums == row_sums(states.view(np.uint64), np.arange(tokens))).all()
    values = np.full(states.shape, 7, NUMPY_DTYPE[dtype])
    frame.values(values, table)
    assert values.tobytes() == states.tobytes()


@pytest.mark.parametrize(("dtype", "planes"), [(Dtype.FP32, False), (Dtype.BF16, False), (Dtype.FP16, True)])
def test_block_after_block(dtype: Dtype, planes: bool) -> None:
    geometry = Geometry(3, 4104, dtype)
    states = states_of(range(37), geometry)
    table = np.random.default_rng(1).integers(0, 256, (3, 4104), np.uint8) if planes else None
    _, data = stored(kernel_frame(states, geometry, table))
    starts, blocks = [], []
    for start, values in StoredFrame.parse(data).value_blocks(table):
        assert values.dtype == NUMPY_DTYPE[dtype]
        starts.append(start)
        blocks.append(values.copy())
    assert len(starts) > 3
    assert starts == np.cumsum([0, *(len(block) for block in blocks[:-1])]).tolist()
    assert np.concatenate(blocks).tobytes() == states.tobytes()


@pytest.mark.parametrize("planes", [False, True])
def test_values_that_a_cast_would_lose(planes: bool) -> None:
    special = torch.tensor([1e5, 3e38, -3e38, 0.0, -0.0, 9.2e-41, -9.2e-41, float("inf")], dtype=torch.bfloat16)
    states = special.repeat(5, 2, 3).view(torch.int16).numpy().view(np.uint16)
    states[2, 1, 7] = 0x7FC1  # a NaN with a payload
    geometry = Geometry(2, 24)
    table = np.full((2, 24), 133, np.uint8) if planes else None
    assert (states[0, 0, 5], states[0, 0, 4]) == (1, 0x8000)

    frame = StoredFrame.parse(stored(kernel_frame(states, geometry, table))[1])
    values = np.zeros_like(states)
    frame.values(values, table)

    assert (values == states).all()


def test_real_states_shrink_to_two_thirds() -> None:
    """SmolLM2's states; 1.504 is the limit of this class of coder."""
    data = (GOLDEN / "smollm2_states.safetensors").read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    states = np.frombuffer(bytearray(data[begin:]), np.uint16).reshape(
        json.loads(data[8:begin])["hidden_states"]["shape"]
    )
    geometry = Geometry(4, 576)
    builder = TableBuilder(geometry, rows=256)
    builder.observe(states)

    _, with_table = stored(kernel_frame(states[:256], geometry, builder.table))
    _, raw = stored(kernel_frame(states[:256], geometry))

    raw_bytes = 256 * geometry.row_bytes
    assert 1.47 < raw_bytes / len(with_table) < 1.504
    assert 1.1 < raw_bytes / len(raw) < 1.3


def test_a_table() -> None:
    table = np.random.default_rng(0).geometric(0.3, (4, 72)).astype(np.uint8)
    header, pieces = store_table(table, GEOMETRY, Codec.ZSTD)
    frame = StoredFrame.parse(np.frombuffer(b"".join(pieces), np.uint8))

    assert (header.payload, header.tokens, header.table) == (Payload.TABLE, 0, table_id(table))
    assert (frame.table() == table).all()
    assert len(frame.token_ids) == len(frame.row_sums) == 0


def test_a_table_that_is_not_the_one_it_names() -> None:
    _, pieces = store_table(np.zeros((4, 72), np.uint8), GEOMETRY, Codec.STORED)
    data = np.frombuffer(b"".join(pieces), np.uint8).copy()
    data[HEADER_BYTES] = 1
    frame = StoredFrame.parse(resealed(data))
    with pytest.raises(FormatError, match="does not hold the table"):
        frame.table()


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("planes", [False, True])
def test_every_flipped_bit_is_noticed(planes: bool, codec: Codec) -> None:
    geometry = Geometry(2, 16)
    states = np.tile(states_of(range(1), geometry), (7, 1, 1))
    table = np.full((2, 16), 120, np.uint8) if planes else None
    data = stored(kernel_frame(states, geometry, table), codec)[1].copy()
    StoredFrame.parse(data)
    for position in range(len(data)):
        for bit in range(8):
            data[position] ^= 1 << bit
            with pytest.raises(FormatError):
                StoredFrame.parse(data)
            data[position] ^= 1 << bit


@pytest.mark.parametrize("length", [0, 1, 127, 128, 129, 64, 320, -64, -1])
def test_a_cut_frame(length: int) -> None:
    data = stored(kernel_frame(states_of(IDS)))[1]
    with pytest.raises(FormatError, match="a frame"):
        StoredFrame.parse(data[:length])


def test_planes_of_a_type_that_has_none() -> None:
    data = stored(kernel_frame(states_of(IDS, geometry := Geometry(2, 16, Dtype.FP32)), geometry))[1].copy()
    fields = data[:HEADER_BYTES].view(HEADER)
    fields["payload"], fields["table"] = Payload.PLANES, 77
    with pytest.raises(FormatError, match="PLANES of FP32"):
        StoredFrame.parse(resealed(data))


def test_a_kernel_frame_is_read_where_it_lies() -> None:
    states = states_of(IDS)
    table = np.full((4, 72), 120, np.uint8)
    for frame in (kernel_frame(states), kernel_frame(states, table=table)):
        header = parse_header(frame)
        payload = frame[HEADER_BYTES : HEADER_BYTES + states.nbytes]
        for rows in ([0, 1, 2], [1], [len(IDS) - 1, 0]):
            assert payload_values(payload, header, table, np.array(rows)).tobytes() == states[rows].tobytes()


def resealed(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """``data`` with its self-check and stored sum made right."""
    fields = data[:HEADER_BYTES].view(HEADER)
    fields["self_check"] = header_check(data[:HEADER_BYTES].view("<u8"))
    fields["stored_sum"] = 0
    fields["stored_sum"] = xxhash.xxh3_64_intdigest(data.tobytes())
    return data
