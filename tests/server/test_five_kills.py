"""A server that is killed again and again in the middle of a run."""

from pathlib import Path

import numpy as np
import pytest
from bench.server import Server
from tests import models
from tests.server.cli import run_hashtap, start_hashtap, write_samples
from tests.server.conftest import COMMON_FLAGS, capture_flags
from tests.server.prompts import random_prompts
from tests.server.reference import Reference, assert_same_states
from tests.server.waiting import wait_until

from hashtap.directory import CaptureDirectory
from hashtap.identity import prompt_key
from hashtap.reader import Reader

pytestmark = [pytest.mark.server, pytest.mark.slow]

KILLS = 5


@pytest.mark.timeout(1500)
def test_five_kills(tmp_path: Path) -> None:
    """Each restart goes on where the last one ended; in the end every sample is there, once."""
    captures = tmp_path / "captures"
    prompts = random_prompts(np.random.default_rng(2).integers(100, 600, 200).tolist(), seed=21)
    samples = write_samples(tmp_path / "samples.jsonl", prompts)
    flags = (*COMMON_FLAGS, *capture_flags(captures, 1, 4, 6), "--capture-shard-gib", 0.003)
    counts = [0]
    for kill in range(KILLS):
        with Server(models.llama(), *flags, threads=1) as server:
            client = start_hashtap("extract", samples, "--server", server.url, "--out", captures, "--concurrency", 8)
            assert shared_mb(server) < 16, "a kill would leave the ring in /dev/shm"
            try:
                wanted = counts[-1] + 8 + 4 * kill
                wait_until(lambda wanted=wanted: sealed(captures) >= wanted, 120, f"{wanted} prompts to be sealed")
            finally:
                server.kill()
                _, errors = client.communicate(timeout=120)
        assert client.returncode == 3, errors
        assert not Reader(captures).incomplete
        counts.append(sealed(captures))
    assert counts[-1] < len(prompts), "the last kill came too late"
    with Server(models.llama(), *flags, threads=1) as server:
        run_hashtap("extract", samples, "--server", server.url, "--out", captures, "--concurrency", 8)
        assert server.terminate() == 0
    report = run_hashtap("verify", captures, "--samples", samples)
    assert (report["verified"], report["samples"], report["records"]) == (len(prompts),) * 3
    assert report["duplicates"] == report["partials"] == 0
    assert CaptureDirectory.open(captures).partials() == []
    reader, reference = Reader(captures), Reference(models.llama(plain=True))
    assert reader.keys() == {prompt_key(prompt) for prompt in prompts}
    for prompt in prompts[::25]:
        assert_same_states(reader.by_token_ids(prompt).tensor(), reference.states(prompt), (1, 4, 6))


def shared_mb(server: Server) -> float:
    """What the server's processes have mapped of /dev/shm."""
    maps = [mapped for process in server.processes() for mapped in process.memory_maps(grouped=False)]
    return sum(mapped.size for mapped in maps if mapped.path.startswith("/dev/shm")) / 2**20


def sealed(captures: Path) -> int:
    return len(Reader(captures)) if captures.exists() else 0
