"""docs/benchmarks.md is what the committed records say."""

import json
from pathlib import Path
from typing import Any

import pytest
from bench.report import report
from bench.slopes import Curve, Reason
from tests.bench.test_outcome import record

from hashtap.bench.counted import Got
from hashtap.bench.surroundings import surroundings

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_its_records_say() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert page == report(sorted((ROOT / "bench" / "results").glob("*.json"))), "say: python bench/report.py"


def test_every_kind_of_record_is_reported_with_where_it_comes_from(tmp_path: Path) -> None:
    head: dict[str, Any] = surroundings(["hashtap", "bench", "server", "m"]) | {"commit": "abc"}
    server = {"benchmark": "server", "prompts_a_round": 40, "in_flight": 8, "flags": ["--device", "cpu"]}
    server |= {"verified": {"prompts": 120}}
    parts = head | {
        "commit": "def+changes",
        "date": "2026-01-02",
        "benchmarks": [
            {"name": "test_codec", "stats": {"median": 0.002, "rounds": 9}, "extra_info": {"gb_per_s": 1.5}}
        ],
    }
    figures = head | {
        "shards": {"figures": ["shards.read 1.25 GB/s >= 0.9 ok", "shards.x 0.1 >= 0.9 SHORT"], "notes": ["1.3 of 1"]}
    }
    for name, content in (
        ("server", head | server | record(Got(91, 24, 5000))),
        ("parts", parts),
        ("figures", figures),
    ):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    text = report(sorted(tmp_path.iterdir()))
    for line in (
        "## What capture costs a server: m",
        "- command: `hashtap bench server m`",
        "- commit: `abc`, record `bench/results/server.json`",
        "http is incomplete: it gave 91 of 3,000 rows, 3 of 4 layers.",
        "hashtap ÷ plain in prompt tokens/s, round by round: 0.980, 0.990, 0.985.",
        "- commit: `def+changes`, record `bench/results/parts.json`, 2026-01-02",
        "| test_codec | 2 | 9 | 1.5 |",
        "| shards.read | 1.25 GB/s | >= 0.9 | ok |",
        "| shards.x | 0.1 | >= 0.9 | SHORT |",
        "- 1.3 of 1",
    ):
        assert line in text, line
    assert text.count("- machine: ") == text.count("- versions: ") == 3


def test_growth_is_reported_with_what_explains_it(tmp_path: Path) -> None:
    reason = Reason(-0.1, "Short prompts share a forward.")
    falling = Curve(
        "tokens", "us a token", {1: [800.0, 1200.0, 800.0], 256: [11.0, 16.5, 11.0], 1024: [10.0, 15.0, 10.0]}
    )
    rising = Curve("shards", "us to open", {1: [1.0], 10: [10.0], 100: [100.0]})
    level = Curve("hidden", "ns a byte", {576: [2.1], 7168: [2.0]})
    wandering = Curve("layers", "ns a byte", {1: [4.0, 7.0, 7.0], 8: [4.2, 7.35, 4.2]})
    curves = [falling.record(reason), rising.record(reason), level.record(None), wandering.record(None)]
    (tmp_path / "growth.json").write_text(json.dumps(surroundings(["python", "bench/growth.py"]) | {"growth": curves}))
    (tmp_path / "growth.svg").touch()
    text = report([tmp_path / "growth.json"])
    for line in (
        "## How the cost grows",
        "![growth](../bench/results/growth.svg)",
        "| tokens | us a token | 800 at 1 | 10 at 1,024 | -0.67 | 256 | Short prompts share a forward. |",
        "| shards | us to open | 1 at 1 | 100 at 100 | 1.00 | nowhere | NOT EXPLAINED |",
        "| hidden | ns a byte | 2.1 at 576 | 2 at 7,168 | -0.02 | everywhere | flat |",
        "| layers | ns a byte | 5.292 at 1 | 5.556 at 8 | 0.02 | everywhere | flat |",
    ):
        assert line in text, f"{line} is not in\n{text}"


def test_a_gpu_is_reported(tmp_path: Path) -> None:
    bars = [
        {"figure": "kernel came to its end", "value": True, "least": True, "most": None, "ok": True},
        {"figure": "planes over raw", "value": 1.2, "least": None, "most": 1.1, "ok": False},
        {"figure": "prefill ratio", "value": None, "least": 0.99, "most": None, "ok": None},
    ]
    found = surroundings(["python", "bench/device/all.py"]) | {"script": "all", "bars": bars}
    (tmp_path / "device-all.json").write_text(json.dumps(found))
    text = report([tmp_path / "device-all.json"])
    for line in (
        "- command: `python bench/device/all.py`",
        "| kernel came to its end | True | exact | ok |",
        "| planes over raw | 1.2 | <= 1.1 | SHORT |",
        "| prefill ratio | None | >= 0.99 | open |",
    ):
        assert line in text, f"{line} is not in\n{text}"


def test_a_file_that_is_no_record_is_named(tmp_path: Path) -> None:
    assert "No records yet." in report(sorted(tmp_path.iterdir()))
    (tmp_path / "odd.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"odd\.json is no record"):
        report(sorted(tmp_path.iterdir()))
