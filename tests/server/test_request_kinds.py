"""Every kind of request that SGLang's routes take: captured exactly, or refused in its receipt."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import httpx
import pytest
from tests.server.conftest import Served
from tests.server.prompts import random_prompts, receipt
from tests.server.reference import Reference
from tests.server.waiting import wait_until

from hashtap.identity import prompt_key
from hashtap.reader import Reader

pytestmark = pytest.mark.server

TAG = {"hashtap": True}


def generate(served: Served, prompt: Any, sampling: dict[str, Any] | None = None, **more: Any) -> Any:
    """The answer to a tagged ``/generate``, with any fields."""
    params = {"max_new_tokens": 1, "temperature": 0, "custom_params": TAG, **(sampling or {})}
    return served.post("/generate", {"input_ids": prompt, "sampling_params": params, **more})


@pytest.mark.cell("one request", "exact", "`/generate` with token ids; rows as transformers computes them")
@pytest.mark.cell("streaming", "exact", "`stream: true`; the receipt rides with the chunks")
@pytest.mark.cell("stop strings and stop token ids", "exact", "`stop`, `stop_token_ids` with 20 new tokens")
@pytest.mark.cell("input logprobs from position 0", "exact", "`return_logprob`, `logprob_start_len: 0`, over chunks")
@pytest.mark.cell("input logprobs from the middle", "exact", "`logprob_start_len` inside the second chunk")
@pytest.mark.cell("other sampling", "exact", "temperature, penalties, `top_k`, `min_p`, 5 new tokens")
def test_ways_to_ask(llama: Served, reference: Reference) -> None:
    plain, streamed, stopped, scored, middle, sampled = prompts = random_prompts([150, 200, 90, 300, 300, 60], seed=70)
    assert receipt(generate(llama, plain))["rows"] == 150
    body = {"input_ids": streamed, "stream": True}
    body |= {"sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True, "custom_params": TAG}}
    events = httpx.post(f"{llama.server.url}/generate", json=body, timeout=60).text.split("\n\n")
    assert receipt(json.loads(events[-3].removeprefix("data: ")))["rows"] == 200
    stops = {"max_new_tokens": 20, "stop": ["t7", "t8"], "stop_token_ids": list(range(3, 300))}
    assert receipt(generate(llama, stopped, stops))["rows"] == 90
    for prompt, start in ((scored, 0), (middle, 140)):
        answer = generate(llama, prompt, return_logprob=True, logprob_start_len=start, top_logprobs_num=2)
        assert len(answer["meta_info"]["input_token_logprobs"]) == 300 - start
        assert receipt(answer)["rows"] == 300
    wild = {"temperature": 1.5, "top_k": 20, "min_p": 0.05, "frequency_penalty": 1.0, "max_new_tokens": 5}
    assert receipt(generate(llama, sampled, wild))["rows"] == 60
    llama.check(reference, *prompts)


@pytest.mark.cell("no new token", "exact", "`max_new_tokens: 0`; the answer has no receipt, the record is there")
@pytest.mark.cell("several answers", "exact", "`n: 4` is five passes: one record, four duplicates")
@pytest.mark.cell("batch with a list of rids", "exact", "three prompts in one request")
@pytest.mark.cell("batch with one rid", "exact", "SGLang makes rid_0, rid_1, … of it")
@pytest.mark.cell("rid used again", "exact", "after the first has finished: nothing is paired by it")
def test_rids(llama: Served, reference: Reference) -> None:
    silent, several, *batch = prompts = random_prompts([40, 130, 20, 140, 7, 21, 141, 8], seed=71)
    generate(llama, silent, {"max_new_tokens": 0})
    before = llama.counters()
    answers = generate(llama, several, {"n": 4, "temperature": 1.0})
    assert [receipt(answer)["key"] for answer in answers] == [prompt_key(several).hex()] * 4
    wait_until(lambda: (llama.counters() - before)["duplicates"] == 4, 30, "four duplicates to be counted")
    assert (llama.counters() - before)["captured"] == 5
    for part, rids in ((batch[:3], [uuid4().hex for _ in range(3)]), (batch[3:], uuid4().hex)):
        for prompt, answer in zip(part, generate(llama, part, rid=rids), strict=True):
            assert (receipt(answer)["key"], receipt(answer)["rows"]) == (prompt_key(prompt).hex(), len(prompt))
    rid = uuid4().hex
    same = random_prompts([50, 150, 51], seed=72)
    for prompt in same:
        assert receipt(generate(llama, prompt, rid=rid))["key"] == prompt_key(prompt).hex()
    llama.check(reference, *prompts, *same)


@pytest.mark.cell("beam search", "refused", "with 400 where it is tagged; else it is nobody's prompt")
def test_beams(llama: Served) -> None:
    (prompt,) = random_prompts([40], seed=76)
    before = llama.counters()
    params = {"beam_width": 2, "n": 2, "max_new_tokens": 2}
    body = {"input_ids": prompt, "sampling_params": params | {"custom_params": TAG}}
    answer = httpx.post(f"{llama.server.url}/generate", json=body, timeout=60)
    assert answer.status_code == 400
    assert "hashtap captures no prompt of a beam search" in answer.text
    llama.post("/generate", {"input_ids": prompt, "sampling_params": params})
    assert llama.counters() - before == {}
    assert prompt_key(prompt) not in Reader(llama.captures)


@pytest.mark.cell("rid of a request that runs", "exact", "SGLang answers the second with 400; the first is whole")
def test_a_rid_that_is_in_use(llama: Served, reference: Reference) -> None:
    first, second = random_prompts([1500, 40], seed=73)
    rid, before = uuid4().hex, llama.counters()["admitted"]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, llama, first, rid=rid)
        wait_until(lambda: llama.counters()["admitted"] > before, 30, "the first to arrive")
        body = {"input_ids": second, "rid": rid, "sampling_params": {"max_new_tokens": 1, "custom_params": TAG}}
        assert httpx.post(f"{llama.server.url}/generate", json=body, timeout=60).status_code == 400
        assert receipt(running.result())["rows"] == 1500
    llama.check(reference, first)
    assert prompt_key(second) not in Reader(llama.captures)


@pytest.mark.cell("text", "exact", "`text` in place of ids; the tiny tokenizer has one word a token")
@pytest.mark.cell("OpenAI completions, tagged", "exact", "`/v1/completions`; its answer has no place for a receipt")
def test_text(llama: Served, reference: Reference) -> None:
    text, completion = random_prompts([30, 32], seed=74)
    words = [" ".join(f"t{token}" for token in prompt) for prompt in (text, completion)]
    answer = llama.post("/generate", {"text": words[0], "sampling_params": {"max_new_tokens": 1, "custom_params": TAG}})
    assert receipt(answer)["rows"] == 30
    answer = llama.post("/v1/completions", {"model": "x", "max_tokens": 1, "custom_params": TAG, "prompt": words[1]})
    assert "hashtap" not in json.dumps(answer)
    llama.check(reference, text, completion)


@pytest.mark.cell("cache salt", "refused", "`cache_salt`; it is no part of the key")
@pytest.mark.cell("extra key", "refused", "`extra_key`, as the cache salt")
@pytest.mark.cell("sessions", "refused", "the ids sent are not the whole prompt")
@pytest.mark.cell("multi-item scoring", "refused", "`multi_item_delimiter_indices`: items do not see each other")
@pytest.mark.cell("input embeddings", "refused", "`input_embeds`; SGLang makes up the ids")
def test_states_that_depend_on_more_than_the_ids(llama: Served) -> None:
    (prompt,) = random_prompts([50], seed=75)
    session = llama.post("/open_session", {"capacity_of_str_len": 1000})
    refused = {
        "cache salt": {"cache_salt": "a"},
        "extra_key": {"extra_key": "a"},
        "session": {"session_params": {"id": session, "rid": None}},
        "several items": {"multi_item_delimiter_indices": [7, 20]},
    }
    for reason, fields in refused.items():
        answer = receipt(generate(llama, prompt, **fields))
        assert (answer["state"], answer["rows"]) == ("refused", 0), reason
        assert reason in answer["reason"]
    embedded = [[0.01 * ((row + column) % 7) for column in range(256)] for row in range(50)]
    params = {"max_new_tokens": 1, "custom_params": TAG}
    answer = llama.post("/generate", {"input_embeds": embedded, "sampling_params": params})
    assert receipt(answer)["state"] == "refused"
    assert prompt_key(prompt) not in Reader(llama.captures)
    assert prompt_key([1] * 50) not in Reader(llama.captures)


@pytest.mark.cell("images to a model of text", "exact", "SGLang leaves them out: the rows are those of the ids")
@pytest.mark.cell("embedding requests", "refused", "SGLang answers 400")
def test_what_is_not_for_this_model(llama: Served, reference: Reference) -> None:
    (prompt,) = random_prompts([20], seed=76)
    assert receipt(generate(llama, prompt, image_data="data:image/png;base64,iVBORw0KGgo="))["rows"] == 20
    llama.check(reference, prompt)
    before = llama.counters()["admitted"]
    answer = httpx.post(f"{llama.server.url}/v1/embeddings", json={"model": "x", "input": "t5"}, timeout=60)
    assert answer.status_code == 400
    assert llama.counters()["admitted"] == before
