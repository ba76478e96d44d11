"""The suite's own settings."""

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
