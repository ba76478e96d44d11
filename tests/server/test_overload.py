"""More prompts than a server takes: it turns some away, and the client comes back with them."""

from pathlib import Path

import pytest
from tests.server.cli import run_hashtap, write_samples
from tests.server.conftest import served
from tests.server.prompts import random_prompts
from tests.server.reference import Reference

pytestmark = [pytest.mark.server, pytest.mark.slow]

PROMPTS = 2000


@pytest.mark.cell("more prompts than a server takes", "exact", "2,000 at once, 32 may wait: the others are sent again")
def test_2000_in_flight(tmp_path: Path, reference: Reference) -> None:
    prompts = random_prompts([4 + number % 9 for number in range(PROMPTS)], seed=120)
    samples = write_samples(tmp_path / "samples.jsonl", prompts)
    # What stands in the queue for longer than half a second is aborted.
    impatient = {"SGLANG_REQ_WAITING_TIMEOUT": "0.5"}
    flags = ("--max-running-requests", 8, "--max-queued-requests", 32)
    with served(tmp_path, *flags, environment=impatient) as server:
        command = ("extract", samples, "--server", server.server.url, "--out", server.captures)
        summary = run_hashtap(*command, "--concurrency", PROMPTS)
        assert summary["captured"] == PROMPTS
        assert summary["left_out"] == {}
        assert summary["sent"] > PROMPTS
        server.check(reference, *prompts[::100])
        assert server.server.terminate() == 0
    report = run_hashtap("verify", server.captures, "--samples", samples)
    assert (report["verified"], report["samples"], report["records"]) == (PROMPTS,) * 3
