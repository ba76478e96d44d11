"""Reads hostile directories in every way that hashtap has, with little memory, and tells what came of it.

``python -m tests.attacks.victim DIRECTORY …`` prints one JSON object: by directory, an :class:`Outcome`. One process
reads them all: a limit on its memory holds for everything, and an audit hook sees whether anything is unpickled.
"""

import asyncio
import contextlib
import io
import json
import logging
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from tests.attacks.attack import EPOCH

import hashtap.catalog
from hashtap.__main__ import main as command_line
from hashtap.client import ServerInfo
from hashtap.directory import CaptureDirectory
from hashtap.errors import HashtapError
from hashtap.identity import prompt_key
from hashtap.manifest import Manifest
from hashtap.order import SealingOrder
from hashtap.quarantine import Quarantine
from hashtap.reader import Reader
from hashtap.recover import recover
from hashtap.report import Problem
from hashtap.samples import BadSample, Sample
from hashtap.sealed import SharedDirectory
from hashtap.set_aside import add_set_aside
from hashtap.verify import verify

__all__ = ["Outcome"]

HEADROOM_MB = 256
"""Address space above what the process has when all is imported: what does not fit raises MemoryError."""


@dataclass(slots=True)
class Outcome:
    """What came of one directory.

    Attributes:
        errors: by way of reading, the error's class and message, or "" when there was none.
        captured: the prompts that a lenient reader gave, as lists.
        codes: by command, exit status and what stood on standard error.
        grown_mb: by how much the process's memory ever grew.
    """

    errors: dict[str, str] = field(default_factory=dict)
    captured: list[list[int]] = field(default_factory=list)
    codes: dict[str, tuple[int, str]] = field(default_factory=dict)
    grown_mb: float = 0.0

    def attempt(self, name: str, read: Callable[[], object]) -> None:
        """Read in one way."""
        try:
            read()
            self.errors[name] = ""
        except HashtapError as error:
            self.errors[name] = f"{type(error).__name__}: {error}"
        except BaseException as error:
            self.errors[name] = f"NOT TYPED {type(error).__name__}: {error}"


def look_at(directory: Path) -> Outcome:
    outcome = Outcome()
    forget_peak()
    before = memory("VmRSS")
    outcome.attempt("reader", lambda: read_all(Reader(directory)))
    outcome.attempt("lenient reader", lambda: outcome.captured.extend(read_whole(Reader(directory, strict=False))))
    outcome.attempt("token ids", lambda: [capture.token_ids for capture in Reader(directory)])
    outcome.attempt("verify", lambda: verify(directory))
    outcome.attempt("manifest", lambda: Manifest.load(directory))
    outcome.attempt("order", lambda: follow(directory))
    outcome.attempt("recover", lambda: recover(CaptureDirectory.open(directory)))
    for command in ("verify", "show"):
        outcome.codes[command] = run(command, str(directory))
    outcome.attempt("write", lambda: write(directory))
    outcome.grown_mb = (memory("VmHWM") - before) / 1024
    return outcome


def read_all(reader: Reader) -> None:
    for capture in reader:
        assert len(capture.hidden_states) == len(capture.token_ids)


def read_whole(reader: Reader) -> list[list[int]]:
    """The prompts of the captures that can be read."""
    found = []
    for capture in reader:
        with contextlib.suppress(HashtapError):
            if len(capture.hidden_states):
                found.append(capture.token_ids.tolist())
    return found


def follow(directory: Path) -> None:
    order = SealingOrder(directory, EPOCH)
    order.look()
    order.extend(Reader(directory, epoch=EPOCH, strict=False))


def write(directory: Path) -> None:
    """Write all that ``extract`` and ``verify --set-aside`` write."""
    uuid = CaptureDirectory.open(directory).uuid
    add_set_aside(directory, [Problem("nan", "", writer="a", serial=1)])
    ids = np.array([1, 2], np.int32)
    Manifest.merge(directory, [Sample("a", 1, prompt_key(ids), ids, None)], epoch=EPOCH, directory_uuid=uuid)
    with Quarantine(directory, Path("samples.jsonl")) as quarantine:
        quarantine.add(BadSample(2, None, "empty", ""))
    store = SharedDirectory(directory, ServerInfo(uuid, "", "", EPOCH, (), "post", 4, 72, "bfloat16", 100, 100))
    try:
        asyncio.run(store.begin())
    finally:
        store.close()


def run(*arguments: str) -> tuple[int, str]:
    """Run the command line in this process."""
    sys.argv = ["hashtap", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            command_line()
            code = 0
        except SystemExit as ending:
            code = ending.code if isinstance(ending.code, int) else 0 if ending.code is None else -1
        except BaseException as error:
            return -1, f"Traceback: {type(error).__name__}: {error}"
    return code, err.getvalue() + ("Traceback" if "Traceback" in out.getvalue() else "")


def memory(name: str) -> int:
    """A number of /proc/self/status, in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    raise AssertionError(name)


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def refuse_pickle(event: str, arguments: tuple[object, ...]) -> None:
    if event == "pickle.find_class":
        raise AssertionError(f"a pickle names {arguments}")


if __name__ == "__main__":
    logging.disable()
    hashtap.catalog._WORTH_CACHING = 1  # so that few shards are enough for an index cache
    directories = [Path(argument) for argument in sys.argv[1:]]
    look_at(directories[0])  # imports, thread stacks and pools are there from now on
    sys.addaudithook(refuse_pickle)
    resource.setrlimit(resource.RLIMIT_AS, (memory("VmSize") * 1024 + (HEADROOM_MB << 20),) * 2)
    print(json.dumps({str(directory): asdict(look_at(directory)) for directory in directories}))
