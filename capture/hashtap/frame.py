"""A frame as it lies in a shard, and how it is made from the frame that the kernel wrote.

::

    header         128 bytes; the kernel's words as they are, words 11 to 13 filled in here
    coded section  RAW: the payload; PLANES: the exponent plane; TABLE: the table. As it is, or one zstd frame
    rest section   PLANES only: the rest plane as it is
    row sums       [n] uint64
    token ids      [n] int64
    padding        zeros, to a multiple of 64 bytes
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import xxhash

from hashtap.codec import Codec, compress, decompress
from hashtap.errors import FormatError
from hashtap.header import Header, parse_header
from hashtap_kernels.layout import (
    FRAME_ALIGN,
    FRAME_VERSION,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    Dtype,
    Geometry,
    Payload,
)
from hashtap_kernels.planes import from_planes
from hashtap_kernels.proof import header_check, table_id

__all__ = [
    "NUMPY_DTYPE",
    "Pieces",
    "StoredFrame",
    "Table",
    "payload_values",
    "store_frame",
    "store_table",
    "stored_bytes_limit",
]

U8Array = npt.NDArray[np.uint8]
U64Array = npt.NDArray[np.uint64]
Pieces = list[memoryview]
"""The bytes of a stored frame, to be written one behind the other; views wherever they can be."""
Table = U8Array
"""Reference exponents, uint8 ``[L, H]``."""

NUMPY_DTYPE: dict[Dtype, type[np.generic]] = {
    Dtype.BF16: np.uint16,
    Dtype.FP16: np.float16,
    Dtype.FP32: np.float32,
    Dtype.FP8_E4M3: np.uint8,
}
"""What NumPy holds the elements in; bfloat16 and float8 have no NumPy type, so theirs are the bit patterns."""

# What the writer fills in: coded bytes, codec, stored bytes, stored sum, salt sum.
_OWN_FIELDS = struct.Struct("<IB3xQQQ")
_OWN_FIELDS_AT = 88
_SUM_WORD = slice(13 * 8, 14 * 8)
_ZERO_WORD = bytes(8)
_BLOCK_BYTES = 1 << 18
_ROW_TAIL_BYTES = 16  # of each token row: its row sum and its token id


def payload_values(payload: U8Array, header: Header, table: Table | None, rows: npt.NDArray[np.int64]) -> U8Array:
    """The element values of some token rows of an uncoded payload, as bytes ``[rows, L, H * element bytes]``.

    PLANES are joined, and need their ``table``.
    """
    geometry = header.geometry
    if header.payload is Payload.RAW:
        return payload.reshape(header.tokens, geometry.layers, -1)[rows]
    assert table is not None
    planes = payload.reshape(2, header.tokens, geometry.layers, geometry.hidden)
    values = np.empty((len(rows), geometry.layers, geometry.hidden), np.uint16)
    from_planes(planes[0, rows], planes[1, rows], table, values)
    return values.view(np.uint8)


def store_frame(
    frame: U8Array, header: Header, token_ids: npt.NDArray[np.int64], salt_sum: int, codec: Codec
) -> tuple[Header, Pieces]:
    """The stored form of a kernel's frame: its completed header and the pieces to write one behind the other.

    Args:
        frame: the kernel's frame, uint8, at least header, payload and row sums long. Pieces are views of it.
        header: its parsed header.
        token_ids: int64 ``[n]``, the ids of the frame's tokens.
        salt_sum: of the prompt's key, see :func:`hashtap.header.salt_sum`.
        codec: what to try; a section that does not shrink is stored as it is.
    """
    payload_end = HEADER_BYTES + header.tokens * header.geometry.row_bytes
    coded_end = payload_end
    if header.payload is Payload.PLANES:
        coded_end = HEADER_BYTES + header.tokens * header.geometry.row_bytes // 2
    rest_and_sums = frame[coded_end : payload_end + 8 * header.tokens]
    ids = np.ascontiguousarray(token_ids, "<i8").tobytes()
    return _assemble(frame[:HEADER_BYTES], header, frame[HEADER_BYTES:coded_end], rest_and_sums, ids, salt_sum, codec)


def store_table(table: Table, geometry: Geometry, codec: Codec) -> tuple[Header, Pieces]:
    """The stored form of a reference-exponent table: a frame with no tokens. Returns as :func:`store_frame`."""
    fields = np.zeros(1, HEADER)
    fields["magic"], fields["version"], fields["header_bytes"] = MAGIC, FRAME_VERSION, HEADER_BYTES
    fields["dtype"], fields["payload"] = geometry.dtype, Payload.TABLE
    fields["layers"], fields["hidden"] = geometry.layers, geometry.hidden
    fields["table"] = table_id(table)
    fields["self_check"] = header_check(fields.view(np.uint64))
    head = fields.view(np.uint8)
    section = np.ascontiguousarray(table).reshape(-1)
    return _assemble(head, parse_header(head), section, section[:0], b"", 0, codec)


def _assemble(
    head: U8Array, header: Header, section: U8Array, middle: U8Array, end: bytes, salt_sum: int, codec: Codec
) -> tuple[Header, Pieces]:
    """Complete a header for what follows it: the coded ``section``, ``middle`` and ``end``, and the padding."""
    compressed = compress(section) if codec is Codec.ZSTD else None
    codec, coded = (Codec.STORED, section.data) if compressed is None else (Codec.ZSTD, memoryview(compressed))
    used = HEADER_BYTES + len(coded) + len(middle) + len(end)
    padding = bytes(-used % FRAME_ALIGN)
    body = [coded, middle.data, memoryview(end + padding)]
    raw = head.copy()
    own = len(coded), codec, used + len(padding)
    _OWN_FIELDS.pack_into(raw.data, _OWN_FIELDS_AT, *own, 0, salt_sum)
    digest = xxhash.xxh3_64(raw.data)
    for piece in body:
        digest.update(piece)
    stored_sum = digest.intdigest()
    _OWN_FIELDS.pack_into(raw.data, _OWN_FIELDS_AT, *own, stored_sum, salt_sum)
    completed = replace(
        header, coded_bytes=own[0], codec=codec, stored_bytes=own[2], stored_sum=stored_sum, salt_sum=salt_sum
    )
    return completed, [raw.data, *body]


def stored_bytes_limit(geometry: Geometry, tokens: int) -> int:
    """The most bytes that a stored frame of ``tokens`` rows takes; for a table ``tokens`` is 0."""
    payload = tokens * geometry.row_bytes if tokens else geometry.layers * geometry.hidden
    used = HEADER_BYTES + payload + tokens * _ROW_TAIL_BYTES
    return -(-used // FRAME_ALIGN) * FRAME_ALIGN


@dataclass(frozen=True, slots=True)
class StoredFrame:
    """A stored frame whose checksum and lengths hold. Its arrays are views of the file's bytes.

    Attributes:
        header: the parsed header.
        coded: the coded section, uint8.
        rest: the rest section, uint8; empty unless PLANES.
        row_sums: uint64 ``[n]``.
        token_ids: int64 ``[n]``.
    """

    header: Header
    coded: U8Array
    rest: U8Array
    row_sums: U64Array
    token_ids: npt.NDArray[np.int64]

    @classmethod
    def parse(cls, frame: U8Array) -> "StoredFrame":
        """Take the stored ``frame``, uint8 of exactly its length, apart.

        Raises:
            FormatError: when its checksum is wrong, or its lengths contradict each other.
        """
        header = parse_header(frame)
        if header.stored_bytes != len(frame):
            raise FormatError(f"a frame of {len(frame)} bytes says that it has {header.stored_bytes}")
        if header.stored_sum != _sum_of(frame):
            raise FormatError("a stored frame's checksum is wrong: its bytes were changed")
        n, geometry = header.tokens, header.geometry
        plain_bytes, rest_bytes = _section_bytes(header)
        whole = header.coded_bytes == plain_bytes if header.codec == Codec.STORED else header.coded_bytes < plain_bytes
        used = HEADER_BYTES + header.coded_bytes + rest_bytes + n * _ROW_TAIL_BYTES
        if header.codec not in (Codec.STORED, Codec.ZSTD) or not whole or used + -used % FRAME_ALIGN != len(frame):
            raise FormatError(
                f"a frame of {n} tokens, {geometry.layers} x {geometry.hidden}, codec {header.codec}, "
                f"coded section {header.coded_bytes} bytes cannot have {len(frame)} bytes"
            )
        rest_at = HEADER_BYTES + header.coded_bytes
        sums_at = rest_at + rest_bytes
        ids_at = sums_at + 8 * n
        # The coded section may end at any byte, so what follows it is copied into alignment.
        return cls(
            header,
            frame[HEADER_BYTES:rest_at],
            frame[rest_at:sums_at],
            frame[sums_at:ids_at].copy().view("<u8"),
            frame[ids_at : ids_at + 8 * n].copy().view("<i8"),
        )

    def plain(self) -> U8Array:
        """The coded section, decoded.

        Raises:
            FormatError: when it cannot be decoded, or has another size than it must.
        """
        if self.header.codec == Codec.STORED:
            return self.coded
        return decompress(self.coded, _section_bytes(self.header)[0])

    def values(self, out: npt.NDArray[np.generic], table: Table | None) -> None:
        """Write the element values to ``out`` ``[n, L, H]``, of :data:`NUMPY_DTYPE`; PLANES need their ``table``.

        Raises:
            FormatError: as :meth:`plain`.
        """
        plain = self.plain()
        if self.header.payload is Payload.RAW:
            out.view(np.uint8).reshape(-1)[:] = plain
        else:
            assert table is not None
            from_planes(plain.reshape(out.shape), self.rest.reshape(out.shape), table, out.view(np.uint16))

    def value_blocks(self, table: Table | None) -> Iterator[tuple[int, npt.NDArray[np.generic]]]:
        """The element values, few rows at a time so that they stay in a core's cache: ``(first row, [rows, L, H])``.

        A block's memory is that of the next one too. Raises as :meth:`values`, which takes the same ``table``.
        """
        geometry, plain = self.header.geometry, self.plain()
        shape = (self.header.tokens, geometry.layers, geometry.hidden)
        step = max(1, _BLOCK_BYTES // geometry.row_bytes)
        if self.header.payload is Payload.RAW:
            whole = plain.view(NUMPY_DTYPE[geometry.dtype]).reshape(shape)
            yield from ((start, whole[start : start + step]) for start in range(0, len(whole), step))
            return
        assert table is not None
        exponents, rests = plain.reshape(shape), self.rest.reshape(shape)
        block = np.empty((step, *shape[1:]), np.uint16)
        for start in range(0, len(exponents), step):
            part = slice(start, start + step)
            values = block[: len(exponents[part])]
            from_planes(exponents[part], rests[part], table, values)
            yield start, values.view(NUMPY_DTYPE[geometry.dtype])

    def table(self) -> Table:
        """The table of a TABLE frame, uint8 ``[L, H]``.

        Raises:
            FormatError: as :meth:`plain`, and when it is not the table that its id names.
        """
        table = self.plain().reshape(self.header.geometry.layers, self.header.geometry.hidden)
        if table_id(table) != self.header.table:
            raise FormatError(f"a table frame does not hold the table {self.header.table:016x} that it names")
        return table


def _sum_of(frame: U8Array) -> int:
    """xxh3_64 of a stored frame with header word 13, where the sum itself stands, taken as zero."""
    digest = xxhash.xxh3_64(frame[: _SUM_WORD.start].data)
    digest.update(_ZERO_WORD)
    digest.update(frame[_SUM_WORD.stop :].data)
    return digest.intdigest()


def _section_bytes(header: Header) -> tuple[int, int]:
    """Bytes of the coded section once decoded, and of the rest section."""
    geometry = header.geometry
    if header.payload is Payload.TABLE:
        return geometry.layers * geometry.hidden, 0
    payload = header.tokens * geometry.row_bytes
    return (payload // 2, payload // 2) if header.payload is Payload.PLANES else (payload, 0)
