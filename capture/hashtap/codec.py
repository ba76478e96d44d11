"""Compression of one section of a frame: zstd with Huffman only.

Of a 16-bit element only the exponent compresses. Once it stands in a plane of its own, centred per channel (see
``hashtap_kernels.planes``), what is left is one skewed distribution: Huffman codes it within 1 % of its limit, and
every match that zstd would find is an accident that costs both ratio and time.
"""

import threading
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import zstandard

from hashtap.errors import FormatError

__all__ = ["Codec", "compress", "decompress"]

U8Array = npt.NDArray[np.uint8]


class Codec(IntEnum):
    """How the coded section of a stored frame is coded."""

    STORED = 0
    ZSTD = 1


# The window sets zstd's block size: below 17 the blocks shrink. Negative levels would turn Huffman off.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    compression_level=1,
    strategy=zstandard.STRATEGY_FAST,
    hash_log=6,
    window_log=17,
    min_match=7,
    target_length=0,
    write_content_size=True,
    write_checksum=False,
)


class _Contexts(threading.local):
    """zstd's contexts are not thread safe: each thread has its own pair."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def compress(section: U8Array) -> bytes | None:
    """One zstd frame of ``section``, with its content size; None when it would be no smaller."""
    coded: bytes = _contexts.compressor.compress(section.data)
    return coded if len(coded) < section.nbytes else None


def decompress(coded: U8Array, size_bytes: int) -> U8Array:
    """Decode the one zstd frame in ``coded``, which must hold exactly ``size_bytes``; it never allocates more.

    Raises:
        FormatError: when it is anything but one whole zstd frame that declares that size.
    """
    try:
        declared = zstandard.get_frame_parameters(coded.data).content_size
        if declared != size_bytes:
            raise FormatError(f"its zstd frame declares {declared} bytes where {size_bytes} belong")
        plain: bytes = _contexts.decompressor.decompress(coded.data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(f"its zstd frame cannot be decoded: {error}") from None
    return np.frombuffer(plain, np.uint8)
