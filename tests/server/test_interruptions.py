"""Requests that are aborted, given up, paused, retracted or preempted: whole records or none."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.server.aborts import abort_at_random
from tests.server.conftest import Served, served
from tests.server.prompts import random_prompts, receipt, send_together
from tests.server.reference import Reference, assert_same_states
from tests.server.waiting import wait_until

from hashtap.identity import prompt_key
from hashtap.reader import Reader

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Few requests at a time, the important ones first, and a prompt may push out one that runs."""
    flags = ("--enable-priority-scheduling", "--max-running-requests", 8)
    with served(tmp_path_factory.mktemp("busy"), *flags) as server:
        yield server


def ask(served: Served, prompt: list[int], priority: int = 0, new_tokens: int = 1) -> Any:
    params = {"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "custom_params": {"hashtap": True}}
    body = {"input_ids": prompt, "priority": priority, "sampling_params": params}
    return served.post("/generate", body)


@pytest.mark.cell("aborts before, in and after every chunk", "exact", "whole records or none; `make aborts`: 1,000")
def test_aborts(busy: Served) -> None:
    seen = abort_at_random(busy, 60, seed=90)
    print(seen)
    assert seen["aborted in the queue or between chunks"] > 0
    assert seen["captured"] > 0


@pytest.mark.cell(
    "abort by the beginning of a rid", "exact", "SGLang aborts all that begin alike; the others are whole"
)
def test_an_abort_takes_all_that_begin_alike(busy: Served, reference: Reference) -> None:
    prompts = random_prompts([900] * 11, seed=91)
    rids = ["s-1", *(f"s-{number}" for number in range(10, 19)), "t-1"]
    before = busy.counters()
    with ThreadPoolExecutor(11) as pool:
        answers = [
            pool.submit(busy.server.generate, p, rid=r, max_new_tokens=150, ignore_eos=True)
            for p, r in zip(prompts, rids, strict=True)
        ]
        wait_until(lambda: (busy.counters() - before)["admitted"] == 11, 30, "all to arrive")
        busy.post("/abort_request", {"rid": "s-1"})
        ended = [answer.result()["meta_info"]["finish_reason"]["type"] for answer in answers]
    assert "abort" in ended
    assert ended[-1] != "abort"
    whole = [prompt for prompt, end in zip(prompts, ended, strict=True) if end != "abort"]
    busy.check(reference, *whole)
    reader = Reader(busy.captures)
    for capture in (reader.by_token_ids(prompt) for prompt in prompts if prompt_key(prompt) in reader):
        assert_same_states(capture.tensor(), reference.states(capture.token_ids.tolist()), busy.boundaries)


@pytest.mark.cell("client time-out and retry", "exact", "impatient attempts: one record, duplicates are counted")
def test_impatient_client(busy: Served, reference: Reference) -> None:
    (prompt,) = random_prompts([3900], seed=92)
    before = busy.counters()
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "custom_params": {"hashtap": True}}}
    attempts = 0
    while attempts < 3 or not (busy.counters() - before)["admitted"]:  # one at least must arrive
        attempts += 1
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{busy.server.url}/generate", json=body, timeout=0.05)
    assert receipt(busy.server.generate(prompt))["rows"] == 3900
    busy.check(reference, prompt)

    def ended() -> bool:
        """Each attempt that arrived was captured, the first as the record, or aborted as its client had gone."""
        seen = busy.counters() - before
        return seen["admitted"] == seen["captured"] + seen["aborted"] and seen["captured"] == 1 + seen["duplicates"]

    wait_until(ended, 60, "all attempts to be counted")
    assert 2 <= (busy.counters() - before)["admitted"] <= attempts + 1
    assert not Reader(busy.captures).duplicates


@pytest.mark.cell("pause: abort", "exact", "whole records or none")
@pytest.mark.cell("pause: retract", "exact", "prompts begin anew: one record from one pass")
@pytest.mark.cell("pause between two chunks", "exact", "`retract`: the record begins anew, of one pass")
@pytest.mark.cell("pause: in place", "exact", "prompts go on where they stood")
@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_pause_and_continue(busy: Served, reference: Reference, mode: str) -> None:
    # Long ones: beside a busy machine's other work the pause must still come before the last chunk.
    prompts = random_prompts([3900] * 6 + [700, 30], seed=93 + len(mode))
    before = busy.counters()
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(busy.server.generate, prompt, max_new_tokens=20) for prompt in prompts]
        wait_until(lambda: (busy.counters() - before)["rows"] > 0, 60, "the first rows")
        with busy.paused(mode):
            pass
        found = [answer.result() for answer in answers]
    whole = [p for p, a in zip(prompts, found, strict=True) if a["meta_info"]["finish_reason"]["type"] != "abort"]
    assert whole == prompts if mode != "abort" else len(whole) < len(prompts)
    assert (busy.counters() - before)["restarted"] > 0 if mode == "retract" else True
    busy.check(reference, *whole)
    assert not Reader(busy.captures).incomplete


@pytest.mark.cell(
    "priorities and preemption", "exact", "prompts of priority 100 push out running ones, which begin anew"
)
def test_preemption(busy: Served, reference: Reference) -> None:
    low, high = random_prompts([60] * 12, seed=97), random_prompts([400] * 6, seed=98)
    before = busy.counters()
    with ThreadPoolExecutor(18) as pool:
        slow = [pool.submit(ask, busy, prompt, 0, 300) for prompt in low]
        wait_until(lambda: (busy.counters() - before)["captured"] >= 8, 60, "eight to run")
        quick = [pool.submit(ask, busy, prompt, 100) for prompt in high]
        answers = [answer.result() for answer in quick + slow]
    assert sum(answer["meta_info"].get("num_retractions", 0) for answer in answers) > 0
    assert {receipt(answer)["state"] for answer in answers} == {"captured"}
    busy.check(reference, *low, *high)


@pytest.mark.cell("more samples than running requests", "exact", "200 samples at once, `--max-running-requests 8`")
def test_200_samples_on_8_places(busy: Served) -> None:
    prompts = random_prompts([5 + number % 90 for number in range(200)], seed=99)
    answers = send_together(busy.server, prompts)
    assert [receipt(answer)["rows"] for answer in answers] == [len(prompt) for prompt in prompts]
    assert [c.token_ids.tolist() for c in busy.captured(*prompts)] == prompts
