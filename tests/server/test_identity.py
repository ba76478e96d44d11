"""Which rows belong to which prompt, whatever the server does to batches, chunks and order."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import httpx
import numpy as np
import pytest
from safetensors import safe_open
from tests.models import TINY_LAYERS
from tests.server.cli import run_hashtap, write_samples
from tests.server.conftest import CHUNK_TOKENS, Served
from tests.server.prompts import random_prompts, receipt, send_together
from tests.server.reference import Reference
from tests.server.waiting import wait_until

from hashtap.identity import prompt_key
from hashtap.reader import Reader
from hashtap.releases import installed_sglang, predates

pytestmark = pytest.mark.server

FOUND, _ = installed_sglang()


def shards(served: Served) -> set[Path]:
    return set(served.captures.glob("*.safetensors*"))


@pytest.mark.cell("health checks and warm-up", "exact", "none of them is captured")
def test_warm_up_and_health_checks_are_not_captured(llama: Served) -> None:
    before, files = llama.counters(), shards(llama)
    for _ in range(20):
        assert httpx.get(f"{llama.server.url}/health", timeout=30).status_code == 200
    after = llama.counters()
    # The warm-up came first of all; the health checks between the two looks.
    assert (after - before)["admitted"] == 0
    assert shards(llama) == files
    assert prompt_key([0]) not in Reader(llama.captures)


def test_the_log_says_what_is_captured(llama: Served) -> None:
    log = llama.server.log_text()
    row_bytes = 4 * 256 * 2
    assert "layers     boundary 1, boundary 4, boundary 6, final (post-norm)" in log
    assert f"a token    4 x 256 bfloat16 = {row_bytes:,} bytes" in log
    assert f"directory  {llama.captures}" in log
    assert log.count("radix cache is off") == 1


def test_info(llama: Served) -> None:
    info = llama.server.get("/hashtap/info")
    reader = Reader(llama.captures)
    assert info["directory"] == reader.directory.uuid
    assert info["boundaries"] == [1, 4, 6]
    assert (info["layers"], info["hidden"], info["dtype"], info["final_norm"]) == (4, 256, "bfloat16", "post")
    assert (info["vocab_size"], info["max_prompt_tokens"]) == (512, 4089)  # 6 below the context of 4,096 less one


@pytest.mark.cell("chunks of 128 tokens", "exact", "the same prompts again, in another order: one record each")
def test_same_prompts_in_another_order_and_batch(llama: Served, reference: Reference) -> None:
    prompts = random_prompts([37, 512, 5, 900], seed=1)
    before = llama.counters()
    together = send_together(llama.server, prompts)
    for prompt, answer in zip(prompts, together, strict=True):
        assert receipt(answer)["key"] == prompt_key(prompt).hex()
        assert receipt(answer)["state"] == "captured"
    llama.check(reference, *prompts)
    reversed_answers = send_together(llama.server, prompts[::-1])
    assert [receipt(answer)["rows"] for answer in reversed_answers] == [900, 5, 512, 37]
    wait_until(lambda: (llama.counters() - before)["duplicates"] == 4, 30, "four duplicates to be counted")
    assert len(llama.captured(*prompts)) == 4
    assert not Reader(llama.captures).duplicates


@pytest.mark.parametrize("length", [1, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 2 * CHUNK_TOKENS, 2561])
def test_length_around_chunks(llama: Served, length: int) -> None:
    (prompt,) = random_prompts([length], seed=length)
    answer = llama.server.generate(prompt)
    assert receipt(answer)["rows"] == length
    (capture,) = llama.captured(prompt)
    assert capture.token_ids.tolist() == prompt
    assert capture.hidden_states.shape == (length, 4, 256)


def test_beginning_and_end_tokens_stay(llama: Served) -> None:
    bos, eos = 1, 2
    for prompt in ([bos, 17, 18], [bos, bos, 19], [20, 21, eos, eos, eos]):
        llama.server.generate(prompt)
        (capture,) = llama.captured(prompt)
        assert capture.token_ids.tolist() == prompt


def test_facts_of_the_server_stand_in_the_shard(llama: Served) -> None:
    (prompt,) = random_prompts([10], seed=51)
    llama.server.generate(prompt)
    (capture,) = llama.captured(prompt)
    with safe_open(capture.shard, "np") as file:  # type: ignore[no-untyped-call]
        metadata = file.metadata()
    assert metadata["hashtap.boundaries"] == "[1, 4, 6]"
    assert json.loads(metadata["hashtap.server_flags"])["tp_size"] == 1


@pytest.mark.cell("other people's prompts", "exact", "without the tag nothing is captured")
def test_only_tagged_prompts_are_captured(llama: Served) -> None:
    before = llama.counters()
    (prompt,) = random_prompts([30], seed=3)
    answer = llama.server.generate(prompt, custom_params=None)
    assert answer["meta_info"].get("hashtap") is None
    assert llama.server.generate(prompt, custom_params={"hashtap": False})["meta_info"].get("hashtap") is None
    assert (llama.counters() - before)["admitted"] == 0


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        pytest.param(
            {"cache_salt": "a"},
            "cache salt",
            marks=pytest.mark.skipif(predates(FOUND, "0.5.18"), reason="its /generate takes no cache salt"),
        ),
        ({"extra_key": "a"}, "extra_key"),
    ],
)
def test_states_that_depend_on_more_than_the_ids_are_refused(llama: Served, extra: dict[str, str], reason: str) -> None:
    (prompt,) = random_prompts([30], seed=4)
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "custom_params": {"hashtap": True}}, **extra}
    answer = httpx.post(f"{llama.server.url}/generate", json=body, timeout=60).raise_for_status().json()
    assert receipt(answer)["state"] == "refused"
    assert reason in receipt(answer)["reason"]


def test_receipt_when_streaming_and_with_several_samples(llama: Served) -> None:
    (prompt,) = random_prompts([33], seed=5)
    body = {
        "input_ids": prompt,
        "stream": True,
        "sampling_params": {"max_new_tokens": 3, "temperature": 0, "custom_params": {"hashtap": True}},
    }
    answer = httpx.post(f"{llama.server.url}/generate", json=body, timeout=60)
    assert f'"key":"{prompt_key(prompt).hex()}"' in answer.text

    body = {**body, "stream": False, "sampling_params": {**body["sampling_params"], "n": 2, "temperature": 1.0}}
    answers = httpx.post(f"{llama.server.url}/generate", json=body, timeout=60).json()
    assert [receipt(one)["key"] for one in answers] == [prompt_key(prompt).hex()] * 2


@pytest.mark.cell("ids outside the vocabulary", "refused", "status 400; on a CPU one would end the server")
def test_an_id_outside_the_vocabulary_is_refused_and_the_server_lives(llama: Served) -> None:
    with pytest.raises(httpx.HTTPStatusError, match="400"):
        llama.server.generate([3, 600])
    (prompt,) = random_prompts([9], seed=61)
    assert receipt(llama.server.generate(prompt))["state"] == "captured"


def test_sealed_route(llama: Served) -> None:
    (prompt,) = random_prompts([40], seed=6)
    llama.server.generate(prompt)
    llama.captured(prompt)
    key, absent = prompt_key(prompt).hex(), "00" * 16
    url = f"{llama.server.url}/hashtap/sealed"
    answer = httpx.post(url, json={"keys": [absent, key]}, timeout=30).json()
    assert answer == {"sealed": [key], "epoch": llama.server.get("/hashtap/info")["epoch"]}
    assert httpx.post(url, json={"keys": ["xyz"]}, timeout=30).status_code == 400
    assert httpx.post(url, content=b"[", timeout=30).status_code == 400


def test_aborted_prompts_leave_nothing_in_the_way(llama: Served) -> None:
    before = llama.counters()
    prompts = random_prompts([3500] * 3, seed=7)
    rids = [uuid4().hex for _ in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(llama.server.generate, p, rid=r) for p, r in zip(prompts, rids, strict=True)]
        wait_until(lambda: llama.counters()["admitted"] == before["admitted"] + 3, 30, "the prompts to arrive")
        for rid in rids:
            httpx.post(f"{llama.server.url}/abort_request", json={"rid": rid}, timeout=30)
        finished = [answer.result()["meta_info"]["finish_reason"]["type"] for answer in answers]
    assert "abort" in finished
    wait_until(lambda: llama.counters()["ring_used_bytes"] == 0, 30, "the ring to be empty")
    (next_prompt,) = random_prompts([200], seed=8)
    assert receipt(llama.server.generate(next_prompt))["state"] == "captured"


def test_200_samples_with_retries_and_repeats(llama: Served, tmp_path: Path) -> None:
    lengths = np.random.default_rng(9).integers(1, 700, 180).tolist()
    distinct = random_prompts(lengths, seed=9)
    prompts = distinct + distinct[:20]
    samples = write_samples(tmp_path / "samples.jsonl", prompts)

    def impatient(prompt: list[int]) -> None:
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "custom_params": {"hashtap": True}}}
        with suppress(httpx.TimeoutException):
            httpx.post(f"{llama.server.url}/generate", json=body, timeout=0.03)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(impatient, distinct[:40]))
    out = ("--server", llama.server.url, "--out", llama.captures)
    run_hashtap("extract", samples, *out, "--concurrency", 16)
    report = run_hashtap("verify", llama.captures, "--samples", samples)
    assert (report["verified"], report["samples"]) == (200, 200)

    reader = Reader(llama.captures)
    for number, prompt in enumerate(prompts, 1):
        assert reader.by_token_ids(prompt).token_ids.tolist() == prompt, f"s-{number}"


def test_renamed_shards_pair_as_before(llama: Served, tmp_path: Path) -> None:
    prompts = random_prompts([50, 60, 70], seed=10)
    for prompt in prompts:
        llama.server.generate(prompt)
        llama.captured(prompt)
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "hashtap.json").write_bytes((llama.captures / "hashtap.json").read_bytes())
    for number, shard in enumerate(sorted(llama.captures.glob("*.safetensors"), reverse=True)):
        (copy / f"hashtap-other-1-r0-00000000-{number:06d}.safetensors").write_bytes(shard.read_bytes())
    mine, theirs = Reader(llama.captures), Reader(copy)
    assert mine.keys() == theirs.keys()
    for prompt in prompts:
        np.testing.assert_array_equal(
            mine.by_token_ids(prompt).hidden_states, theirs.by_token_ids(prompt).hidden_states
        )


def test_boundaries_of_the_shards_are_those_asked_for(llama: Served) -> None:
    facts = Reader(llama.captures).facts
    assert facts.boundaries == (1, 4, 6)
    assert max(facts.boundaries) < TINY_LAYERS
    assert facts.versions["sglang"] == FOUND
    assert facts.server_flags["chunked_prefill_size"] == CHUNK_TOKENS
