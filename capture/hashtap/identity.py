"""A prompt's key: which tokens (and which salt) a capture was made from.

The client computes it from its own sample, the server from the request, the reader from what it
finds. Nobody hands out numbers, so nobody can get out of step. Layout of the preimage: FORMAT.md.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "KEY_BYTES",
    "NEEDS_RECOMPUTE",
    "PAST_THE_CACHE",
    "TokenIds",
    "as_token_ids",
    "parse_key",
    "prompt_key",
    "salt_of",
]

KEY_BYTES = 16

NEEDS_RECOMPUTE = "needs recompute"
"""State in the receipt of a prompt of which the prefix cache held rows that no capture has."""

PAST_THE_CACHE = "hashtap-past-the-cache-"
"""Start of the ``extra_key`` under which such a prompt is sent again: it keeps the cache away, and is no salt."""

TokenIds = Sequence[int] | npt.NDArray[np.integer[Any]]


def as_token_ids(token_ids: TokenIds) -> npt.NDArray[np.int64]:
    """Token ids as int64 ``[T]``, without a copy where they are that already (``array('q')``, NumPy).

    Raises:
        TypeError: when they are not whole numbers (a float would be cut silently).
        ValueError: when they do not fit int64 or are not one-dimensional.
    """
    try:
        ids = np.asarray(token_ids if len(token_ids) else np.empty(0, np.int64))
    except OverflowError as error:
        raise ValueError(f"token ids must fit 64 bits: {error}") from None
    if ids.dtype.kind not in "iu" or ids.dtype == np.uint64:
        raise TypeError(f"token ids must be whole numbers that fit int64, not {ids.dtype}")
    if ids.ndim != 1:
        raise ValueError(f"token ids must be one list, not {ids.ndim}-dimensional")
    return np.ascontiguousarray(ids, dtype=np.int64)


def prompt_key(token_ids: TokenIds, salt: bytes = b"") -> bytes:
    """The key of a prompt, 16 bytes: a hash of its length, ids and salt.

    >>> prompt_key([1, 2, 3]).hex()
    'e124a9e6918ab6adce4b6d23af2af3aa'
    """
    ids = as_token_ids(token_ids)
    if sys.byteorder != "little":
        ids = ids.astype("<i8")
    digest = blake2b(len(ids).to_bytes(8, "little"), digest_size=KEY_BYTES, person=b"hashtap-key-1")
    digest.update(ids.data)
    digest.update(salt)
    return digest.digest()


def salt_of(facts: Mapping[str, Any] | None) -> bytes:
    """Canonical bytes of what besides the ids changes the states; empty for plain text.

    >>> salt_of({"lora": "ad1"})
    b'{"lora":"ad1"}'
    """
    if not facts:
        return b""
    return json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def parse_key(text: str) -> bytes | None:
    """The key that ``text`` spells, or None when it spells none."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES and len(text) == 2 * KEY_BYTES else None
