"""Other ways to start: ``sglang.Engine`` with ``hashtap.enable``, ``sglang serve``, the environment twins."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from bench.server import Server
from tests import models
from tests.server.conftest import COMMON_FLAGS
from tests.server.prompts import random_prompts, receipt

from hashtap.reader import Reader

pytestmark = [pytest.mark.server, pytest.mark.slow]

SCRIPT = """
import json, sys
import hashtap

options = json.loads(sys.argv[1])

if __name__ == "__main__":
    hashtap.enable(**options["capture"])
    import sglang

    engine = sglang.Engine(**options["engine"])
    params = {"max_new_tokens": 1, "temperature": 0, "custom_params": {"hashtap": True}}
    answers = engine.generate(input_ids=options["prompts"], sampling_params=params)
    print("receipts", json.dumps([answer["meta_info"]["hashtap"] for answer in answers]))
    engine.shutdown()
"""


def run_engine(tmp_path: Path, prompts: list[list[int]], **engine: object) -> "subprocess.CompletedProcess[str]":
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = {
        "capture": {"capture_dir": str(tmp_path / "captures"), "capture_layers": [1, 4, 6], "capture_ring_gib": 0.125},
        "engine": {
            "model_path": str(models.llama()),
            "device": "cpu",
            "chunked_prefill_size": 128,
            "max_total_tokens": 16384,
            **engine,
        },
        "prompts": prompts,
    }
    command = [sys.executable, str(script), json.dumps(options)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_OFFLINE": "1"}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)


def test_engine_captures_and_seals(tmp_path: Path) -> None:
    prompts = random_prompts([5, 200, 60], seed=30)
    answer = run_engine(tmp_path, prompts)
    assert answer.returncode == 0, answer.stderr[-4000:]
    (line,) = [line for line in answer.stdout.splitlines() if line.startswith("receipts ")]
    receipts = json.loads(line.removeprefix("receipts "))
    assert [receipt[-1]["rows"] for receipt in receipts] == [5, 200, 60]
    reader = Reader(tmp_path / "captures")
    assert [len(reader.by_token_ids(prompt)) for prompt in prompts] == [5, 200, 60]
    assert reader.facts.boundaries == (1, 4, 6)


def test_engine_raises_what_it_cannot_do(tmp_path: Path) -> None:
    answer = run_engine(tmp_path, [[3, 4]], enable_return_hidden_states=True)
    assert answer.returncode != 0
    assert "hashtap.errors.SetupError: --enable-return-hidden-states does not go together with capture" in answer.stderr


def test_sglang_serve_with_options_from_the_environment(tmp_path: Path) -> None:
    (prompt,) = random_prompts([150], seed=31)
    environment = {
        "HASHTAP_CAPTURE_DIR": str(tmp_path / "captures"),
        "HASHTAP_CAPTURE_LAYERS": "3 5 7",
        "HASHTAP_CAPTURE_RING_GIB": "0.125",
    }
    server = Server(models.llama(), *COMMON_FLAGS, threads=1, environment=environment)
    serve = [str(Path(sys.executable).with_name("sglang")), "serve"]
    server.command = [*serve, *server.command[server.command.index("--model-path") :]]
    with server:
        assert receipt(server.generate(prompt))["rows"] == len(prompt)
        assert server.terminate() == 0
    reader = Reader(tmp_path / "captures")
    assert reader.by_token_ids(prompt).boundaries == (3, 5, 7)
