"""A writer that dies between any two of its steps leaves nothing that a reader could take for data."""

import itertools
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from tests.capture.build import Host, states_of
from tests.capture.test_session import Host as SessionHost
from tests.server.waiting import group_ended, wait_until

from hashtap.directory import CaptureDirectory
from hashtap.identity import prompt_key
from hashtap.reader import Reader
from hashtap.recover import recover
from hashtap.verify import Problem, verify
from hashtap_kernels.layout import Dtype

PROMPTS = [[n] * 40 for n in range(4)]
STEPS = ("os.open", "os.pwrite", "os.fsync", "pathlib.Path.rename", "os.close")


def write(path: Path, step: Callable[[str], None]) -> None:
    """Write two shards of two prompts each, and tell ``step`` of each step before it is taken."""
    with pytest.MonkeyPatch.context() as patch, Host(path, threads=1, codec="none") as host:
        for name in STEPS:
            patch.setattr(name, announced(name, step))
        for ids in PROMPTS:
            host.capture([ids])
            host.settle()
            if ids[0] % 2:
                host.writer.drain()


def announced(name: str, step: Callable[[str], None]) -> Callable[..., Any]:
    module, attribute = name.rsplit(".", 1)
    real = getattr({"os": os, "pathlib.Path": Path}[module], attribute)

    def announced(*arguments: Any, **options: Any) -> Any:
        step(name)
        return real(*arguments, **options)

    return announced


def die_at(path: Path, number: int) -> bool:
    """Write in a child that is killed before its step ``number``; False when there are fewer."""
    child = os.fork()
    if child == 0:
        left = [number]

        def step(_: str) -> None:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

        write(path, step)
        os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL


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
        assert die_at(path, number)
        seen.append(assert_only_whole_records(path))
        with Host(path) as host:
            host.capture([ids for ids in PROMPTS if host.record(ids).key not in Reader(path)])
        report = verify(path, [(str(n), ids, b"") for n, ids in enumerate(PROMPTS)])
        assert (report.ok, report.verified, report.duplicates) == (True, len(PROMPTS), 0)
        assert report.partials <= 1
    assert seen == sorted(seen)
    assert set(seen) == {0, 2, 4}


ANY_TIME = range(100)
QUICK = 12
FORWARDS = 80
"""Of one run: 120 prompts, three at a time, in two chunks."""
LEFT: list[int] = []
"""How many of the 120 were there after each death."""


@pytest.mark.parametrize("number", [pytest.param(n, marks=pytest.mark.slow if n >= QUICK else ()) for n in ANY_TIME])
def test_a_session_that_dies_at_any_time(tmp_path: Path, number: int) -> None:
    """It is restarted and sent again what is missing: then each prompt is there exactly once, and right.

    Its writers die with it, as when SGLang ends, or go on until they have sealed what they were given.
    """
    prompts = prompts_of(number)
    moment = random.Random(number)
    forwards = max(0, moment.randrange(-FORWARDS // 10, FORWARDS))  # some die while they start
    child, told = served(tmp_path / "captures", prompts)
    with told:
        assert told.read(forwards) == b"." * forwards
        time.sleep(moment.uniform(0.0, 0.05 if forwards else 1.0))
        LEFT.append(dies_and_goes_on(tmp_path / "captures", prompts, child, number % 2 == 1))


def test_some_died_in_mid_capture() -> None:
    """Of the seeds that ran in this process, where these are enough to tell."""
    assert len(LEFT) < QUICK or any(0 < left < 120 for left in LEFT), LEFT


@pytest.mark.parametrize("writers_too", [False, True])
def test_a_session_that_dies_in_mid_capture(tmp_path: Path, writers_too: bool) -> None:
    prompts = prompts_of(0)
    child, told = served(tmp_path / "captures", prompts, pause_at=FORWARDS * 3 // 4)
    with told:
        assert told.read(FORWARDS * 3 // 4) == b"." * (FORWARDS * 3 // 4)
        directory = CaptureDirectory.open(tmp_path / "captures")
        wait_until(lambda: bool(directory.shards()), 20, "a sealed shard")
        assert 0 < dies_and_goes_on(directory.path, prompts, child, writers_too) <= len(prompts) * 3 // 4


def prompts_of(number: int) -> list[list[int]]:
    return [[number, n] * (1 + n % 150) for n in range(120)]


def served(path: Path, prompts: list[list[int]], pause_at: int = FORWARDS + 1) -> tuple[int, BinaryIO]:
    """A child that captures prompts, in a group of its own, and a pipe in which it tells each forward by a byte.

    It stops after the forward ``pause_at``.
    """
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        forwards = itertools.count(1)

        def step() -> None:
            os.write(tell, b".")
            if next(forwards) == pause_at:
                signal.pause()

        serve(path, prompts, step)
        os._exit(0)
    os.close(tell)
    with suppress(PermissionError, ProcessLookupError):  # whoever comes first
        os.setpgid(child, child)
    return child, os.fdopen(told, "rb")


def dies_and_goes_on(path: Path, prompts: list[list[int]], child: int, writers_too: bool) -> int:
    """Kill a child that captures, and capture what is missing. Returns how many prompts were there."""
    (os.killpg if writers_too else os.kill)(child, signal.SIGKILL)
    os.waitpid(child, 0)
    wait_until(lambda: group_ended(child), 20, "its writers to end")
    directory = CaptureDirectory.create(path)
    assert verify(path).problems in ([], [Problem("missing", f"there is no sealed shard in {path}")])
    recover(directory)
    there = Reader(path).keys()
    serve(path, [ids for ids in prompts if prompt_key(ids) not in there])
    report = verify(path, [(str(n), ids, b"") for n, ids in enumerate(prompts)])
    assert (report.ok, report.verified, report.duplicates) == (True, len(prompts), 0)
    # A file that was only just made and holds nothing may be a live writer's: it is left alone for a minute.
    assert [file.stat().st_size for file in directory.partials()] in ([], [0])
    for capture in Reader(path):
        ids = capture.token_ids.tolist()
        assert (capture.hidden_states == SessionHost.states(ids, dtype=Dtype.FP32).numpy()).all()
    return len(there)


def serve(path: Path, prompts: list[list[int]], step: Callable[[], object] = lambda: None) -> None:
    """Capture prompts through a whole session, three at a time, each in two chunks; ``step`` after each forward."""
    host = SessionHost(path, dtype=Dtype.FP32, capture_shard_gib=1 / 1024, capture_ring_gib=0.05)
    for start in range(0, len(prompts), 3):
        batch = {str(start + n): ids for n, ids in enumerate(prompts[start : start + 3])}
        kept = [host.admit(rid, ids) for rid, ids in batch.items()]
        while not host.session.may_admit():
            time.sleep(0.001)
        host.forward(*((rid, ids[: len(ids) // 2], 0) for rid, ids in batch.items()))
        step()
        host.forward(*((rid, ids[len(ids) // 2 :], len(ids) // 2) for rid, ids in batch.items()))
        step()
        del kept
    host.close()
