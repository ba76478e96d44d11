"""Batches to gather, and their frames built a second time: byte by byte, in Python's own integers."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hashtap_kernels.contract import TORCH_DTYPE
from hashtap_kernels.layout import Dtype, Geometry
from hashtap_kernels.plan import FramePlan, Piece, plan_frames

POISON = 0xA5
MARGIN = 192
SEED = (0x0123456789ABCDEF, 0xFEDCBA9876543210)
FORWARD = 0x1_0000_0007
MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Request:
    """One request's share of a batch: ``tokens`` rows after ``prefix`` earlier ones, ``rest`` still to come."""

    tokens: int
    prefix: int = 0
    rest: int = 0
    captured: bool = True


@dataclass(frozen=True)
class Batch:
    geometry: Geometry
    sources: list[torch.Tensor]
    input_ids: torch.Tensor
    positions: torch.Tensor
    pieces: list[Piece]
    plan: FramePlan


def make_batch(
    geometry: Geometry, requests: Sequence[Request], form: str = "list", pad_rows: int = 3, seed: int = 0
) -> Batch:
    """A batch of random bit patterns (NaN and inf among them), ``pad_rows`` rows longer than its requests.

    ``form``: "list" of L tensors, "packed" (aux layers as columns of one tensor) or "strided" (rows of a wider buffer).
    """
    rng = np.random.default_rng(seed)
    L, H = geometry.layers, geometry.hidden
    rows = sum(request.tokens for request in requests) + pad_rows
    if form == "packed" and L > 1:
        aux, final = _random(rng, rows, (L - 1) * H, geometry.dtype), _random(rng, rows, H, geometry.dtype)
        sources = [*(aux[:, layer * H : (layer + 1) * H] for layer in range(L - 1)), final]
    elif form == "strided":
        sources = [_random(rng, rows, H + 32 + 16 * layer, geometry.dtype)[:, 16 : 16 + H] for layer in range(L)]
    else:
        sources = [_random(rng, rows, H, geometry.dtype) for _ in range(L)]
    ids = rng.integers(0, 1 << 40, rows)
    positions = np.full(rows, 1 << 50)
    pieces, row = [], 0
    for number, request in enumerate(requests):
        positions[row : row + request.tokens] = request.prefix + np.arange(request.tokens)
        if request.captured and request.tokens:
            total = request.prefix + request.tokens + request.rest
            key = rng.bytes(16)
            pieces.append(Piece(row, request.tokens, request.prefix, total, (1 << 63) + number, key))
        row += request.tokens
    plan = plan_frames(pieces, geometry)
    return Batch(geometry, sources, torch.from_numpy(ids), torch.from_numpy(positions), pieces, plan)


def make_table(geometry: Geometry, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (geometry.layers, geometry.hidden), np.uint8)


def poisoned(size: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """A poisoned buffer and the ``size`` bytes in its middle that may be written."""
    whole = np.full(size + 2 * MARGIN, POISON, np.uint8)
    return whole, whole[MARGIN : MARGIN + size]


def margins_untouched(whole: npt.NDArray[np.uint8]) -> bool:
    return bool((whole[:MARGIN] == POISON).all() and (whole[-MARGIN:] == POISON).all())


def expected_frames(batch: Batch, table: npt.NDArray[np.uint8] | None, table_id: int) -> bytes:
    """What the frames of ``batch`` must be, one behind the other."""
    frames = []
    for piece in batch.pieces:
        starts = range(0, piece.tokens, 256)
        frames += [_frame(batch, piece, s, min(256, piece.tokens - s), table, table_id) for s in starts]
    return b"".join(frames)


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def proof(ids: Sequence[int], positions: Sequence[int], seed: tuple[int, int]) -> tuple[int, int]:
    lanes = [0, 0]
    for token, position in zip(ids, positions, strict=True):
        x = (position << 32 | token & 0xFFFFFFFF) & MASK
        lanes[0] += mix((x + seed[0]) & MASK)
        lanes[1] += mix((x * 0xD6E8FEB86659FD93) & MASK ^ seed[1])
    return lanes[0] & MASK, lanes[1] & MASK


def row_sum(layers: Sequence[bytes], position: int) -> int:
    """The checksum of one token row, given the bytes of its layers."""
    total = 0
    for layer, row in enumerate(layers):
        words = sum(struct.unpack(f"<{len(row) // 8}Q", row)) & MASK
        total += mix(words ^ ((position * 8 + layer + 1) * 0x9E3779B97F4A7C15) & MASK)
    return total & MASK


def check_word(words: Sequence[int]) -> int:
    return sum(mix((word + i * 0x9E3779B97F4A7C15 + 1) & MASK) for i, word in enumerate(words[:11])) & MASK


def _frame(batch: Batch, piece: Piece, start: int, n: int, table: npt.NDArray[np.uint8] | None, table_id: int) -> bytes:
    geometry = batch.geometry
    rows = range(piece.row + start, piece.row + start + n)
    values = [[source[row].view(torch.uint8).numpy().tobytes() for source in batch.sources] for row in rows]
    first = piece.first_position + start
    lanes = proof([int(batch.input_ids[r]) for r in rows], [int(batch.positions[r]) for r in rows], SEED)
    payload_kind = 0 if table is None else 1
    head = struct.pack("<8sHHBBH", b"HASHTAP1", 1, 128, geometry.dtype, payload_kind, geometry.layers)
    head += struct.pack("<IIIIQ16s", geometry.hidden, n, first, piece.total_tokens, piece.serial, piece.key)
    head += struct.pack("<QQQQ", *lanes, table_id, FORWARD)
    check = check_word(struct.unpack("<11Q", head))
    body = b"".join(b"".join(layers) for layers in values) if table is None else _planes(values, table)
    sums = struct.pack(f"<{n}Q", *(row_sum(layers, first + i) for i, layers in enumerate(values)))
    frame = head + bytes(32) + struct.pack("<Q", check) + body + sums
    return frame + bytes(-len(frame) % 64)


def _planes(values: list[list[bytes]], table: npt.NDArray[np.uint8]) -> bytes:
    exponents, rests = bytearray(), bytearray()
    for layers in values:
        for layer, row in enumerate(layers):
            for channel, (bits,) in enumerate(struct.iter_unpack("<H", row)):
                rotated = (bits << 1 | bits >> 15) & 0xFFFF
                exponents.append(((rotated >> 8) - int(table[layer, channel])) % 256)
                rests.append(rotated & 0xFF)
    return bytes(exponents + rests)


def _random(rng: np.random.Generator, rows: int, columns: int, dtype: Dtype) -> torch.Tensor:
    tensor = torch.empty((rows, columns), dtype=TORCH_DTYPE[dtype])
    bits = tensor.view(torch.uint8).numpy()
    bits[:] = rng.integers(0, 256, bits.shape, np.uint8)
    return tensor
