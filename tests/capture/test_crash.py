"""A writer that dies between any two of its steps leaves nothing that a reader could take for data."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.capture.build import Host, states_of

from hashtap.reader import Reader
from hashtap.verify import verify

PROMPTS = [[n] * 40 for n in range(4)]
STEPS = ("os.open", "os.pwrite", "os.fsync", "pathlib.Path.rename", "os.close")


def write(path: Path, step: Callable[[str], None]) -> None:
    """Write two shards of two prompts each, and tell ``step`` of each step before it is taken."""
    with pytest.MonkeyPatch.context() as patch, Host(path, threads=1, codec="none") as host:
        for name in STEPS:
            patch.setattr(name, _announced(name, step))
        for ids in PROMPTS:
            host.capture([ids])
            host.settle()
            if ids[0] % 2:
                host.writer.drain()


def _announced(name: str, step: Callable[[str], None]) -> Callable[..., Any]:
    module, attribute = name.rsplit(".", 1)
    real = getattr({"os": os, "pathlib.Path": Path}[module], attribute)

    def announced(*arguments: Any, **options: Any) -> Any:
        step(name)
        return real(*arguments, **options)

    return announced


def die_at(path: Path, number: int) -> None:
    """Write in a child that is killed before its step ``number``."""
    child = os.fork()
    if child == 0:
        left = [number]

        def step(_: str) -> None:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

        write(path, step)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def assert_only_whole_records(path: Path) -> int:
    """Check that all that is visible is right; returns how much that is."""
    reader = Reader(path)
    for capture in reader:
        assert (capture.hidden_states == states_of(capture.token_ids.tolist())).all()
    assert not reader.incomplete
    return len(reader)


def test_death_at_every_step(tmp_path: Path) -> None:
    steps: list[str] = []
    write(tmp_path / "whole", steps.append)
    assert {step for step in steps if step.startswith(("os.fsync", "pathlib"))} == {"os.fsync", "pathlib.Path.rename"}
    seen = []
    for number in range(len(steps)):
        path = tmp_path / str(number)
        die_at(path, number)
        seen.append(assert_only_whole_records(path))
        with Host(path) as host:
            host.capture([ids for ids in PROMPTS if host.record(ids).key not in Reader(path)])
        report = verify(path, [(str(n), ids, b"") for n, ids in enumerate(PROMPTS)])
        assert (report.ok, report.verified, report.duplicates) == (True, len(PROMPTS), 0)
        assert report.partials <= 1
    assert seen == sorted(seen)
    assert set(seen) == {0, 2, 4}


def test_death_at_any_time(tmp_path: Path) -> None:
    for number in range(12):
        path = tmp_path / str(number)
        child = os.fork()
        if child == 0:
            with Host(path, threads=1, shard_bytes=30_000) as host:
                for start in range(10_000):
                    host.capture([[start, n] * 20 for n in range(3)])
            os._exit(0)
        time.sleep(0.01 + 0.02 * number)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if (path / "hashtap.json").exists():
            assert_only_whole_records(path)
            assert verify(path).partials <= 1
