"""Records that nobody shall use although a sealed shard lists them, one JSON object a line in ``set-aside.jsonl``.

``hashtap verify --set-aside`` notes there what it found wrong: readers leave it out, a trainer goes on without it, and
``hashtap extract`` captures its samples anew. A shard itself never changes.
"""

import io
import json
from collections.abc import Iterable
from pathlib import Path

from hashtap.directory import drop_drafts, locked, read_regular, whole_file
from hashtap.errors import FormatError, UsageError
from hashtap.report import Problem

__all__ = ["SET_ASIDE_NAME", "Pass", "add_set_aside", "load_set_aside"]

SET_ASIDE_NAME = "set-aside.jsonl"
_LIMIT_BYTES = 1 << 26
_LINE_LIMIT_BYTES = 1 << 20
_SAMPLES = 100
"""So many samples of a record are named: the key tells the others."""

Pass = tuple[str, int]
"""The uuid of a writing run and a serial in it: what names a record for good, whatever its shards are called."""


def load_set_aside(directory: Path) -> frozenset[Pass]:
    """The records that are set aside in ``directory``.

    Raises:
        FormatError: when the file is damaged: better none of the captures than a bad one among them.
    """
    path = directory / SET_ASIDE_NAME
    try:
        file = io.BytesIO(read_regular(path, _LIMIT_BYTES))
    except FileNotFoundError:
        return frozenset()
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror or error}") from None
    found = set()
    for number, line in enumerate(iter(lambda: file.readline(_LINE_LIMIT_BYTES), b""), 1):
        try:
            entry = json.loads(line)
            writer, serial = entry["writer"], entry["serial"]
            if not isinstance(writer, str) or type(serial) is not int or not 0 <= serial < 1 << 64:
                raise ValueError
            found.add((writer, serial))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise FormatError(
                f"line {number} of {path} is damaged: mend it, or remove the file and run hashtap verify --set-aside"
            ) from None
    return frozenset(found)


def add_set_aside(directory: Path, problems: Iterable[Problem]) -> int:
    """Set aside the records that ``problems`` are of; returns how many those are. Verifies may run side by side.

    Raises:
        UsageError: when the file cannot be written, or would be longer than a reader takes.
        FormatError: when it is damaged.
    """
    path = directory / SET_ASIDE_NAME
    try:
        with locked(directory):
            known = set(load_set_aside(directory))
            before = read_regular(path, _LIMIT_BYTES).removesuffix(b"\n") + b"\n" if known else b""
            lines = []
            for problem in problems:
                if problem.writer is None or problem.serial is None or (problem.writer, problem.serial) in known:
                    continue
                known.add((problem.writer, problem.serial))
                entry = {
                    "writer": problem.writer,
                    "serial": problem.serial,
                    "key": problem.key,
                    "samples": problem.sample_ids[:_SAMPLES],
                    "reason": problem.kind,
                    "detail": str(problem),
                }
                lines.append(json.dumps(entry).encode() + b"\n")
            if lines:
                text = before + b"".join(lines)
                longest = max(map(len, lines))
                if len(text) > _LIMIT_BYTES or longest > _LINE_LIMIT_BYTES:
                    raise UsageError(
                        f"{path} would have {len(text)} bytes, {longest} of them in a line, and readers take at most "
                        f"{_LIMIT_BYTES} and {_LINE_LIMIT_BYTES}: move the shards of the bad records away and capture "
                        "their samples again"
                    )
                drop_drafts(directory, SET_ASIDE_NAME)
                with whole_file(path) as file:
                    file.write(text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
    return len(lines)
