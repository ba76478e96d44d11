"""Counts what a side gave: rows, how wide they are, and the bytes that they came in."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hashtap.identity import prompt_key
from hashtap.reader import Reader

__all__ = ["Got", "count_captures", "count_dump", "count_json", "count_reply"]


@dataclass(frozen=True, slots=True)
class Got:
    """What a side gave: ``rows`` of prompt tokens, ``width`` elements in each (L x H), in ``bytes`` as it gave them."""

    rows: int = 0
    width: int = 0
    bytes: int = 0

    def __add__(self, other: "Got") -> "Got":
        """Both together; they are as wide as the narrower one that has rows."""
        widths = [part.width for part in (self, other) if part.rows]
        return Got(self.rows + other.rows, min(widths, default=0), self.bytes + other.bytes)


def count_captures(folder: Path, prompts: list[list[int]]) -> Got:
    """Rows of the captures of ``prompts``, and their part of the bytes of all files."""
    reader = Reader(folder)
    geometry = reader.facts.geometry
    keys = {prompt_key(prompt) for prompt in prompts} & reader.keys()
    rows = sum(len(reader.by_key(key)) for key in keys)
    size = sum(path.stat().st_size for path in reader.directory.shards())
    share = rows / max(1, sum(map(len, reader)))
    return Got(rows, geometry.layers * geometry.hidden, round(size * share))


def count_json(answer: bytes) -> Got:
    """Rows in ``meta_info["hidden_states"]``: a matrix for the prompt, then one vector for each generated token."""
    states = json.loads(answer)["meta_info"].get("hidden_states") or []
    matrices = [np.asarray(part) for part in states if part and isinstance(part[0], list)]
    width = min((matrix.shape[1] for matrix in matrices), default=0)
    return Got(sum(len(matrix) for matrix in matrices), width, len(answer))


def count_dump(folder: Path, prompts: list[list[int]]) -> Got:
    """Rows that every layer has in the ``.pt`` files, and their layers side by side."""
    import torch

    rows: dict[str, int] = {}
    widths: dict[str, int] = {}
    size = 0
    for path in folder.glob("*.pt"):
        layer = path.stem.rpartition("-")[2]
        states = torch.load(path, map_location="meta", weights_only=True)
        rows[layer] = rows.get(layer, 0) + states.shape[0]
        widths[layer] = states.shape[1]
        size += path.stat().st_size
    return Got(min(rows.values(), default=0), sum(widths.values()), size)


def count_reply(answer: bytes) -> Got:
    """What :mod:`hashtap.bench.transformers_server` says it has written."""
    return Got(**json.loads(answer)["got"])
