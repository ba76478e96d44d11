"""Several writers, one directory: nothing is lost, and nobody touches a live writer's files."""

import errno
import fcntl
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.capture.build import Host, states_of
from tests.server.waiting import wait_until

from hashtap.directory import CaptureDirectory
from hashtap.reader import Reader
from hashtap.recover import recover
from hashtap.verify import verify

RANKS = 3


def prompts_of(server: int, rank: int) -> list[list[int]]:
    return [[server, rank, n] * (1 + n % 40) for n in range(120)]


def useless(*_: object) -> None:
    """A lock that everybody is granted, as on some network file systems."""


def fails(*_: object) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def serve(path: Path, server: int, lock: Callable[..., None] = fcntl.flock) -> int:
    """A server of several ranks in a process of its own: it recovers what it finds, then captures. Returns its pid."""
    child = os.fork()
    if child == 0:
        fcntl.flock = lock
        directory = CaptureDirectory.create(path)
        recover(directory)
        there = Reader(path).keys()
        hosts = [Host(path, threads=1, shard_bytes=60_000, changes={"rank": rank}) for rank in range(RANKS)]
        for turn in zip(*(prompts_of(server, rank) for rank in range(RANKS)), strict=True):
            for host, ids in zip(hosts, turn, strict=True):
                if host.record(ids).key not in there:
                    host.capture([ids])
        for host in hosts:
            host.writer.close()
        os._exit(0)
    return child


def ended(pid: int) -> int:
    return os.waitpid(pid, 0)[1]


def assert_all_there_once(path: Path, servers: int) -> None:
    wanted = [ids for server in range(servers) for rank in range(RANKS) for ids in prompts_of(server, rank)]
    report = verify(path, [(str(n), ids, b"") for n, ids in enumerate(wanted)])
    assert (report.ok, report.verified, report.records, report.duplicates) == (True, len(wanted), len(wanted), 0)
    for capture in Reader(path):
        assert (capture.hidden_states == states_of(capture.token_ids.tolist())).all()


def test_two_servers_of_three_ranks(tmp_path: Path) -> None:
    servers = [serve(tmp_path, server) for server in range(2)]
    assert [ended(pid) for pid in servers] == [0, 0]
    assert_all_there_once(tmp_path, 2)
    directory = CaptureDirectory.open(tmp_path)
    assert directory.partials() == []
    assert len(directory.shards()) > 2 * RANKS
    assert {shard.facts.rank for shard in Reader(tmp_path).shards} == set(range(RANKS))


@pytest.mark.parametrize("after_s", [0.05, 0.2, 0.5])
def test_one_is_killed_and_started_again_beside_another(tmp_path: Path, after_s: float) -> None:
    other, killed = serve(tmp_path, 1), serve(tmp_path, 0)
    time.sleep(after_s)
    os.kill(killed, signal.SIGKILL)
    ended(killed)
    again = serve(tmp_path, 0)
    assert [ended(other), ended(again)] == [0, 0]
    assert_all_there_once(tmp_path, 2)
    # A rank that was killed between making its file and locking it leaves an empty one, which may be a live writer's.
    left = CaptureDirectory.open(tmp_path).partials()
    assert all(f"-{killed}-" in file.name and file.stat().st_size == 0 for file in left)
    assert len(left) <= RANKS


@pytest.mark.parametrize("lock", [useless, pytest.param(fails, marks=pytest.mark.slow)])
def test_where_locks_are_useless(tmp_path: Path, lock: Callable[..., None]) -> None:
    """As above, in a directory whose locks are granted to everybody, or to nobody."""
    other, killed = serve(tmp_path, 1, lock), serve(tmp_path, 0, lock)
    time.sleep(0.3)
    os.kill(killed, signal.SIGKILL)
    ended(killed)
    again = [serve(tmp_path, server, lock) for server in (0, 2)]
    assert [ended(pid) for pid in (other, *again)] == [0, 0, 0]
    assert_all_there_once(tmp_path, 3)


def test_two_recoveries_at_once(tmp_path: Path) -> None:
    """Of several that start at the same moment, one gets a dead writer's file; the result is the same."""
    for server in range(4):
        pid = serve(tmp_path, server)
        wait_until(lambda pid=pid: any(tmp_path.glob(f"*-{pid}-*.partial")), 60, "the server to write")
        os.kill(pid, signal.SIGKILL)
        ended(pid)
    before = len(CaptureDirectory.open(tmp_path).partials())
    servers = [serve(tmp_path, server) for server in range(4)]
    assert [ended(pid) for pid in servers] == [0] * 4
    assert before
    assert len(Reader(tmp_path)) == 4 * RANKS * 120
    assert verify(tmp_path).ok
