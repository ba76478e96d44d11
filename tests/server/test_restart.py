"""A server that is killed loses what was not sealed and nothing else; one that is told to stop seals first."""

import time
from pathlib import Path

import numpy as np
import pytest
from bench.server import Server
from tests import models
from tests.server.cli import run_hashtap, start_hashtap, write_samples
from tests.server.conftest import COMMON_FLAGS, capture_flags
from tests.server.prompts import random_prompts, receipt, send_together
from tests.server.waiting import wait_until

from hashtap.directory import CaptureDirectory
from hashtap.identity import prompt_key
from hashtap.reader import Reader

pytestmark = pytest.mark.server


@pytest.mark.timeout(600)
def test_kill_9_in_mid_run_then_resume(tmp_path: Path) -> None:
    captures = tmp_path / "captures"
    prompts = random_prompts(np.random.default_rng(1).integers(100, 700, 120).tolist(), seed=11)
    samples = write_samples(tmp_path / "samples.jsonl", prompts)
    # Small shards, so that some are sealed when the server dies and some are not.
    flags = (*COMMON_FLAGS, *capture_flags(captures, 1, 4, 6), "--capture-shard-gib", 0.005)

    with Server(models.llama(), *flags, threads=1) as server:
        client = start_hashtap("extract", samples, "--server", server.url, "--out", captures, "--concurrency", 8)
        directory = CaptureDirectory.open(captures)
        wait_until(lambda: len(directory.shards()) >= 2, 60, "the first shards to be sealed")
        server.kill()
        client.communicate(timeout=120)
        assert client.returncode != 0
    before = Reader(captures)
    kept = {key for key in map(prompt_key, prompts) if key in before}
    assert 0 < len(kept) < len(prompts)

    with Server(models.llama(), *flags, threads=1) as server:
        # What was whole in the dead server's unfinished shard is sealed now.
        recovered = {key for key in map(prompt_key, prompts) if key in Reader(captures)}
        assert kept <= recovered
        out = ("--server", server.url, "--out", captures)
        run_hashtap("extract", samples, *out, "--concurrency", 8)
        report = run_hashtap("verify", captures, "--samples", samples)
        assert (report["verified"], report["samples"]) == (len(prompts), len(prompts))
        counters = server.get("/server_info")["internal_states"][0]["hashtap"]["counters"]
        # Only what was missing was sent again.
        assert counters["admitted"] == len(prompts) - len(recovered)
    assert not Reader(captures).duplicates


def test_sigterm_seals_what_was_captured(tmp_path: Path) -> None:
    captures = tmp_path / "captures"
    prompts = random_prompts([10, 300, 50], seed=12)
    flags = (*COMMON_FLAGS, "--capture-dir", captures, "--capture-ring-gib", 0.125, "--capture-seal-after-s", 3600)
    with Server(models.llama(), *flags, threads=1) as server:
        answers = send_together(server, prompts)
        assert {receipt(answer)["state"] for answer in answers} == {"captured"}
        assert not CaptureDirectory.open(captures).shards()
        started = time.monotonic()
        assert server.terminate() == 0
        assert time.monotonic() - started < 60
    reader = Reader(captures)
    for prompt in prompts:
        assert reader.by_token_ids(prompt).hidden_states.shape == (len(prompt), 4, 256)
    assert not CaptureDirectory.open(captures).partials()
    assert reader.facts.boundaries == (2, 4, 5)  # the default on 8 layers
