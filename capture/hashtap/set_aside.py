"""Records that nobody shall use although a sealed shard lists them, one JSON object a line in ``set-aside.jsonl``.

``hashtap verify --set-aside`` notes there what it found wrong: readers leave it out, a trainer goes on without it, and
``hashtap extract`` captures its samples anew. A shard itself never changes.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from hashtap.directory import locked, read_regular
from hashtap.errors import FormatError, UsageError
from hashtap.report import Problem

__all__ = ["SET_ASIDE_NAME", "Pass", "add_set_aside", "load_set_aside"]

SET_ASIDE_NAME = "set-aside.jsonl"
_LIMIT_BYTES = 1 << 30

Pass = tuple[str, int]
"""The uuid of a writing run and a serial in it: what names a record for good, whatever its shards are called."""


def load_set_aside(directory: Path) -> frozenset[Pass]:
    """The records that are set aside in ``directory``.

    Raises:
        FormatError: when the file is damaged: better none of the captures than a bad one among them.
    """
    path = directory / SET_ASIDE_NAME
    try:
        lines = read_regular(path, _LIMIT_BYTES).splitlines()
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror or error}") from None
    found = set()
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            found.add((str(entry["writer"]), int(entry["serial"])))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise FormatError(
                f"line {number} of {path} is damaged: mend it, or remove the file and run hashtap verify --set-aside"
            ) from None
    return frozenset(found)


def add_set_aside(directory: Path, problems: Iterable[Problem]) -> int:
    """Set aside the records that ``problems`` are of; returns how many those are. Verifies may run side by side.

    Raises:
        UsageError: when the file cannot be written.
        FormatError: when it is damaged.
    """
    path = directory / SET_ASIDE_NAME
    draft = directory / f"{SET_ASIDE_NAME}.partial"
    try:
        with locked(directory):
            known = set(load_set_aside(directory))
            lines = [path.read_text()] if known else []
            before = len(known)
            for problem in problems:
                if problem.writer is None or problem.serial is None or (problem.writer, problem.serial) in known:
                    continue
                known.add((problem.writer, problem.serial))
                entry = {
                    "writer": problem.writer,
                    "serial": problem.serial,
                    "key": problem.key,
                    "samples": problem.sample_ids,
                    "reason": problem.kind,
                    "detail": str(problem),
                }
                lines.append(json.dumps(entry) + "\n")
            if len(known) > before:
                with draft.open("w") as file:
                    file.writelines(lines)
                    file.flush()
                    os.fsync(file.fileno())
                draft.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
    return len(known) - before
