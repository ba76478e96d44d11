"""The header of a frame: its 128 bytes taken apart and checked."""

import struct
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import xxhash

from hashtap.errors import FormatError
from hashtap_kernels.layout import (
    FRAME_VERSION,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    MAX_FRAME_TOKENS,
    Dtype,
    Geometry,
    Payload,
)
from hashtap_kernels.proof import header_check

__all__ = ["Header", "parse_header", "salt_sum"]

_FIELDS = struct.Struct("<QHHBBHIIIIQ16sQQQQIB3sQQQQ")  # HEADER, as one call unpacks it
assert _FIELDS.size == HEADER.itemsize


@dataclass(frozen=True, slots=True)
class Header:
    """The 128 bytes at the start of a frame; field by field in ``hashtap_kernels.layout.HEADER``."""

    geometry: Geometry
    payload: Payload
    tokens: int
    first_position: int
    total_tokens: int
    serial: int
    key: bytes
    proof: tuple[int, int]
    table: int
    forward: int
    coded_bytes: int
    codec: int
    stored_bytes: int
    stored_sum: int
    salt_sum: int


def parse_header(frame: npt.NDArray[np.uint8]) -> Header:
    """Parse and check the header at the start of ``frame``.

    Raises:
        FormatError: when it is too short, no hashtap frame, of another version, fails its self-check or contradicts
            itself.
    """
    if len(frame) < HEADER_BYTES:
        raise FormatError(f"a frame of {len(frame)} bytes has no room for its header of {HEADER_BYTES}")
    words = _FIELDS.unpack_from(frame.data)
    magic, version, header_bytes, dtype, payload, layers, hidden, tokens, first_position, total_tokens = words[:10]
    serial, key, *proof, table, forward, coded_bytes, codec, unused, stored_bytes, frame_sum, salt, self_check = words[
        10:
    ]
    if magic != MAGIC:
        raise FormatError("a frame does not begin with HASHTAP1")
    if version != FRAME_VERSION or header_bytes != HEADER_BYTES:
        raise FormatError(f"a frame has version {version}, and this hashtap reads {FRAME_VERSION}")
    if self_check != header_check(frame[:HEADER_BYTES].view(np.uint64)):
        raise FormatError("a frame's header fails its self-check")
    if any(unused):
        raise FormatError("a frame's header uses bytes that this format reserves")
    try:
        header = Header(
            geometry=_geometry(layers, hidden, dtype),
            payload=Payload(payload),
            tokens=tokens,
            first_position=first_position,
            total_tokens=total_tokens,
            serial=serial,
            key=key,
            proof=(proof[0], proof[1]),
            table=table,
            forward=forward,
            coded_bytes=coded_bytes,
            codec=codec,
            stored_bytes=stored_bytes,
            stored_sum=frame_sum,
            salt_sum=salt,
        )
    except ValueError as error:
        raise FormatError(f"a frame's header holds {error}") from None
    _check(header)
    return header


@lru_cache(maxsize=16)
def _geometry(layers: int, hidden: int, dtype: int) -> Geometry:
    return Geometry(layers, hidden, Dtype(dtype))


def salt_sum(salt: bytes) -> int:
    """What is kept of a key's salt: 0 when it is empty, which makes the key recomputable; else a hash."""
    if not salt:
        return 0
    value: int = xxhash.xxh3_64_intdigest(salt)
    return value or 1


def _check(header: Header) -> None:
    payload, tokens = header.payload, header.tokens
    if payload is Payload.TABLE:
        right = tokens == 0 and header.table != 0
    else:
        right = 1 <= tokens <= MAX_FRAME_TOKENS and header.first_position + tokens <= header.total_tokens
        right = right and (header.table != 0) == (payload is Payload.PLANES)
    if not right or (payload is not Payload.RAW and header.geometry.dtype.element_bytes != 2):
        raise FormatError(
            f"a frame's header contradicts itself: {payload.name} of {header.geometry.dtype.name}, {tokens} tokens "
            f"from {header.first_position} of {header.total_tokens}, table {header.table:016x}"
        )
