"""What a figure depends on: command, commit, versions, machine."""

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["surroundings"]

PACKAGES = ("hashtap", "numpy", "safetensors", "sglang", "torch", "transformers", "triton", "zstandard")


def surroundings(command: Sequence[str]) -> dict[str, Any]:
    """The head of a record, as JSON takes it; ``commit`` is null where hashtap does not run from a checkout."""
    return {
        "command": " ".join(command),
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "machine": {
            "cpus": os.cpu_count(),
            "model": _cpu_model(),
            "gpus": _run("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines(),
            "system": platform.release().split("-")[0],
        },
        "date": time.strftime("%Y-%m-%d"),
    }


def _commit() -> str | None:
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    git = ("git", "-C", str(root))
    # A run that writes several records changes the first of them before it looks here for the second.
    changed = _run(*git, "status", "--porcelain", "--untracked-files=no", "--", ":!bench/results")
    return _run(*git, "rev-parse", "HEAD") + ("+changes" if changed else "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _run(*command: str) -> str:
    """What it prints; nothing where it fails or is not installed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
