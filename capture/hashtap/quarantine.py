"""The samples that were left out, one JSON object a line in ``quarantine.jsonl``.

A line says ``samples`` (the file it came from), ``line``, ``id``, ``reason`` and ``detail``. Each run over
a sample file writes that file's lines anew and keeps those of others.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from hashtap.directory import open_regular, whole_file
from hashtap.errors import FormatError, UsageError
from hashtap.samples import BadSample

__all__ = ["QUARANTINE_NAME", "Quarantine"]

QUARANTINE_NAME = "quarantine.jsonl"
_LIMIT_BYTES = 1 << 30
_LINE_LIMIT_BYTES = 1 << 20


class Quarantine:
    """Opens the file for one run; what is added is in the file at once. A context manager.

    Raises:
        UsageError: when the file cannot be read or written.
        FormatError: when it is not a regular file, or has over 1 GiB.
    """

    def __init__(self, directory: Path, samples: Path) -> None:
        self._samples = str(samples.resolve())
        self.path = directory / QUARANTINE_NAME
        try:
            with whole_file(self.path) as file:
                file.writelines(self._kept())
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
            self._file = os.fdopen(descriptor, "a", encoding="utf-8")
        except FormatError as error:
            raise FormatError(f"{error}; remove it and extract again") from None
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

    def _kept(self) -> Iterator[bytes]:
        """The lines of other sample files, one in memory at a time."""
        try:
            file = open_regular(self.path, _LIMIT_BYTES)
        except FileNotFoundError:
            return
        with file:
            for line in iter(lambda: file.readline(_LINE_LIMIT_BYTES), b""):
                if not self._is_mine(line):
                    yield line.removesuffix(b"\n") + b"\n"

    def _is_mine(self, line: bytes) -> bool:
        try:
            return bool(json.loads(line)["samples"] == self._samples)
        except (ValueError, KeyError, TypeError, RecursionError):
            return True  # cut short by a killed run
