"""hashtap's numbers among SGLang's own."""

from pathlib import Path

import httpx
import numpy as np
import pytest
from bench.server import Server
from tests import models
from tests.server.conftest import COMMON_FLAGS, capture_flags
from tests.server.prompts import random_prompts, send_together
from tests.server.waiting import wait_until

from hashtap.reader import Reader

pytestmark = [pytest.mark.server, pytest.mark.slow]


def shown(server: Server) -> dict[str, float]:
    """What ``/metrics`` says of hashtap on the writing rank."""
    lines = httpx.get(f"{server.url}/metrics", timeout=30).raise_for_status().text.splitlines()
    found = (line.rsplit(" ", 1) for line in lines if line.startswith("hashtap_") and 'rank="0"' in line)
    return {name.partition("{")[0]: float(value) for name, value in found}


def test_prometheus_has_every_number(tmp_path: Path) -> None:
    prompts = random_prompts(np.random.default_rng(60).integers(100, 400, 12).tolist(), seed=60)
    rows = sum(map(len, prompts))
    flags = (*capture_flags(tmp_path / "captures", 1, 4, 6), "--enable-metrics")
    with Server(models.llama(), *COMMON_FLAGS, *flags, threads=1) as server:
        send_together(server, prompts)
        server.generate(prompts[0])
        wait_until(lambda: shown(server).get("hashtap_duplicates_total") == 1, 60, "the numbers to be told")
        wait_until(lambda: shown(server)["hashtap_records_total"] == len(prompts), 60, "all to be sealed")
        found = shown(server)
        assert "sglang:prompt_tokens_total" in httpx.get(f"{server.url}/metrics", timeout=30).text
        log = server.log_text()
    sealed = Reader(tmp_path / "captures")
    assert found["hashtap_rows_total"] == rows + len(prompts[0])
    assert found["hashtap_raw_bytes_total"] == found["hashtap_rows_total"] * 4 * 256 * 2
    assert found["hashtap_ratio"] == found["hashtap_raw_bytes_total"] / found["hashtap_stored_bytes_total"]
    assert (found["hashtap_captured_total"], found["hashtap_admitted_total"]) == (len(prompts) + 1, len(prompts) + 1)
    assert found["hashtap_shards_total"] >= 1
    assert found["hashtap_seal_ms_total"] >= 0
    assert (found["hashtap_queue"], found["hashtap_ring_used_bytes"]) == (0, 0)
    for name in ("dropped", "write_errors", "bad_frames", "failed_proofs", "incomplete", "refused"):
        assert found[f"hashtap_{name}_total"] == 0
    # And a line in the log for every shard.
    assert all(f"sealed {shard.path}: {len(shard.records)} records" in log for shard in sealed.shards)
