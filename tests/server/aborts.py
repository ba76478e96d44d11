"""Prompts that are aborted at random moments: in the queue, before, in and after each chunk.

python -m tests.server.aborts --times 1000
"""

import argparse
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

from tests.server.conftest import CHUNK_TOKENS, Served, served
from tests.server.prompts import random_prompts, receipt
from tests.server.waiting import wait_until

from hashtap.identity import prompt_key
from hashtap.reader import Reader

__all__ = ["abort_at_random"]

AT_ONCE = 8
MOST_CHUNKS = 7


def abort_at_random(server: Served, times: int, seed: int) -> dict[str, int]:
    """Abort ``times`` prompts of up to seven chunks; what became of them.

    Whatever was answered as captured is sealed, whatever is sealed is whole, nothing else is left anywhere.
    """
    draw = random.Random(seed)
    prompts = random_prompts([draw.randint(1, MOST_CHUNKS * CHUNK_TOKENS) for _ in range(times)], seed=seed)
    moments = [draw.random() for _ in prompts]
    patience_s = min(5.0, 0.7 * _seconds_of_a_round(server))
    before = server.counters()

    def one(prompt: list[int], moment: float) -> Any:
        rid = uuid4().hex
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.server.generate, prompt, rid=rid)
            time.sleep(moment * patience_s)
            server.post("/abort_request", {"rid": rid})
            return answer.result()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(one, prompts, moments))
    gone = [answer["meta_info"]["finish_reason"]["type"] == "abort" for answer in answers]

    def ended() -> bool:
        now = server.counters()
        seen = now - before
        return seen["admitted"] == seen["captured"] + seen["aborted"] and now["ring_used_bytes"] == now["queue"] == 0

    wait_until(ended, 30, "every request to have ended in one way")
    for answer, aborted in zip(answers, gone, strict=True):
        assert aborted or receipt(answer)["state"] == "captured"
    server.captured(*(prompt for prompt, aborted in zip(prompts, gone, strict=True) if not aborted))
    reader = Reader(server.captures)
    assert not reader.incomplete
    for prompt in prompts:
        if prompt_key(prompt) in reader:
            assert reader.by_token_ids(prompt).token_ids.tolist() == prompt
    seen = server.counters() - before
    assert not seen["failed_proofs"] + seen["bad_frames"] + seen["incomplete"] + seen["dropped"]
    return {
        "sent": times,
        "aborted before the scheduler saw them": times - seen["admitted"],
        "aborted in the queue or between chunks": seen["aborted"],
        "captured, then aborted": seen["captured"] - gone.count(False),
        "captured": gone.count(False),
    }


def _seconds_of_a_round(server: Served) -> float:
    """How long the longest prompts take, so many at once."""
    prompts = random_prompts([MOST_CHUNKS * CHUNK_TOKENS] * AT_ONCE, seed=0)
    started = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(server.server.generate, prompts))
    return time.monotonic() - started


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aborts-") as folder, served(Path(folder)) as server:
        print(abort_at_random(server, options.times, options.seed))


if __name__ == "__main__":
    main()
