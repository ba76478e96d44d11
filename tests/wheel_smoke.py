"""Run by ``make wheel`` in an environment that has the wheel and its own dependencies only."""

import subprocess
import sys
from pathlib import Path

import hashtap
import hashtap_kernels

for package in (hashtap, hashtap_kernels):
    place = Path(package.__file__).resolve()
    assert "elsewhere" in place.parts, f"{package.__name__} came from {place}, not from the wheel"
    assert (place.parent / "py.typed").exists(), f"{package.__name__} ships no py.typed"

reader = hashtap.open(sys.argv[1])
rows = sum(len(capture) for capture in reader)
assert rows > 0
heavy = {"torch", "triton", "sglang"} & set(sys.modules)
assert not heavy, f"reading shards imported {heavy}"

command = Path(sys.executable).with_name("hashtap")
answer = subprocess.run([command, "show", sys.argv[1]], capture_output=True, text=True, check=False)
assert answer.returncode == 2, answer
assert "hashtap[cli]" in answer.stderr, answer.stderr
print(f"the wheel is whole: {len(reader)} records, {rows} rows read without torch")
