"""A trainer that follows a real server's directory while a client fills it."""

import json
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from tests.server.cli import start_hashtap
from tests.server.conftest import Served
from tests.server.prompts import random_prompts
from tests.server.waiting import wait_until

from hashtap.datasets import CaptureDataset
from hashtap.live import LiveStream
from hashtap.manifest import Manifest
from hashtap.order import SealingOrder

pytestmark = [pytest.mark.server, pytest.mark.slow]


def test_a_stream_has_what_the_finished_directory_has(llama: Served, tmp_path: Path) -> None:
    prompts = random_prompts(np.random.default_rng(81).integers(1, 300, 60).tolist(), seed=81)
    names = [f"live-{number}" for number in range(60)]
    samples = tmp_path / "samples.jsonl"
    rows = zip(names, prompts, strict=True)
    samples.write_text("".join(json.dumps({"id": name, "input_ids": ids}) + "\n" for name, ids in rows))
    client = start_hashtap(
        "extract", samples, "--server", llama.server.url, "--out", llama.captures, "--ahead-samples", 16
    )
    order = SealingOrder(llama.captures, llama.server.get("/hashtap/info")["epoch"])

    def begun() -> bool:
        order.look()  # other tests have captured to the directory, and ended
        return "live-0" in Manifest.load(llama.captures) and order.end is None

    wait_until(begun, 60, "the extraction to begin")
    seen: dict[str, torch.Tensor] = {}

    def train() -> None:
        for batch in LiveStream(llama.captures, batch_size=5, idle_s=20.0, poll_s=0.1):
            for row, name in enumerate(batch["sample_ids"]):
                assert name not in seen
                seen[name] = batch["hidden_states"][row][batch["attention_mask"][row]]

    trainer = Thread(target=train)
    trainer.start()
    _, errors = client.communicate(timeout=120)
    assert client.returncode == 0, errors
    trainer.join(60)
    assert set(names) <= seen.keys()
    dataset = CaptureDataset(llama.captures, sample_ids=names)
    for number, name in enumerate(names):
        assert torch.equal(dataset[number]["hidden_states"].view(torch.int16), seen[name].view(torch.int16))
