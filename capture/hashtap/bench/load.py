"""Sends prompts to a server and takes the time: all of them at once as work, or a few for their decode steps."""

import json
import statistics
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from hashtap.bench.sides import RID_PREFIX

__all__ = ["UNCOUNTED", "Sent", "decode_step_s", "send"]

TIMEOUT_S = 600.0
UNCOUNTED = "uncounted-"
"""Begins the request ids of prompts that warm up or time decode steps, and are no part of what a side must give."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One batch of prompts that was answered.

    Attributes:
        seconds: until the last answer.
        first_token_s: of each prompt, from sending it to its one token; waiting in the server's queue is part of it.
        answers: the bodies, not decoded, so that decoding them takes none of the measured time.
    """

    seconds: float
    first_token_s: tuple[float, ...]
    answers: tuple[bytes, ...]


def send(
    url: str, prompts: Sequence[list[int]], more: Mapping[str, Any], *, in_flight: int, rids: str = RID_PREFIX
) -> Sent:
    """Send ``prompts``, so many in flight, each for one greedy token; ``more`` is added to each request.

    Raises:
        httpx.HTTPError: when one of them is not answered, or with an error.
    """
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client, ThreadPoolExecutor(in_flight) as pool:

        def one(input_ids: list[int]) -> tuple[float, bytes]:
            started = time.perf_counter()
            answer = client.post("/generate", json=_body(input_ids, 1, rids) | dict(more)).raise_for_status()
            return time.perf_counter() - started, answer.content

        started = time.perf_counter()
        answers = list(pool.map(one, prompts))
        return Sent(time.perf_counter() - started, *map(tuple, zip(*answers, strict=True)))


def decode_step_s(url: str, prompts: Sequence[list[int]], tokens: int) -> float:
    """Seconds between two tokens, the median over ``prompts`` that are all in flight and get ``tokens`` each.

    Raises:
        httpx.HTTPError: as :func:`send`.
    """
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client, ThreadPoolExecutor(len(prompts)) as pool:

        def one(input_ids: list[int]) -> float:
            body = _body(input_ids, tokens, UNCOUNTED) | {"stream": True}
            with client.stream("POST", "/generate", json=body) as answer:
                answer.raise_for_status()
                parts = ((time.perf_counter(), line) for line in answer.iter_lines() if line.startswith("data: {"))
                times, lines = zip(*parts, strict=True)
            first, last = (json.loads(line[6:])["meta_info"]["completion_tokens"] for line in (lines[0], lines[-1]))
            return float(times[-1] - times[0]) / int(last - first)

        return statistics.median(pool.map(one, prompts))


def _body(input_ids: list[int], tokens: int, rids: str) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, "custom_params": {"hashtap": True}}
    return {"input_ids": input_ids, "rid": rids + uuid.uuid4().hex, "sampling_params": sampling}
