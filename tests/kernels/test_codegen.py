"""The kernels' machine code for GPUs that are not here: wide accesses, many of them in flight, nothing spilled.

A process of its own compiles them, see ``codegen``: here Triton interprets.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TARGETS = ["sm_80", "sm_90", "sm_100", "sm_120", "gfx942"]
SHAPES = ["1:7168", "2:4096", "3:2880", "4:576", "4:4096", "4:7168", "4:16384", "8:576", "8:7168"]

Facts = dict[str, Any]
Compile = Callable[[list[str]], list[Facts]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))

    def compile_all(cases: list[str]) -> list[Facts]:
        command = [sys.executable, str(Path(__file__).with_name("codegen.py")), *cases]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return compile_all


def shortcomings(facts: Facts) -> list[str]:
    """What is wrong with a kernel's code, in words."""
    target, kernel, layers, hidden = facts["case"].split(":")[:4]
    amd, gather = target == "gfx942", kernel != "restore"
    found = []
    # Narrow on purpose: header, padding and row sum are stored, the control array, ids and positions loaded.
    if facts["other_stores"] > 3 * gather:
        found.append("narrow stores")
    if facts["other_loads"] > (15 if amd else 33) * gather:
        found.append("narrow loads")
    if not facts["wide_loads"] or not facts["wide_stores"]:
        found.append("no wide accesses")
    # A thread of a 256-thread AMD block holds half as much of a tile as one of an NVIDIA block's 128.
    deep = layers == "4" and int(hidden) >= 4096
    if deep and facts["loads_in_flight"] < (4 if amd else 8):
        found.append("few loads in flight")
    # Some versions of ptxas park one 8-byte value.
    if facts["spills"] > 2 or facts["stack_bytes"] > 8:
        found.append("spills")
    return found


def assert_good(facts: list[Facts]) -> None:
    wrong = [(shortcomings(fact), fact) for fact in facts if shortcomings(fact)]
    assert not wrong


def test_code_for_one_gpu_and_that_the_checks_would_notice(compiled: Compile) -> None:
    good = [f"sm_90:{kernel}:4:7168" for kernel in ("raw", "planes", "restore")]
    misaligned = ["sm_90:raw:4:7168:narrow", "sm_90:planes:4:7168:narrow", "sm_90:planes:1:584"]
    facts = compiled(good + misaligned)
    assert len(facts) == 6
    assert_good(facts[:3])
    # Source rows that promise multiples of 8 bytes only, and plane rows that are no multiple of 16.
    assert shortcomings(facts[3]) == ["narrow loads", "few loads in flight"]
    assert shortcomings(facts[4]) == ["narrow loads"]
    assert shortcomings(facts[5]) == ["narrow stores", "no wide accesses"]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_code_for_all(compiled: Compile, target: str) -> None:
    cases = [f"{target}:{kernel}:{shape}" for kernel in ("raw", "planes", "restore") for shape in SHAPES]
    facts = compiled(cases)
    assert [fact["case"] for fact in facts] == cases
    assert_good(facts)
