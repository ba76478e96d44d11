"""Prompts of random token ids."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import numpy as np
from bench.server import Server
from tests.models import TINY_VOCAB

__all__ = ["random_prompts", "receipt", "send_together"]


def random_prompts(lengths: Iterable[int], *, seed: int = 0, vocab: int = TINY_VOCAB) -> list[list[int]]:
    """One prompt of each length; ids from 3 on, as the first three are special."""
    random = np.random.default_rng(seed)
    return [random.integers(3, vocab, length).tolist() for length in lengths]


def send_together(server: Server, prompts: Sequence[list[int]], **sampling: Any) -> list[dict[str, Any]]:
    """The answers to prompts sent all at once, in their order."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: server.generate(prompt, rid=uuid4().hex, **sampling), prompts))


def receipt(answer: dict[str, Any]) -> dict[str, Any]:
    """The receipt of an answer: the last that is not null."""
    return dict([found for found in answer["meta_info"]["hashtap"] if found is not None][-1])
