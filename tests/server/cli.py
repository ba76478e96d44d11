"""The command line, run as a user runs it."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["run_hashtap", "start_hashtap", "write_samples"]


def start_hashtap(*arguments: object) -> "subprocess.Popen[str]":
    """Start ``hashtap …``."""
    command = [sys.executable, "-m", "hashtap", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_hashtap(*arguments: object, status: int = 0) -> dict[str, Any]:
    """Run ``hashtap … --json`` to its end, which must be with ``status``; its answer."""
    process = start_hashtap(*arguments, "--json")
    answer, errors = process.communicate(timeout=240)
    assert process.returncode == status, f"exit status {process.returncode}\n{answer}\n{errors}"
    return dict(json.loads(answer))


def write_samples(path: Path, prompts: Sequence[list[int]], *, prefix: str = "s-") -> Path:
    """A sample file: prompt i has the id ``s-i``, or another prefix."""
    lines = (json.dumps({"id": f"{prefix}{number}", "input_ids": prompt}) for number, prompt in enumerate(prompts, 1))
    path.write_text("".join(f"{line}\n" for line in lines))
    return path
