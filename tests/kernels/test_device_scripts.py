"""The GPU scripts run from end to end in their dry form, and what must be exact there is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "bench/device").glob("*.py") if path.stem != "harness")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_dry_run(script: str, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    command = [sys.executable, str(ROOT / f"bench/device/{script}.py"), "--dry", "--record", str(record)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "kernels")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    left = json.loads(record.read_text())
    assert left["dry"] is True
    # A dry run measures nothing: no bar is met or missed by a figure of it.
    assert all(bar["ok"] is None for bar in left["bars"] if bar["least"] is not True)
    assert all(bar["ok"] for bar in left["bars"] if bar["least"] is True)
