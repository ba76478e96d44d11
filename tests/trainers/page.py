"""A page of the docs as a program: its fenced blocks, in turn, in one shell that stops at the first failure."""

import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

__all__ = ["run_script", "script_of"]


def script_of(page: Path) -> str:
    """All that ``page`` has in fences: commands as they are, Python handed to ``python``, and nothing else."""
    parts = []
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        assert language in ("sh", "python"), f"{page.name} has a block of {language!r}, which nothing here runs"
        parts.append(block if language == "sh" else f"python - <<'PYTHON'\n{block}PYTHON\n")
    return "".join(parts)


def run_script(script: str, cwd: Path, output: Path, timeout_s: float) -> int:
    """Run ``script`` in bash, its trace in ``output`` too; returns its exit status, and kills what is left."""
    with output.open("w") as file:
        command = ["bash", "-euxo", "pipefail", "-c", script]
        shell = subprocess.Popen(command, cwd=cwd, stdout=file, stderr=file, start_new_session=True)
        try:
            return shell.wait(timeout_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
