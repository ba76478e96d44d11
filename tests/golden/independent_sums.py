"""The sums of FORMAT.md §6, written from that page alone."""

from typing import Any

import numpy as np

M0, M1 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
P0, P1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)


def mix64(x: Any) -> Any:
    x = (x ^ (x >> np.uint64(30))) * M0
    x = (x ^ (x >> np.uint64(27))) * M1
    return x ^ (x >> np.uint64(31))


def count(start: int, size: int) -> Any:
    return np.arange(start, start + size, dtype=np.uint64)


def proof(ids: Any, first: int, seed: Any) -> tuple[int, int]:
    x = (count(first, len(ids)) << np.uint64(32)) + (ids.astype(np.uint64) & np.uint64(0xFFFFFFFF))
    return int(mix64(x + seed[0]).sum()), int(mix64((x * P1) ^ seed[1]).sum())


def row_sums(values: Any, first: int) -> Any:
    words = np.ascontiguousarray(values).view("<u8").sum(axis=2, dtype=np.uint64)
    place = np.uint64(8) * count(first, len(words))[:, None] + count(1, words.shape[1])
    return mix64(words ^ (place * P0)).sum(axis=1, dtype=np.uint64)


def self_check(header: Any) -> int:
    return int(mix64(header[:88].view("<u8") + count(0, 11) * P0 + np.uint64(1)).sum())


def table_id(table: Any) -> int:
    words = table.reshape(-1).view("<u8")
    total = mix64(words ^ (count(1, len(words)) * P0)).sum(keepdims=True)
    layers, hidden = table.shape
    return int(mix64(total + np.uint64((layers << 32) + hidden))[0]) or 1
