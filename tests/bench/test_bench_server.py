"""The whole command on a tiny model: real servers, all sides, record, table and plot."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench.report import report
from tests import models

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1800)]

FLAGS = ("--device", "cpu", "--chunked-prefill-size", 128, "--max-total-tokens", 8192, "--capture-ring-gib", 0.125)
SHAPE = ("--random-ids", "--prompts", 12, "--tokens", "20-200", "--max-rounds", 1, "--rounds", 1, "--decode-tokens", 8)


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hashtap", "bench", "server", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)


def leftovers(work: Path) -> list[Path]:
    return list(work.iterdir())


def test_every_side_is_measured_and_what_is_not_whole_is_said(tmp_path: Path) -> None:
    work, target = tmp_path / "work", tmp_path / "record.json"
    work.mkdir()
    peers = ("--against", "http,dump,transformers", "--layers", "1,4,6", "--work-dir", work)
    done = bench(models.llama(), *SHAPE, *peers, "--json", target, "--plot", tmp_path / "plot", "--", *FLAGS)
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(target.read_text())
    sides = record["sides"]
    assert list(sides) == ["plain", "aux", "hashtap", "http", "dump", "transformers"]
    assert {name: side["complete"] for name, side in sides.items()} == {
        "plain": None,
        "aux": None,
        "hashtap": True,
        "http": False,  # the last chunk's rows of three layers
        "dump": True,
        "transformers": True,
    }
    assert record["boundaries"] == [1, 4, 6]
    assert record["asked"]["layers"] == sides["hashtap"]["layers"] == 4
    assert record["verified"]["prompts"] == 12 + 12 + 8
    assert sides["http"]["layers"] == 3
    assert sides["http"]["rows"] < sides["dump"]["rows"] == record["asked"]["rows"]
    assert record["tokens_per_s"]["ratio_median"] > 0
    assert record["step_s"]["ratio_median"] > 0
    assert "http is incomplete" in " ".join(done.stdout.split())
    assert (tmp_path / "plot.png").exists()
    assert (tmp_path / "plot.svg").exists()
    assert "hashtap ÷ plain in prompt tokens/s" in report([target])
    assert leftovers(work) == []


def test_one_server_at_a_time_and_json_on_standard_output(tmp_path: Path) -> None:
    done = bench(models.llama(), *SHAPE, "--one-at-a-time", "--json", "-", "--work-dir", tmp_path, "--", *FLAGS)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["one_at_a_time"] is True
    assert list(record["sides"]) == ["plain", "aux", "hashtap"]
    assert record["sides"]["hashtap"]["complete"] is True
    assert leftovers(tmp_path) == []


def test_a_server_that_does_not_start_is_one_clear_error(tmp_path: Path) -> None:
    done = bench(models.llama(), *SHAPE, "--work-dir", tmp_path, "--", "--device", "cpu", "--no-such-flag")
    assert done.returncode == 3
    assert "no-such-flag" in done.stderr
    assert "hashtap: " in done.stderr
    assert "Traceback" not in done.stderr
    assert leftovers(tmp_path) == []
