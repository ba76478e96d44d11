"""The gather in plain NumPy: the definition that the kernel is compared with, and what a CPU server runs."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from hashtap_kernels.contract import Buffer, check_batch, check_table
from hashtap_kernels.layout import FRAME_VERSION, HEADER, HEADER_BYTES, MAGIC, Geometry, Payload
from hashtap_kernels.plan import KEY0, KEY1, OFFSET, POSITIONS, ROW, SERIAL, TOKENS, FramePlan
from hashtap_kernels.planes import to_planes
from hashtap_kernels.proof import header_check, row_sums, table_id, tokens_proof

__all__ = ["gather_reference"]

U8Array = npt.NDArray[np.uint8]
U64Array = npt.NDArray[np.uint64]


def gather_reference(
    sources: Sequence[torch.Tensor],
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    plan: FramePlan,
    out: Buffer,
    *,
    geometry: Geometry,
    seed: tuple[int, int],
    table: U8Array | None,
    forward: int,
) -> None:
    """Gather the planned rows of all layers into frames.

    Args:
        sources: L CPU tensors ``[>= rows, H]`` of the geometry's dtype, stride 1 along a row. A packed ``[T, 3H]``
            is passed as three column views.
        input_ids: int64 ``[>= rows]``, the token ids that the forward consumed.
        positions: int64 ``[>= rows]``, the positions that it consumed.
        plan: what to write; nothing else of ``out`` is touched, and no row that it does not name is read.
        out: uint8 ``[>= plan.bytes]``.
        geometry: L, H and dtype.
        seed: the run's two 64-bit numbers, see :func:`~.proof.tokens_proof`.
        table: reference exponents, uint8 ``[L, H]``, for a PLANES payload; None for RAW.
        forward: number of the forward pass.

    Raises:
        TypeError, ValueError: when the arguments do not fit, see :mod:`~.contract`.
    """
    check_batch(sources, input_ids, positions, plan, out, geometry)
    if table is not None:
        check_table(table, geometry)
    if not plan.rows:
        return
    words = [source.view(torch.int64).numpy().view(np.uint64) for source in sources]
    target = out.numpy() if isinstance(out, torch.Tensor) else out
    common = np.zeros((), HEADER)
    common["magic"] = MAGIC
    common["version"] = FRAME_VERSION
    common["header_bytes"] = HEADER_BYTES
    common["dtype"] = geometry.dtype
    common["payload"] = Payload.RAW if table is None else Payload.PLANES
    common["layers"] = geometry.layers
    common["hidden"] = geometry.hidden
    common["table"] = 0 if table is None else table_id(table)
    common["forward"] = forward
    for descriptor, size in zip(plan.descriptors, plan.frame_bytes, strict=True):
        row, tokens, offset = (int(descriptor[column]) for column in (ROW, TOKENS, OFFSET))
        rows = slice(row, row + tokens)
        frame = target[offset : offset + int(size)]
        _write_header(frame, descriptor, common, input_ids[rows].numpy(), positions[rows].numpy(), seed)
        _write_body(frame[HEADER_BYTES:], descriptor, [layer[rows] for layer in words], geometry, table)


def _write_header(
    frame: U8Array,
    descriptor: npt.NDArray[np.int64],
    common: npt.NDArray[np.void],
    token_ids: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    seed: tuple[int, int],
) -> None:
    header = common.copy()
    words = header.reshape(1).view(np.uint64)
    bits = descriptor.view(np.uint64)
    header["tokens"] = len(token_ids)
    words[3] = bits[POSITIONS]
    header["serial"] = bits[SERIAL]
    header["key"] = bits[KEY0 : KEY1 + 1]
    header["proof"] = tokens_proof(token_ids, positions, seed)
    header["self_check"] = header_check(words)
    frame[:HEADER_BYTES] = words.view(np.uint8)


def _write_body(
    body: U8Array,
    descriptor: npt.NDArray[np.int64],
    layers: list[U64Array],
    geometry: Geometry,
    table: U8Array | None,
) -> None:
    """Write payload, row sums and padding; ``layers`` are the frame's rows as words, L arrays ``[n, W]``."""
    tokens = len(layers[0])
    shape = (tokens, geometry.layers, geometry.hidden)
    payload, tail = np.split(body, [tokens * geometry.row_bytes])
    if table is None:
        rows = payload.view(np.uint64).reshape(tokens, geometry.layers, -1)
        np.stack(layers, axis=1, out=rows)
    else:
        rows = np.stack(layers, axis=1)
        exponents, rests = payload.reshape(2, *shape)
        to_planes(rows.view(np.uint16), table, exponents, rests)
    # The row sums are keyed with the positions that the header states; the proof tells whether the forward agreed.
    first_position = int(descriptor[POSITIONS]) & 0xFFFFFFFF
    sums = row_sums(rows, np.arange(first_position, first_position + tokens))
    tail[: sums.nbytes] = sums.view(np.uint8)
    tail[sums.nbytes :] = 0
