"""Captures of many times the ring's size: memory stays what it was, and nothing lies in shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RING_MB, ROUNDS = 256, 500

CHILD = """
import json, os, signal, sys, time
from pathlib import Path
import torch
from tests.attacks.victim import memory
from tests.capture import test_session

test_session.HIDDEN = 1024
path, ring_mb, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
host = test_session.Host(path, capture_ring_gib=ring_mb / 1024, capture_codec="none", capture_shard_gib=1 / 16)
ids = list(range(512))
rows = host.states(ids)
host.states = lambda *_: rows  # they take longer to make than to capture
waits, peaks, writers = 0, [], host.session._writers.pids
for pid in writers:
    os.kill(pid, signal.SIGSTOP)  # until the ring is full
for number in range(rounds):
    kept = host.admit(str(number), [number, *ids[1:]])
    while not host.session.may_admit():
        waits += 1
        for pid in writers:
            os.kill(pid, signal.SIGCONT)
        time.sleep(0.01)
    assert host.forward((str(number), [number, *ids[1:]], 0))[0]["state"] == "captured"
    peaks.append(memory("VmHWM"))
    for shard in path.glob("*.safetensors"):
        shard.unlink()
host.session.close()
shared = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm" in line]
print(json.dumps({"waits": waits, "peaks": peaks, "counters": host.session.counters(), "shared": shared}))
"""


@pytest.mark.slow
def test_two_gigabytes_through_a_small_ring(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-c", CHILD, str(tmp_path / "captures"), str(RING_MB), str(ROUNDS)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, env=environment)
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    counters, peaks = answer["counters"], answer["peaks"]
    assert counters["captured"] == counters["records"] == ROUNDS
    assert counters["raw_bytes"] == ROUNDS * 512 * 4 * 1024 * 2 > 7 * (RING_MB << 20)
    assert counters["dropped"] == counters["write_errors"] == 0
    assert answer["waits"] > 0
    assert peaks[-1] - peaks[40] < 32 << 10
    assert answer["shared"] == []
