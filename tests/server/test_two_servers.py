"""Two servers that capture to one directory, one of which is killed and started again."""

from pathlib import Path

import pytest
from bench.server import Server
from tests import models
from tests.server.cli import run_hashtap, start_hashtap, write_samples
from tests.server.conftest import COMMON_FLAGS, capture_flags
from tests.server.prompts import random_prompts
from tests.server.waiting import wait_until

from hashtap.directory import CaptureDirectory
from hashtap.reader import Reader

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.mark.timeout(1500)
def test_one_is_killed_beside_the_other(tmp_path: Path) -> None:
    """Nothing is lost, nothing is there twice, and nobody touches what the other one writes."""
    captures = tmp_path / "captures"
    halves = [random_prompts([200 + n for n in range(100)], seed=seed) for seed in (31, 32)]
    samples = [write_samples(tmp_path / f"{n}.jsonl", half, prefix=f"h{n}-") for n, half in enumerate(halves)]
    flags = (*COMMON_FLAGS, *capture_flags(captures, 1, 4, 6), "--capture-shard-gib", 0.003, "--capture-writers", 1)

    def extract(number: int, server: Server) -> tuple[object, ...]:
        return ("extract", samples[number], "--server", server.url, "--out", captures, "--concurrency", 4)

    with Server(models.llama(), *flags, threads=1) as lives:
        with Server(models.llama(), *flags, threads=1) as dies:
            clients = [start_hashtap(*extract(number, server)) for number, server in enumerate((lives, dies))]
            wait_until(lambda: len({shard.facts.writer for shard in Reader(captures).shards}) == 2, 120, "both to seal")
            dies.kill()
            clients[1].communicate(timeout=120)
        assert clients[1].returncode == 3
        with Server(models.llama(), *flags, threads=1) as again:
            run_hashtap(*extract(1, again))
            assert again.terminate() == 0
        _, errors = clients[0].communicate(timeout=240)
        assert clients[0].returncode == 0, errors
        assert lives.terminate() == 0
    everything = write_samples(tmp_path / "all.jsonl", [prompt for half in halves for prompt in half], prefix="all-")
    report = run_hashtap("verify", captures, "--samples", everything)
    assert (report["verified"], report["samples"], report["records"]) == (200, 200, 200)
    assert report["duplicates"] == 0
    assert CaptureDirectory.open(captures).partials() == []
