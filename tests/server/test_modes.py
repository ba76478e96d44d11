"""Modes in which SGLang schedules otherwise: several ranks, mixed chunks, retractions, holding back."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from tests import models
from tests.server.conftest import served
from tests.server.plugins import plugin
from tests.server.prompts import random_prompts, receipt, send_together
from tests.server.reference import Reference
from tests.server.waiting import wait_until

from hashtap.identity import prompt_key
from hashtap.reader import Reader
from hashtap.releases import installed_sglang, predates

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]

TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
FOUR_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1|0|1"}


@pytest.mark.cell("tensor parallelism", "exact", "`--tp-size 2` and `4`: one rank writes, once")
@pytest.mark.parametrize(("ranks", "environment"), [(2, TWO_RANKS), (4, FOUR_RANKS)], ids=["2", "4"])
def test_tensor_parallel_ranks_write_once(tmp_path: Path, ranks: int, environment: dict[str, str]) -> None:
    reference = Reference(models.llama(plain=True, kv_heads=4))  # on a CPU ranks cannot share one
    prompts = random_prompts([5, 128, 300, 700, 33], seed=40)
    with served(
        tmp_path, "--tp-size", ranks, "--capture-writers", 1, model=models.llama(kv_heads=4), environment=environment
    ) as server:
        for prompt, answer in zip(prompts, send_together(server.server, prompts), strict=True):
            assert receipt(answer)["rows"] == len(prompt)
        server.check(reference, *prompts)
        assert server.server.terminate() == 0
    reader = Reader(server.captures)
    assert not reader.duplicates
    assert len({shard.facts.writer for shard in reader.shards}) == 1


@pytest.mark.skipif(predates(installed_sglang()[0], "0.5.23"), reason="refused: see test_refusals")
@pytest.mark.cell("data parallelism", "exact", "`--dp-size 2`: each rank writes files of its own")
def test_two_data_parallel_servers_share_a_directory(tmp_path: Path, reference: Reference) -> None:
    prompts = random_prompts([50] * 12, seed=41)
    with served(tmp_path, "--dp-size", 2, "--capture-writers", 1, environment=TWO_RANKS) as server:
        send_together(server.server, prompts)
        server.check(reference, *prompts)
        assert server.server.terminate() == 0
    assert len({shard.facts.writer for shard in Reader(server.captures).shards}) == 2


@pytest.mark.cell("mixed chunks", "exact", "`--enable-mixed-chunk`; decode rows of others are nobody's prompt")
def test_mixed_chunks(tmp_path: Path, reference: Reference) -> None:
    decoding, late = random_prompts([20] * 4, seed=42), random_prompts([300] * 4, seed=43)
    with served(tmp_path, "--enable-mixed-chunk") as server:
        with ThreadPoolExecutor(8) as pool:
            running = [pool.submit(server.server.generate, p, max_new_tokens=300, ignore_eos=True) for p in decoding]
            wait_until(lambda: server.counters()["captured"] == 4, 60, "the decoding ones to start")
            answers = list(pool.map(server.server.generate, late))
            answers += [one.result() for one in running]
        assert [receipt(answer)["rows"] for answer in answers] == [300] * 4 + [20] * 4
        server.check(reference, *(decoding + late))
        assert server.counters()["restarted"] == 0
        assert len(Reader(server.captures)) == 8


@pytest.mark.cell("retraction", "exact", "forced at every 20th step, 8 prompts: prompt rows, once")
def test_retracted_prompts_are_one_record_of_prompt_rows(tmp_path: Path, reference: Reference) -> None:
    prompts = random_prompts([20] * 8, seed=44)
    retracting = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "20"}
    with served(tmp_path, environment=retracting) as server:
        answers = send_together(server.server, prompts, max_new_tokens=60, ignore_eos=True)
        assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
        assert {receipt(answer)["state"] for answer in answers} == {"captured"}
        server.check(reference, *prompts)
        assert {len(capture) for capture in Reader(server.captures)} == {20}
        # What is prefilled again after the prompt was captured is nobody's, the prompt's rows among it.
        assert (server.counters()["restarted"], server.counters()["duplicates"]) == (0, 0)


def test_requests_all_leaves_out_warm_up_and_health(tmp_path: Path) -> None:
    (prompt,) = random_prompts([40], seed=47)
    with served(tmp_path, "--capture-requests", "all") as server:
        for _ in range(3):
            httpx.get(f"{server.server.url}/health", timeout=30)
        assert server.counters()["admitted"] == 0
        server.server.generate(prompt, custom_params=None)
        assert len(server.captured(prompt)) == 1
        assert server.counters()["admitted"] == 1


HOLD_BACK = """
# Says "no" most of the time, as a full ring would; on the writing rank only.
import random
import hashtap.session

def register():
    asked = random.Random(1)
    hashtap.session.Session.may_admit = lambda self: asked.random() < 0.02
"""


FORGET_A_LAYER = """
# The model hands out a layer less when the batch has 77 rows.
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

def forget(result, model, input_ids, *args, **kwargs):
    return (result[0], result[1][:-1]) if input_ids.shape[0] == 77 else None

def register():
    HookRegistry.register("sglang.srt.models.llama.LlamaModel.forward", forget, HookType.AFTER)
"""


@pytest.mark.cell("held back", "exact", "new prompts wait for a full ring, on one and on two ranks")
@pytest.mark.parametrize("ranks", [1, 2])
def test_holding_back_prompts_loses_and_stalls_nothing(tmp_path: Path, reference: Reference, ranks: int) -> None:
    environment = plugin(tmp_path, HOLD_BACK) | (TWO_RANKS if ranks == 2 else {})
    prompts = random_prompts(np.random.default_rng(48).integers(1, 600, 40).tolist(), seed=48)
    with served(tmp_path, "--tp-size", ranks, environment=environment) as server:
        with ThreadPoolExecutor(16) as pool:
            decoding = pool.submit(server.server.generate, [3, 4, 5], max_new_tokens=200, ignore_eos=True)
            answers = list(pool.map(server.server.generate, prompts))
            assert decoding.result()["meta_info"]["completion_tokens"] == 200
        assert [receipt(answer)["rows"] for answer in answers] == [len(prompt) for prompt in prompts]
        server.check(reference, *prompts)


@pytest.mark.cell("a batch with a layer less", "refused", "the server ends, what was whole is sealed")
def test_a_layer_that_is_no_longer_handed_out_ends_the_server(tmp_path: Path) -> None:
    # Checked on every batch: SGLang's own check looks at the first only.
    environment = plugin(tmp_path, FORGET_A_LAYER)
    good, bad = random_prompts([76, 77], seed=49)
    with served(tmp_path, environment=environment) as server:
        assert receipt(server.server.generate(good))["state"] == "captured"
        with pytest.raises(httpx.HTTPError):
            server.server.generate(bad)
        assert server.server.process is not None
        assert server.server.wait(60) != 0
        assert "the model no longer hands out what was set up at the start" in server.server.log_text()
    reader = Reader(server.captures)
    assert prompt_key(good) in reader  # what was whole was sealed on the way out
    assert prompt_key(bad) not in reader


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_whole_process_group_seals(tmp_path: Path, number: signal.Signals) -> None:
    (prompt,) = random_prompts([200], seed=50)
    with served(tmp_path, "--capture-seal-after-s", 3600) as server:
        server.server.generate(prompt)
        assert not list(server.captures.glob("*.safetensors"))
        assert server.server.process is not None
        os.killpg(server.server.process.pid, number)
        server.server.process.wait(60)
    assert len(Reader(server.captures).by_token_ids(prompt)) == 200
