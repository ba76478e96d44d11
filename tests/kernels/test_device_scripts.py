"""The GPU scripts run from end to end in their dry form, and what must be exact there is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    command = [sys.executable, str(ROOT / "bench/device/all.py"), "--dry", "--record", str(record)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "kernels"), str(ROOT / "capture")])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    left = json.loads(record.read_text())
    assert (left["dry"], left["ok"]) == (True, True)
    run = {command.split()[0] for stage in left["scripts"] for command in stage["commands"]}
    assert run == {path.stem for path in (ROOT / "bench/device").glob("*.py")} - {"all", "harness"}
    # A dry run measures nothing: no bar is met or missed by a figure of it.
    measured = [bar for bar in left["bars"] if bar["least"] is not True]
    assert {bar["figure"].split()[0] for bar in measured} >= {"kernel", "planes", "transfer", "prefill"}
    assert all(bar["ok"] is None for bar in measured)
    assert all(bar["ok"] for bar in left["bars"] if bar["least"] is True)
    assert sum("bits equal" in bar["figure"] for bar in left["bars"]) > 10
