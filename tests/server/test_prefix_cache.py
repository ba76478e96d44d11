"""The prefix cache left on: rows that it serves are shared with the capture that has them, or said to be missing."""

from collections.abc import Iterator
from typing import Any

import pytest
from bench.server import Server
from tests import models
from tests.server.conftest import CHUNK_TOKENS, Served, capture_flags
from tests.server.prompts import random_prompts, receipt, send_together
from tests.server.reference import Reference, assert_same_states
from tests.server.waiting import wait_until

from hashtap.identity import PAST_THE_CACHE
from hashtap.reader import Reader
from hashtap.releases import installed_sglang, predates
from hashtap.verify import verify

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

BOUNDARIES = (1, 4, 6)


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    captures, model = tmp_path_factory.mktemp("cached") / "captures", models.llama()
    flags = ("--chunked-prefill-size", CHUNK_TOKENS, "--max-total-tokens", 65536, "--sleep-on-idle")
    flags += (*capture_flags(captures, *BOUNDARIES), "--capture-prefix-cache", "on")
    with Server(model, *flags, threads=1) as server:
        yield Served(server, model, captures, BOUNDARIES)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(models.llama(plain=True))


def check(served: Served, reference: Reference, *prompts: list[int]) -> None:
    for prompt, capture in zip(prompts, served.captured(*prompts), strict=True):
        assert capture.token_ids.tolist() == prompt
        assert_same_states(capture.tensor(), reference.states(prompt), BOUNDARIES)


def computed(answer: dict[str, object]) -> int:
    """Prompt tokens that the server did not take from its cache."""
    info = answer["meta_info"]
    assert isinstance(info, dict)
    return int(info["prompt_tokens"]) - int(info["cached_tokens"])


@pytest.mark.cell(
    "prefix cache on, partial hit",
    "exact",
    "`--capture-prefix-cache on`: rows are shared with the capture that has them",
)
def test_cached_rows_come_from_the_earlier_capture(cached: Served, reference: Reference) -> None:
    (first, tail, other) = random_prompts([300, 150, 7], seed=50)
    prompts = [first, first + tail, first + tail + other, first[:200] + other]
    for prompt, expected in zip(prompts, (300, 150, 7, 7), strict=True):
        answer = cached.server.generate(prompt)
        assert (receipt(answer)["state"], receipt(answer)["rows"]) == ("captured", len(prompt))
        assert computed(answer) == expected
    check(cached, reference, *prompts)


@pytest.mark.cell("prefix cache on, full hit", "exact", "a duplicate, counted")
def test_the_same_prompt_again_is_a_duplicate(cached: Served) -> None:
    (prompt,) = random_prompts([90], seed=51)
    before = cached.counters()
    answers = [cached.server.generate(prompt) for _ in range(3)]
    assert [computed(answer) for answer in answers] == [90, 1, 1]
    assert {receipt(answer)["state"] for answer in answers} == {"captured"}
    assert len(cached.captured(prompt)[0]) == 90
    wait_until(lambda: (cached.counters() - before)["duplicates"] == 2, 30, "both duplicates to be counted")


@pytest.mark.cell("prefix cache on, several answers", "exact", "`n: 4`: one record, four duplicates")
def test_several_answers_to_one_prompt(cached: Served, reference: Reference) -> None:
    first, tail = random_prompts([150, 60], seed=56)
    cached.server.generate(first)
    before = cached.counters()
    params = {"max_new_tokens": 1, "temperature": 1.0, "n": 4, "custom_params": {"hashtap": True}}
    answers = cached.post("/generate", {"input_ids": first + tail, "sampling_params": params})
    assert [receipt(answer)["state"] for answer in answers] == ["captured"] * 4
    wait_until(lambda: (cached.counters() - before)["duplicates"] == 4, 30, "four duplicates to be counted")
    check(cached, reference, first, first + tail)


@pytest.mark.cell("prefix cache on, input logprobs", "exact", "SGLang takes from its cache only what is before them")
def test_logprobs_of_rows_that_a_capture_has(cached: Served, reference: Reference) -> None:
    first, tail, other = random_prompts([300, 80, 70], seed=58)
    cached.server.generate(first)
    params = {"max_new_tokens": 1, "temperature": 0, "custom_params": {"hashtap": True}}
    for prompt, start, cold in ((first + tail, 0, 380), (first + other, 200, 370 - 200)):
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "logprob_start_len": start}
        answer = cached.post("/generate", body)
        assert len(answer["meta_info"]["input_token_logprobs"]) == len(prompt) - start
        assert (receipt(answer)["state"], receipt(answer)["rows"]) == ("captured", len(prompt))
        assert computed(answer) == cold
    check(cached, reference, first, first + tail, first + other)


@pytest.mark.cell(
    "prefix cache on, rows of nobody", "marked", "`needs recompute`; sent again past the cache it is exact"
)
def test_rows_that_no_capture_has_need_a_second_pass(cached: Served, reference: Reference) -> None:
    (others, tail, stranger) = random_prompts([260, 40, 70], seed=52)
    cached.server.generate(others, custom_params=None)
    # In one batch with a prompt that has nothing to do with it: that one's rows are not shifted.
    refused, beside = map(receipt, send_together(cached.server, [others + tail, stranger]))
    assert (beside["state"], beside["rows"]) == ("captured", 70)
    assert refused["state"] == "needs recompute"
    assert refused["reason"] == "260 rows from position 0 came from the prefix cache"
    again = cached.server.generate(others + tail, extra_key=PAST_THE_CACHE + "1")
    assert computed(again) == 300
    assert (receipt(again)["state"], receipt(again)["rows"]) == ("captured", 300)
    check(cached, reference, others + tail, stranger)


def recompute(cached: Served, prompt: list[int], answer: dict[str, Any], batch: list[list[int]]) -> int:
    """Send a prompt past the cache, as the client does; it must have met one that is not whole yet. Tokens computed."""
    assert answer["state"] == "needs recompute"
    rows = int(answer["reason"].split(" rows from position 0 came from the prefix cache")[0])
    assert any(other[:rows] == prompt[:rows] for other in batch if other is not prompt), answer["reason"]
    again = cached.server.generate(prompt, extra_key=PAST_THE_CACHE + "1")
    assert (receipt(again)["state"], computed(again)) == ("captured", len(prompt))
    return computed(again)


def test_conversations_cost_their_system_prompt_once(cached: Served, reference: Reference) -> None:
    """40 conversations of five turns behind a system prompt of 1,000 tokens."""
    system, *turns = random_prompts([1000] + [30] * 200, seed=53)
    assert receipt(cached.server.generate(system))["state"] == "captured"
    prompts = [system]
    tokens = again = 0
    for turn in range(5):
        batch = [
            system + [token for part in turns[talk * 5 : talk * 5 + turn + 1] for token in part] for talk in range(40)
        ]
        answers = send_together(cached.server, batch)
        tokens += sum(computed(answer) for answer in answers)
        for prompt, answer in zip(batch, answers, strict=True):
            if receipt(answer)["state"] != "captured":
                again += recompute(cached, prompt, receipt(answer), batch)
        prompts += batch
    assert 200 * 29 < tokens <= 200 * 30  # turns may begin with the same token
    check(cached, reference, prompts[1], prompts[100], prompts[-1])
    cached.captured(*prompts)
    report = verify(cached.captures, samples=((str(i), ids, b"") for i, ids in enumerate(prompts)))
    assert report.ok, report.to_json()
    stored = sum(path.stat().st_size for path in cached.captures.glob("*.safetensors"))
    whole = sum(map(len, prompts)) * cached.captured(system)[0].facts.geometry.row_bytes
    total = sum(map(len, prompts))
    print(f"{total:,} prompt tokens, {1000 + tokens + again:,} computed; {stored:,} bytes for {whole:,} of states")
    assert stored < whole / 10


@pytest.mark.cell(
    "prefix cache on, new weights", "marked", "rows of the old weights are nobody's until the cache is flushed"
)
def test_the_cache_of_old_weights_serves_no_capture(cached: Served) -> None:
    """Last here: the weights change. SGLang keeps its cache where it is told to, and goes on serving from it."""
    (shared, *tails) = random_prompts([200, 20, 21, 22], seed=54)
    first, stale, fresh = (shared + tail for tail in tails)
    assert receipt(cached.server.generate(first))["state"] == "captured"
    body = {"model_path": str(models.llama(seed=1)), "flush_cache": False}
    assert cached.post("/update_weights_from_disk", body)["success"]
    assert receipt(cached.server.generate(first))["state"] == "needs recompute"
    again = receipt(cached.server.generate(first, extra_key=PAST_THE_CACHE + "1"))
    assert again["state"] == "captured"
    answer = cached.server.generate(stale)
    assert computed(answer) == 21  # behind rows of the old weights
    assert receipt(answer)["state"] == "needs recompute"
    cached.post("/flush_cache")
    answers = [cached.server.generate(prompt) for prompt in (first, fresh)]
    assert [computed(answer) for answer in answers] == [220, 22]
    assert {receipt(answer)["state"] for answer in answers} == {"captured"}
    reference, reader = Reference(models.llama(seed=1, plain=True)), Reader(cached.captures, epoch=again["epoch"])

    def sealed() -> bool:
        reader.refresh()
        return len(reader) == 2

    wait_until(sealed, 30, "both to be sealed")
    for prompt in (first, fresh):
        assert_same_states(reader.by_token_ids(prompt).tensor(), reference.states(prompt), BOUNDARIES)


@pytest.mark.cell("memory released and resumed", "exact", "a new epoch where the weights were among it")
@pytest.mark.cell(
    "a check that overwrites the weights", "exact", "`/weights_checker` with `reset_tensors`: a new epoch"
)
def test_whatever_changes_the_weights_begins_an_epoch(cached: Served) -> None:
    def updates() -> int:
        return int(cached.server.get("/hashtap/info")["epoch"].partition("+")[2] or 0)

    before = updates()
    cached.post("/weights_checker", {"action": "checksum"})
    for tags in (["kv_cache"], ["weights"], None):
        cached.post("/release_memory_occupation", {"tags": tags})
        cached.post("/resume_memory_occupation", {"tags": tags})
    assert updates() - before == 2
    cached.post("/weights_checker", {"action": "reset_tensors"})
    assert updates() - before == 3


@pytest.mark.skipif(predates(installed_sglang()[0], "0.5.23"), reason="there is no such update")
@pytest.mark.cell("an update of the weights in several steps", "marked", "`incomplete` until its end, then a new epoch")
def test_nothing_is_captured_while_weights_move(cached: Served) -> None:
    (prompt,) = random_prompts([60], seed=55)
    cached.post("/begin_weight_update", {"selector": "all"})
    said = receipt(cached.server.generate(prompt))
    assert (said["state"], said["reason"]) == ("incomplete", "the weights are being updated")
    cached.post("/end_weight_update")
    cached.post("/flush_cache")
    assert receipt(cached.server.generate(prompt))["state"] == "captured"
