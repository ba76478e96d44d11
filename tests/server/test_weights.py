"""Weights that change under a running server, or between two: each capture is of one epoch, and says of which."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests import models
from tests.server.conftest import Served, capture_flags, served
from tests.server.prompts import random_prompts, receipt, send_together
from tests.server.reference import Reference, assert_same_states
from tests.server.test_refusals import refused
from tests.server.waiting import wait_until

from hashtap.errors import MismatchError
from hashtap.identity import prompt_key
from hashtap.reader import Reader

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose weights each test changes in its own way."""
    with served(tmp_path_factory.mktemp("trained")) as server:
        yield server


def captured_under(server: Served, prompts: list[list[int]], seed: int) -> str:
    """Captures prompts with the weights of a seed; the epoch, under which they must be, with these weights' rows."""
    epochs = {receipt(answer)["epoch"] for answer in send_together(server.server, prompts)}
    (epoch,) = epochs
    assert server.server.get("/hashtap/info")["epoch"] == epoch
    weights, reader = Reference(models.llama(plain=True, seed=seed)), Reader(server.captures, epoch=epoch)

    def sealed() -> bool:
        reader.refresh()
        return all(prompt_key(prompt) in reader for prompt in prompts)

    wait_until(sealed, 30, "the prompts to be sealed under their epoch")
    for prompt in prompts:
        assert_same_states(reader.by_token_ids(prompt).tensor(), weights.states(prompt), server.boundaries)
    return epoch


@pytest.mark.cell("new weights in mid-run", "exact", "`/update_weights_from_disk`: a new epoch, new shards")
def test_from_disk(trained: Served) -> None:
    prompts = random_prompts([40, 300], seed=46)
    first = captured_under(trained, prompts, 0)
    assert trained.post("/update_weights_from_disk", {"model_path": str(models.llama(seed=1))})["success"]
    second = captured_under(trained, prompts, 1)
    assert second.endswith("+1")
    assert second.partition("+")[0] != first
    with pytest.raises(MismatchError, match="choose one with epoch="):
        Reader(trained.captures).by_token_ids(prompts[0])


@pytest.mark.cell("weights from a trainer's memory", "exact", "`/update_weights_from_tensor`, in three calls")
@pytest.mark.cell("weights from a process group", "exact", "`/update_weights_from_distributed`, in three calls")
@pytest.mark.parametrize(("how", "seed"), [("tensor", 2), ("distributed", 3)])
def test_from_a_trainer(trained: Served, tmp_path: Path, how: str, seed: int) -> None:
    prompts = random_prompts([40, 300], seed=47)
    before = trained.server.get("/hashtap/info")["epoch"]
    command = [sys.executable, "-m", "tests.server.weight_sender", trained.server.url, models.llama(seed=seed), how]
    log = tmp_path / "log"
    with log.open("wb") as output:  # no pipe: what keeps the shared memory outlives the sender and would hold it open
        sent = subprocess.run(list(map(str, command)), stdout=output, stderr=output, timeout=240)
    assert sent.returncode == 0, log.read_text()[-4000:]
    assert captured_under(trained, prompts, seed).partition("+")[0] != before.partition("+")[0]


@pytest.mark.cell("an update that fails", "exact", "a new epoch: it may have changed a part")
def test_an_update_that_fails(trained: Served, tmp_path: Path) -> None:
    """One over IPC needs a GPU: here it always fails. One from an empty folder, too."""
    trained.post("/update_weights_from_disk", {"model_path": str(models.llama())})
    epochs = [captured_under(trained, random_prompts([30], seed=48), 0)]
    for path, body in (
        ("/update_weights_from_ipc", {"zmq_handles": {}}),
        ("/update_weights_from_disk", {"model_path": str(tmp_path)}),
    ):
        assert httpx.post(trained.server.url + path, json=body, timeout=120).status_code == 400
        epochs.append(captured_under(trained, random_prompts([30], seed=48), 0))
    assert len(set(epochs)) == 3
    assert len({epoch.partition("+")[0] for epoch in epochs}) == 1


@pytest.mark.cell("new weights between two chunks", "marked", "paused in place, updated, continued: `incomplete`")
def test_between_two_chunks(trained: Served) -> None:
    """A prompt of which a part was computed comes to no record, those beside it do."""
    prompts = random_prompts([2500] * 4, seed=49)
    before = trained.counters()
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(trained.server.generate, prompt) for prompt in prompts]
        wait_until(lambda: (trained.counters() - before)["rows"] > 0, 60, "the first chunk")
        with trained.paused("in_place"):
            url = f"{trained.server.url}/update_weights_from_disk"
            answer = httpx.post(url, json={"model_path": str(models.llama(seed=1))}, timeout=120)
            assert "Weights were updated, but the cache was not flushed" in answer.text
        found = [receipt(answer.result()) for answer in answers]
    (cut,) = [prompt for prompt, one in zip(prompts, found, strict=True) if one["state"] != "captured"]
    (said,) = [one for one in found if one["state"] != "captured"]
    assert (said["state"], said["reason"]) == ("incomplete", "the weights were updated between two chunks")
    assert len({one["epoch"] for one in found}) <= 2
    reader = Reader(trained.captures)
    assert prompt_key(cut) not in reader
    references = {seed: Reference(models.llama(plain=True, seed=seed)) for seed in (0, 1)}
    whole = [(prompt, one["epoch"]) for prompt, one in zip(prompts, found, strict=True) if prompt != cut]
    for number, ((prompt, epoch), capture) in enumerate(
        zip(whole, trained.captured(*(prompt for prompt, _ in whole)), strict=True)
    ):
        assert capture.facts.epoch == epoch
        weights = references[int(epoch == said["epoch"])]
        rows = len(prompt) if number == len(whole) - 1 else 256  # transformers takes its time over long ones
        assert_same_states(capture.tensor()[:rows], weights.states(prompt[:rows]), trained.boundaries)


@pytest.mark.cell(
    "another checkpoint at the same path", "refused", "at start, with both epochs: it goes to a directory of its own"
)
def test_another_checkpoint_at_the_same_path(tmp_path: Path, reference: Reference) -> None:
    """The path, the config and all shapes are the same: only the weights tell."""
    model, (prompt,) = tmp_path / "model", random_prompts([200], seed=57)
    shutil.copytree(models.llama(), model)
    with served(tmp_path, model=model) as server:
        assert receipt(server.server.generate(prompt))["state"] == "captured"
        server.check(reference, prompt)
        assert server.server.terminate() == 0
    before = Reader(server.captures).facts.epoch
    shutil.copytree(models.llama(seed=1), model, dirs_exist_ok=True)
    line = refused(model, *capture_flags(server.captures, *server.boundaries))
    assert f"its epoch is {before}" in line
    assert "another --capture-dir" in line
