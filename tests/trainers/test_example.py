"""``examples/train_eagle3.md``, command by command: a real server, the released trainer, a checkpoint."""

import json
import re
import sys
from pathlib import Path

import pytest
from tests.capture.test_extract import free_port
from tests.models import smollm2
from tests.trainers.page import run_script, script_of

ROOT = Path(__file__).parents[2]
TRAINER = ROOT / ".cache" / "trainers" / "speculators"


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.trainer
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not (TRAINER / ".installed").exists(), reason="make test-trainers makes speculators' environment")
def test_from_capture_to_checkpoint(tmp_path: Path) -> None:
    script = script_of(ROOT / "examples" / "train_eagle3.md")
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
    status = run_script(script, ROOT, tmp_path / "output", 1740)
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
