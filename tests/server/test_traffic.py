"""``--capture-requests all``, warm-ups, health checks and prompts that are cut: whose prompts are stored, and which."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.cli import run_hashtap, write_samples
from tests.server.conftest import Served, served
from tests.server.plugins import plugin
from tests.server.prompts import random_prompts, receipt
from tests.server.reference import Reference

from hashtap.identity import prompt_key
from hashtap.reader import Reader

pytestmark = [pytest.mark.server, pytest.mark.slow]

WARM_UP = """
# A warm-up of its own, as a deployment may have; SGLang's own ones use ids that the tiny model does not have.
from sglang.srt.entrypoints.warmup import warmup
from sglang.srt.managers.io_struct import GenerateReqInput

def register():
    @warmup("long_and_short")
    async def warm(disaggregation_mode, manager):
        for size in (64, 3000, 7):
            request = GenerateReqInput(input_ids=[size % 500 + 3] * size, sampling_params={"max_new_tokens": 1})
            await manager.generate_request(request, None).__anext__()
"""


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("all")
    flags = ("--capture-requests", "all", "--allow-auto-truncate", "--warmups", "long_and_short")
    template = path / "chat.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }} {% endfor %}")
    flags += ("--chat-template", template)
    with served(path, *flags, environment=plugin(path, WARM_UP)) as server:
        yield server


@pytest.mark.cell("warm-ups of one's own", "exact", "`--warmups`, with `--capture-requests all`: none is captured")
def test_warm_ups_come_to_nothing(everything: Served) -> None:
    assert "Running warmup long_and_short" in everything.server.log_text()
    assert "Warmup ended" in everything.server.log_text()
    for _ in range(3):
        httpx.get(f"{everything.server.url}/health_generate", timeout=30).raise_for_status()
    assert everything.counters()["admitted"] == 0
    assert not list(everything.captures.glob("*.safetensors*"))


@pytest.mark.cell(
    "all requests", "exact", "`--capture-requests all`: chats, texts, scores and completions of others, too"
)
def test_half_the_traffic_is_other_peoples(everything: Served, reference: Reference) -> None:
    mine, theirs = random_prompts(range(20, 140, 6), seed=100), random_prompts(range(21, 141, 6), seed=101)
    before = everything.counters()

    def others(number: int) -> None:
        words = " ".join(f"t{token}" for token in theirs[number])
        body = {"model": "x", "max_tokens": 3}
        match number % 4:
            case 0:
                everything.post("/v1/completions", {**body, "prompt": words})
            case 1:
                everything.post("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": words}]})
            case 2:
                everything.server.generate(theirs[number], custom_params=None, max_new_tokens=5)
            case 3:
                score = {"query": words, "items": ["t9", "t10 t11"], "label_token_ids": [5, 6], "model": "x"}
                everything.post("/v1/score", score)

    with ThreadPoolExecutor(16) as pool:
        strangers = [pool.submit(others, number) for number in range(20)]
        answers = list(pool.map(everything.server.generate, mine))
        for stranger in strangers:
            stranger.result()
    assert [receipt(answer)["rows"] for answer in answers] == [len(prompt) for prompt in mine]
    stored = mine + [prompt for number, prompt in enumerate(theirs) if number % 4 < 3]
    everything.check(reference, *stored)
    seen = everything.counters() - before
    assert seen["admitted"] == seen["captured"] == 20 + 15 + 5 * 2  # a score is a prompt for each item


@pytest.mark.cell(
    "chats", "exact", "`/v1/chat/completions`; with `return_meta_info: true` the receipt is in its choices"
)
def test_a_chat_brings_its_receipt(everything: Served, reference: Reference) -> None:
    (prompt,) = random_prompts([31], seed=104)
    body: dict[str, Any] = {"model": "x", "max_tokens": 1, "custom_params": {"hashtap": True}}
    body |= {"messages": [{"role": "user", "content": " ".join(f"t{token}" for token in prompt)}]}
    assert "hashtap" not in json.dumps(everything.post("/v1/chat/completions", body))
    answer = everything.post("/v1/chat/completions", body | {"return_meta_info": True})
    assert receipt(answer["choices"][0])["key"] == prompt_key(prompt).hex()
    everything.check(reference, prompt)


@pytest.mark.cell("not this one, please", "refused", "`hashtap: false` is left out of `--capture-requests all`")
def test_left_out_by_its_tag(everything: Served) -> None:
    (prompt,) = random_prompts([44], seed=102)
    assert not everything.server.generate(prompt, custom_params={"hashtap": False})["meta_info"].get("hashtap")
    assert prompt_key(prompt) not in Reader(everything.captures)


@pytest.mark.cell(
    "auto-truncate", "marked", "no receipt, as no token is made; what is stored has the key of the ids left"
)
def test_a_prompt_that_is_cut_is_another_prompt(everything: Served) -> None:
    (prompt,) = random_prompts([5000], seed=103)
    answer = everything.server.generate(prompt)
    kept = answer["meta_info"]["prompt_tokens"]
    assert kept < len(prompt)
    assert not answer["meta_info"]["hashtap"]  # there is no room left for a token, with which a receipt would come
    (capture,) = everything.captured(prompt[:kept])
    assert len(capture) == kept
    assert prompt_key(prompt) not in Reader(everything.captures)


@pytest.mark.cell("auto-truncate, `hashtap extract`", "refused", "what would be cut is set aside before it is sent")
def test_samples_that_would_be_cut_are_left_out(everything: Served, tmp_path: Path) -> None:
    most = everything.server.get("/hashtap/info")["max_prompt_tokens"]
    samples = write_samples(tmp_path / "samples.jsonl", random_prompts([most, most + 1, 4095, 5000], seed=104))
    out = ("--server", everything.server.url, "--out", everything.captures)
    answer = run_hashtap("extract", samples, *out, status=1)
    assert (answer["captured"], answer["left_out"]) == (1, {"too long": 3})
