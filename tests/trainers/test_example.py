"""``examples/train_eagle3.md``, command by command: a real server, the released trainer, a checkpoint."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from tests.capture.test_extract import free_port
from tests.models import smollm2

ROOT = Path(__file__).parents[2]
TRAINER = ROOT / ".cache" / "trainers" / "speculators"


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.trainer
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not (TRAINER / ".installed").exists(), reason="make test-trainers makes speculators' environment")
def test_from_capture_to_checkpoint(tmp_path: Path) -> None:
    page = (ROOT / "examples" / "train_eagle3.md").read_text()
    script = "\n".join(re.findall(r"^```sh\n(.*?)^```", page, re.DOTALL | re.MULTILINE))
    for said, here in (
        ("make .venv/.installed .cache/trainers/speculators/.installed\n", ""),
        ("$repo/.venv/bin/python", sys.executable),
        ("$PWD/.cache/example", str(tmp_path / "run")),
        ("30333", str(free_port())),
    ):
        assert said in script
        script = script.replace(said, here)
    run = tmp_path / "run"
    run.mkdir()
    (run / "model").symlink_to(smollm2())  # made already; to make it again takes half a minute
    with (tmp_path / "output").open("w+") as output:
        shell = subprocess.Popen(
            ["bash", "-euxo", "pipefail", "-c", script], cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        )
        try:
            status = shell.wait(1740)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
    told = (tmp_path / "output").read_text()
    logs = [path.read_text()[-2000:] for path in (run / "server.log", run / "train.log") if path.exists()]
    assert status == 0, "\n".join([told[-4000:], *logs])
    assert "64/64 verified" in told
    last = re.search(r"(\d+) steps: loss ([\d.]+) to ([\d.]+); validation ([\d.]+) to ([\d.]+)", told)
    assert last is not None
    print(last.group())
    steps, _, _, first, end = map(float, last.groups())
    assert steps > 80
    assert end < 0.8 * first
    config = json.loads((run / "checkpoints" / "checkpoint_best" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 15, 27]
    assert (run / "losses.svg").stat().st_size > 1000
