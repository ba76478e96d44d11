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
from tests.server.reference import Reference, assert_same_states
from tests.server.waiting import wait_until

from hashtap.directory import CaptureDirectory
from hashtap.identity import prompt_key
from hashtap.reader import Reader

pytestmark = pytest.mark.server


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.slow)])
def test_kill_9_in_mid_run_then_resume(tmp_path: Path, reference: Reference, kills: int) -> None:
    """Each restart goes on where the last one ended; in the end every sample is there, once."""
    captures = tmp_path / "captures"
    prompts = random_prompts(np.random.default_rng(kills).integers(100, 600, 200).tolist(), seed=20 + kills)
    samples = write_samples(tmp_path / "samples.jsonl", prompts)
    # Small shards, so that some are sealed when the server dies and some are not.
    flags = (*COMMON_FLAGS, *capture_flags(captures, 1, 4, 6), "--capture-shard-gib", 0.003)
    kept: set[bytes] = set()
    for kill in range(kills):
        with Server(models.llama(), *flags, threads=1) as server:
            # What was whole in the dead server's unfinished shard is sealed now.
            assert kept <= sealed(captures)
            client = start_hashtap("extract", samples, "--server", server.url, "--out", captures, "--concurrency", 8)
            assert shared_mb(server) < 16, "a kill would leave the ring in /dev/shm"
            try:
                wanted = len(kept) + 8 + 4 * kill
                wait_until(lambda wanted=wanted: len(sealed(captures)) >= wanted, 120, f"{wanted} prompts to be sealed")
            finally:
                server.kill()
                _, errors = client.communicate(timeout=120)
        assert client.returncode == 3, errors
        assert not Reader(captures).incomplete
        kept = sealed(captures)
    assert len(kept) < len(prompts), "the last kill came too late"
    with Server(models.llama(), *flags, threads=1) as server:
        recovered = sealed(captures)
        assert kept <= recovered
        run_hashtap("extract", samples, "--server", server.url, "--out", captures, "--concurrency", 8)
        counters = server.get("/server_info")["internal_states"][0]["hashtap"]["counters"]
        # Only what was missing was sent again.
        assert counters["admitted"] == len(prompts) - len(recovered)
        assert server.terminate() == 0
    report = run_hashtap("verify", captures, "--samples", samples)
    assert (report["verified"], report["samples"], report["records"]) == (len(prompts),) * 3
    assert report["duplicates"] == report["partials"] == 0
    assert CaptureDirectory.open(captures).partials() == []
    reader = Reader(captures)
    assert reader.keys() == {prompt_key(prompt) for prompt in prompts}
    for prompt in prompts[::25]:
        assert_same_states(reader.by_token_ids(prompt).tensor(), reference.states(prompt), (1, 4, 6))


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


def shared_mb(server: Server) -> float:
    """What the server's processes have mapped of /dev/shm."""
    maps = [mapped for process in server.processes() for mapped in process.memory_maps(grouped=False)]
    return sum(mapped.size for mapped in maps if mapped.path.startswith("/dev/shm")) / 2**20


def sealed(captures: Path) -> set[bytes]:
    """Keys of the records that are there."""
    return set(Reader(captures).keys()) if captures.exists() else set()
