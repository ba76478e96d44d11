"""An extraction client that is killed at any time, and started again: every sample is there, once."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.capture.peer import Answer, Peer
from tests.capture.test_crash import announced
from tests.capture.test_extract import ROOT, prompts, write

from hashtap.identity import prompt_key
from hashtap.manifest import Manifest
from hashtap.reader import Reader
from hashtap.samples import load_samples
from hashtap.verify import verify

COUNT = 150


def start_client(samples: Path, peer: Peer) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "hashtap", "extract", str(samples), "--server", peer.url]
    command += ["--out", str(peer.directory), "--concurrency", "8"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def slow(attempt: int, body: dict[str, Any]) -> Answer:
    return 0.05


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_a_killed_client_goes_on(tmp_path: Path, seed: int) -> None:
    """Killed three times, each time after some more of its requests have reached the server."""
    wanted, rng = prompts(COUNT), random.Random(seed)
    samples = write(tmp_path / "s.jsonl", wanted)
    with Peer(tmp_path / "captures", trouble=slow, options={"capture_shard_gib": 1 / 1024}) as peer:
        for _ in range(3):
            before, more = len(peer.received), rng.randrange(COUNT // 4)
            client = start_client(samples, peer)
            while client.poll() is None and len(peer.received) < before + more:
                time.sleep(0.002)
            time.sleep(rng.uniform(0.0, 0.05))
            assert client.poll() is None, client.communicate()
            client.kill()
            client.communicate()
            assert client.returncode == -signal.SIGKILL
            for capture in Reader(peer.directory):
                assert capture.token_ids.tolist() in wanted
        there = {prompt_key(ids) for ids in wanted} & Reader(peer.directory).keys()
        before = len(peer.received)
        client = start_client(samples, peer)
        _, errors = client.communicate(timeout=60)
        assert client.returncode == 0, errors
        assert len(peer.received) - before <= COUNT - len(there)
    report = verify(peer.directory, [(str(n), ids, b"") for n, ids in enumerate(wanted)])
    assert (report.ok, report.verified, report.records, report.duplicates) == (True, COUNT, COUNT, 0)
    assert len(Manifest.load(peer.directory)) == COUNT
    assert len(Reader(peer.directory)) == COUNT


def test_death_at_every_step_of_the_manifest(tmp_path: Path) -> None:
    """It holds the samples of before or those of after, and the next client writes it whole."""
    old, new = (write(tmp_path / f"{count}.jsonl", prompts(6)[:count]) for count in (2, 6))

    def merge(path: Path, samples: Path) -> Manifest:
        return Manifest.merge(path, load_samples(samples).samples, epoch="weights-1", directory_uuid="u")

    lengths = []
    for number in range(100):
        path = tmp_path / str(number)
        path.mkdir()
        merge(path, old)
        if (child := os.fork()) == 0:
            left = [number]
            step = dying(left)
            with pytest.MonkeyPatch.context() as patch:
                for name in ("os.open", "pathlib.Path.open", "os.fsync", "pathlib.Path.replace", "os.close"):
                    patch.setattr(name, announced(name, step))
                merge(path, new)
            os._exit(0)
        died = os.waitpid(child, 0)[1] == signal.SIGKILL
        lengths.append(len(Manifest.load(path)))
        assert len(merge(path, new)) == 6
        assert sorted(file.name for file in path.iterdir()) == ["manifest.parquet"]
        if not died:
            break
    assert lengths == sorted(lengths)
    assert set(lengths) == {2, 6}


def dying(left: list[int]) -> Callable[[str], None]:
    def step(_: str) -> None:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    return step
