"""Sends prompts to a server and takes the time: all of them at once as work, or a few for their decode steps."""

import json
import statistics
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hashtap.bench.counted import Got
from hashtap.bench.servers import client_for_threads
from hashtap.bench.sides import RID_PREFIX

__all__ = ["UNCOUNTED", "Sent", "decode_step_s", "send"]

TIMEOUT_S = 600.0
UNCOUNTED = "uncounted-"
"""Begins the request ids of prompts that warm up or time decode steps, and are no part of what a side must give."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One batch of prompts that was answered.

    Attributes:
        seconds: until the last answer was taken.
        first_token_s: of each prompt, from sending it to its one token; waiting in the server's queue is part of it.
        got: what was taken from the answers.
    """

    seconds: float
    first_token_s: tuple[float, ...]
    got: Got


def send(
    url: str,
    prompts: Sequence[list[int]],
    more: Mapping[str, Any],
    *,
    in_flight: int,
    rids: str = RID_PREFIX,
    take: Callable[[bytes], Got] | None = None,
) -> Sent:
    """Send ``prompts``, so many in flight, each for one greedy token.

    Args:
        url: of the server.
        prompts: token ids.
        more: added to each request.
        in_flight: how many are not answered at a time.
        rids: begins the request ids.
        take: makes arrays of the states in an answer, as it comes: text that nobody has read is no capture yet.

    Raises:
        httpx.HTTPError: when one of them is not answered, or with an error.
    """
    with client_for_threads(url, TIMEOUT_S) as client, ThreadPoolExecutor(in_flight) as pool:

        def one(input_ids: list[int]) -> tuple[float, Got]:
            started = time.perf_counter()
            answer = client.post("/generate", json=_body(input_ids, 1, rids) | dict(more)).raise_for_status()
            answered_s = time.perf_counter() - started
            return answered_s, take(answer.content) if take else Got()

        started = time.perf_counter()
        first_token_s, got = zip(*pool.map(one, prompts), strict=True)
        return Sent(time.perf_counter() - started, first_token_s, sum(got, Got()))


def decode_step_s(url: str, prompts: Sequence[list[int]], tokens: int) -> float:
    """Seconds between two tokens, the median over ``prompts`` that are all in flight and get ``tokens`` each.

    Raises:
        httpx.HTTPError: as :func:`send`.
    """
    with client_for_threads(url, TIMEOUT_S) as client, ThreadPoolExecutor(len(prompts)) as pool:

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
