"""A small disk of its own for one command: a tmpfs in a mount namespace, which needs no root."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["on_tmpfs"]

ROOT = Path(__file__).parent.parent


def on_tmpfs(path: Path, size_mb: int, *command: str, timeout_s: float = 120.0) -> str:
    """Run a Python command with a tmpfs mounted on ``path``; its output. Skips where nothing can be mounted."""
    mount = f"mount -t tmpfs -o size={size_mb}m none {path}"
    tried = _in_namespace(["sh", "-c", mount], 60.0)
    if tried.returncode:
        pytest.skip(f"this kernel mounts nothing without root: {tried.stderr.strip()}")
    run = _in_namespace(["sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, *command], timeout_s)
    assert run.returncode == 0, run.stderr
    return run.stdout


def _in_namespace(command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    # Nothing that the command started outlives it, nor does its disk.
    namespace = ["unshare", "-Urmpf", "--mount-proc", "--kill-child"]
    return subprocess.run(
        [*namespace, *command], capture_output=True, text=True, timeout=timeout_s, check=False, env=environment
    )
