"""The samples that were left out, one JSON object a line in ``quarantine.jsonl``.

A line says ``samples`` (the file it came from), ``line``, ``id``, ``reason`` and ``detail``. Each run over
a sample file writes that file's lines anew and keeps those of others.
"""

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from hashtap.errors import UsageError
from hashtap.samples import BadSample

__all__ = ["QUARANTINE_NAME", "Quarantine"]

QUARANTINE_NAME = "quarantine.jsonl"


class Quarantine:
    """Opens the file for one run; what is added is in the file at once. A context manager.

    Raises:
        UsageError: when the file cannot be written.
    """

    def __init__(self, directory: Path, samples: Path) -> None:
        self._samples = str(samples.resolve())
        self.path = directory / QUARANTINE_NAME
        partial = directory / f"{QUARANTINE_NAME}.partial"
        try:
            kept = [line for line in self._lines() if not self._is_mine(line)]
            with partial.open("w", encoding="utf-8") as file:
                file.writelines(kept)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(self.path)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {self.path}: {error.strerror or error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, bad: BadSample) -> None:
        """Note one sample and why it was left out."""
        entry = {"samples": self._samples, "line": bad.line, "id": bad.id, "reason": bad.reason, "detail": bad.detail}
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def _lines(self) -> list[str]:
        try:
            return self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        except FileNotFoundError:
            return []

    def _is_mine(self, line: str) -> bool:
        try:
            return bool(json.loads(line)["samples"] == self._samples)
        except (ValueError, KeyError, TypeError):
            return True  # cut short by a killed run
