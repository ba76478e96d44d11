"""The suite's own settings."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_run_that_loads_sentencepiece_ends_in_order(tmp_path: Path) -> None:
    """With its warnings as errors, all tests pass and then the process dies of SIGSEGV."""
    path = tmp_path / "test_it.py"
    path.write_text("def test_it():\n    import sentencepiece\n")
    command = [sys.executable, "-m", "pytest", "-q", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT, path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_contributing_says_what_ci_runs() -> None:
    lines = re.findall(r"^make (.+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    verbs = [verb for line in lines for verb in (line.split() if "=" not in line else [line])]
    (said,) = re.findall(
        r"^CI runs `\.ci/run`: (.+?)\.$", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert re.findall(r"`make (.+?)`", said) == verbs
