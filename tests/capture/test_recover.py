"""What a killed writer leaves behind is found again: whole frames and prompts, and nothing else."""

import fcntl
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.capture.build import Host, states_of
from tests.capture.test_crash import PROMPTS, announced, die_at

import hashtap.recover
from hashtap.directory import CaptureDirectory, host_name
from hashtap.reader import Reader
from hashtap.recover import Recovery, recover
from hashtap.report import Problem
from hashtap.set_aside import SET_ASIDE_NAME, add_set_aside
from hashtap.shard import read_shard, unsealed_facts
from hashtap.verify import verify

TABLE = np.full((4, 72), 120, np.uint8)


def die(path: Path, prompts: list[list[int]], *, half: list[int] | None = None, **options: object) -> Path:
    """A writer that is killed once everything is written, nothing sealed; returns its partial file."""
    child = os.fork()
    if child == 0:
        host = Host(path, threads=1, **options)  # type: ignore[arg-type]
        host.capture(prompts, chunk=100)
        if half is not None:
            host.forward([(host.record(half), states_of(half), 0, len(half) // 2)])
        host.settle()
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    (partial,) = CaptureDirectory.open(path).partials()
    return partial


def assert_captured(path: Path, prompts: list[list[int]]) -> None:
    reader = Reader(path)
    assert sorted(capture.token_ids.tolist() for capture in reader) == sorted(prompts)
    for capture in reader:
        assert (capture.hidden_states == states_of(capture.token_ids.tolist())).all()
    assert verify(path).ok
    assert reader.duplicates == []


def recovered(path: Path) -> Recovery:
    (recovery,) = recover(CaptureDirectory.open(path))
    return recovery


@pytest.mark.parametrize("codec", ["zstd", "none"])
@pytest.mark.parametrize("table", [None, TABLE], ids=["raw", "planes"])
def test_all_that_was_whole(tmp_path: Path, codec: str, table: object, caplog: pytest.LogCaptureFixture) -> None:
    prompts = [[n] * (1 + 130 * n) for n in range(4)]
    partial = die(tmp_path, prompts, half=[9] * 50, codec=codec, table=table)
    assert len(Reader(tmp_path)) == 0
    recovery = recovered(tmp_path)
    assert (recovery.state, recovery.records, recovery.torn_bytes) == ("recovered", 4, 0)
    assert recovery.rows == sum(map(len, prompts)) + 25
    assert_captured(tmp_path, prompts)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(["hashtap.json", recovery.shard])
    assert recovery.shard == partial.name.removesuffix(".partial")
    assert "its writer died; 4 records" in caplog.text
    assert recover(CaptureDirectory.open(tmp_path)) == []


@pytest.mark.parametrize("cut", [1, 8, 64, 700, 20_000])
def test_a_torn_end(tmp_path: Path, cut: int) -> None:
    """Bytes of the last frame are missing: its prompt is lost, and what is left of it set aside."""
    partial = die(tmp_path, PROMPTS, codec="none")
    data = partial.read_bytes()
    torn = data[data.rfind(b"HASHTAP1") : -cut]
    os.truncate(partial, partial.stat().st_size - cut)
    recovery = recovered(tmp_path)
    assert recovery.records == 3
    assert_captured(tmp_path, PROMPTS[:3])
    assert (tmp_path / f"{recovery.shard}.torn").read_bytes() == torn
    assert recovery.torn_bytes == len(torn)


def test_a_hole_in_the_middle(tmp_path: Path) -> None:
    """A block that never reached the disk takes its frame along, and no other."""
    partial = die(tmp_path, PROMPTS, codec="none")
    data = bytearray(partial.read_bytes())
    second = data.find(b"HASHTAP1", data.find(b"HASHTAP1") + 1)
    data[second + 4096 : second + 8192] = bytes(4096)
    partial.write_bytes(data)
    recovery = recovered(tmp_path)
    assert (recovery.records, recovery.torn_bytes > 0) == (3, True)
    assert len(Reader(tmp_path)) == 3
    assert verify(tmp_path).ok


def test_every_cut(tmp_path: Path) -> None:
    """However short the file: no error, and exactly the prompts whose bytes are all there."""
    source = die(tmp_path / "source", [[1, 2], [3]], codec="none")
    data, name = source.read_bytes(), source.name
    starts = [at for at in range(0, len(data), 64) if data[at : at + 8] == b"HASHTAP1"]
    assert len(starts) == 2
    for number, size in enumerate([0, 1, 8, 9, 100, *range(4000, len(data) + 1, 61), len(data)]):
        path = tmp_path / str(number)
        path.mkdir()
        (path / "hashtap.json").write_bytes((source.parent / "hashtap.json").read_bytes())
        (path / name).write_bytes(data[:size])
        if size == 0:
            os.utime(path / name, (0, 0))
        recovery = recovered(path)
        whole = sum(end <= size for end in (starts[1], len(data)))
        assert recovery.state == ("recovered" if whole else "set aside")
        assert recovery.records == whole
        if whole:
            assert_captured(path, [[1, 2], [3]][:whole])


def test_a_live_writer_is_left_alone(tmp_path: Path) -> None:
    with Host(tmp_path) as host:
        host.capture(PROMPTS)
        host.settle()
        (partial,) = host.directory.partials()
        before = partial.read_bytes()
        recovery = recovered(tmp_path)
        assert (recovery.state, recovery.detail) == ("live", "its writer holds the lock on it")
        assert partial.read_bytes() == before
    assert_captured(tmp_path, PROMPTS)


def test_where_locks_do_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process id decides, then: a live writer keeps its file, a dead one's is recovered."""

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    die(tmp_path, PROMPTS[:2])
    monkeypatch.setattr(fcntl, "flock", refuse)
    with Host(tmp_path) as host:
        host.capture(PROMPTS[2:])
        host.settle()
        states = {recovery.state: recovery for recovery in recover(host.directory)}
        assert set(states) == {"recovered", "live"}
        assert f"there is a process {os.getpid()}" in states["live"].detail
    assert_captured(tmp_path, PROMPTS)


def test_where_locks_are_granted_and_useless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some network file systems: nobody is ever refused. The process id decides there too."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    die(tmp_path, PROMPTS[:2])
    with Host(tmp_path) as host:
        host.capture(PROMPTS[2:])
        host.settle()
        (live,) = (path for path in host.directory.partials() if f"-{os.getpid()}-" in path.name)
        before = live.read_bytes()
        states = {recovery.state: recovery for recovery in recover(host.directory)}
        assert set(states) == {"recovered", "live"}
        assert f"there is a process {os.getpid()}" in states["live"].detail
        assert live.read_bytes() == before
    assert_captured(tmp_path, PROMPTS)


def test_a_process_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where locks do not work the number in the name is asked for, whatever it is."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    partial = die(tmp_path, PROMPTS)
    partial.rename(partial.with_name(f"hashtap-{host_name()}-{'9' * 60}-r0-00000000-000000.safetensors.partial"))
    assert recovered(tmp_path).records == 4
    assert_captured(tmp_path, PROMPTS)


def test_no_more_frames_than_a_reader_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hashtap.salvage.MAX_FRAMES", 3)
    die(tmp_path, PROMPTS)
    recovery = recovered(tmp_path)
    assert (recovery.records, recovery.rows) == (3, 120)
    assert recovery.torn_bytes > 0
    assert_captured(tmp_path, PROMPTS[:3])


@pytest.mark.parametrize("where", ["whole_frames", "_sealed", "whole_records", "_write_shard", "place_first"])
@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_two_recoveries_of_one_file_where_locks_are_useless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, links: bool
) -> None:
    """While one is at it another does it all: whatever the moment, nothing is lost or listed twice."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    if not links:
        monkeypatch.setattr("os.link", lambda *_: (_ for _ in ()).throw(OSError(1, "Operation not permitted")))
    partial = die(tmp_path, PROMPTS, codec="none")
    os.truncate(partial, partial.stat().st_size - 64)
    real = getattr(hashtap.recover, where)

    def overtaken(*arguments: object) -> object:
        monkeypatch.setattr(hashtap.recover, where, real)
        assert recovered(tmp_path).records == 3
        return real(*arguments)

    monkeypatch.setattr(hashtap.recover, where, overtaken)
    recover(CaptureDirectory.open(tmp_path))
    assert_captured(tmp_path, PROMPTS[:3])
    names = sorted(path.name for path in tmp_path.iterdir())
    shard = partial.name.removesuffix(".partial")
    assert names == sorted(["hashtap.json", shard, f"{shard}.torn"])


def test_a_second_recovery_that_dies_where_locks_are_useless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins to write when the first has written all and not yet given it its name."""
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    die(tmp_path, PROMPTS)
    fsync, opened = os.fsync, Path.open

    def die_when_opened(path: Path, *arguments: object, **options: object) -> object:
        file = opened(path, *arguments, **options)  # type: ignore[call-overload]
        if path.name.startswith("."):
            os.kill(os.getpid(), signal.SIGKILL)
        return file

    def overtaken(descriptor: int) -> None:
        fsync(descriptor)
        monkeypatch.setattr(os, "fsync", fsync)
        if (child := os.fork()) == 0:
            monkeypatch.setattr(Path, "open", die_when_opened)
            recover(CaptureDirectory.open(tmp_path))
            os._exit(1)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL

    monkeypatch.setattr(os, "fsync", overtaken)
    assert recovered(tmp_path).records == 4
    assert_captured(tmp_path, PROMPTS)
    assert len(list(tmp_path.iterdir())) == 2


def test_another_hosts_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    die(tmp_path, PROMPTS)
    monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
    assert recovered(tmp_path).state == "live"
    assert len(Reader(tmp_path)) == 0
    (recovery,) = recover(CaptureDirectory.open(tmp_path), other_hosts=True)
    assert recovery.records == 4
    assert_captured(tmp_path, PROMPTS)


@pytest.mark.parametrize("kind", ["link", "dangling link", "other file"])
def test_what_has_the_shards_name_and_is_none(tmp_path: Path, kind: str) -> None:
    """It stands for nothing: what was captured stays until it is out of the way."""
    partial = die(tmp_path / "captures", PROMPTS)
    target = partial.with_name(partial.name.removesuffix(".partial"))
    if kind == "other file":
        target.write_bytes(b"notes")
    else:
        elsewhere = tmp_path / "elsewhere"
        if kind == "link":
            elsewhere.write_bytes(b"notes")
        target.symlink_to(elsewhere)
    recovery = recovered(tmp_path / "captures")
    assert recovery.state == "failed"
    assert f"{target} is no valid shard" in recovery.detail
    assert partial.exists()
    target.unlink()
    assert recovered(tmp_path / "captures").records == len(PROMPTS)
    assert_captured(tmp_path / "captures", PROMPTS)


def test_of_other_weights(tmp_path: Path) -> None:
    """A server recovers what goes with its own captures."""
    partial = die(tmp_path, PROMPTS)
    mine = unsealed_facts(np.fromfile(partial, np.uint8))[0]
    for other in ({"epoch": "weights-2"}, {"boundaries": (1, 3, 4)}, {"final_norm": "pre"}):
        assert recover(CaptureDirectory.open(tmp_path), like=replace(mine, **other)) == []
    assert partial.exists()
    assert len(recover(CaptureDirectory.open(tmp_path), like=replace(mine, seed=(0, 0), rank=3))) == 1


def test_an_empty_file_may_be_new(tmp_path: Path) -> None:
    partial = die(tmp_path, PROMPTS)
    partial.write_bytes(b"")
    assert recovered(tmp_path).state == "live"
    os.utime(partial, (0, 0))
    assert recovered(tmp_path).state == "set aside"


def test_what_others_have_sealed_is_not_listed_again(tmp_path: Path) -> None:
    die(tmp_path, PROMPTS)
    with Host(tmp_path) as host:
        host.capture(PROMPTS[:2])
    assert recovered(tmp_path).records == 2
    assert_captured(tmp_path, PROMPTS)


def test_several_files_with_the_same_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is listed once, and each sealed shard read once, not once a file."""
    path, others = tmp_path / "captures", tmp_path / "others"
    others.mkdir()
    with Host(path) as host:
        host.capture(PROMPTS[:1])
    for _ in range(3):
        partial = die(path, PROMPTS)
        partial.rename(others / partial.name)
    for partial in others.iterdir():
        partial.rename(path / partial.name)
    read: list[Path] = []
    monkeypatch.setattr("hashtap.catalog.read_shard", lambda shard: (read.append(shard), read_shard(shard))[1])
    assert [recovery.records for recovery in recover(host.directory)] == [3, 0, 0]
    assert sorted(read) == host.directory.shards()
    assert_captured(path, PROMPTS)


def test_what_is_set_aside_is_listed_again(tmp_path: Path) -> None:
    """A bad record was captured anew, and the server killed before it was sealed."""
    with Host(tmp_path) as host:
        (bad, _) = host.capture(PROMPTS[:2])
    problem = Problem("nan", "row 0", writer=host.facts.writer, serial=bad.serial)
    assert add_set_aside(tmp_path, [problem]) == 1
    die(tmp_path, PROMPTS)
    assert recovered(tmp_path).records == 3
    assert_captured(tmp_path, PROMPTS)


def test_what_lost_a_shard_is_listed_again(tmp_path: Path) -> None:
    ids = PROMPTS[1]
    with Host(tmp_path) as host:
        record, states = host.record(ids), states_of(ids)
        host.forward([(record, states, 0, 7)])
        host.writer.drain()
        host.forward([(record, states, 7, len(ids) - 7)])
    host.directory.shards()[0].unlink()
    assert len(Reader(tmp_path)) == 0
    die(tmp_path, PROMPTS)
    assert recovered(tmp_path).records == 4
    assert sorted(capture.token_ids.tolist() for capture in Reader(tmp_path)) == sorted(PROMPTS)


def test_it_waits_until_it_is_known_what_is_set_aside(tmp_path: Path) -> None:
    partial = die(tmp_path, PROMPTS)
    (tmp_path / SET_ASIDE_NAME).write_text("{")
    recovery = recovered(tmp_path)
    assert recovery.state == "failed"
    assert "line 1" in recovery.detail
    (tmp_path / SET_ASIDE_NAME).unlink()
    assert partial.exists()
    assert recovered(tmp_path).records == 4
    assert_captured(tmp_path, PROMPTS)


def test_a_prompt_that_began_in_a_sealed_shard(tmp_path: Path) -> None:
    ids = list(range(300))
    child = os.fork()
    if child == 0:
        host = Host(tmp_path)
        record, states = host.record(ids), states_of(ids)
        host.forward([(record, states, 0, 120)])
        host.writer.drain()
        host.forward([(record, states, 120, 180)])
        host.settle()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert recovered(tmp_path).records == 1
    assert_captured(tmp_path, [ids])


@pytest.mark.parametrize("donor_sealed", [True, False])
def test_a_prompt_that_shares_rows_is_captured_anew(tmp_path: Path, donor_sealed: bool) -> None:
    """Which donor its first rows are of stands in a record only: its own frames are no whole prompt."""
    ids = list(range(300))
    heir = [*ids[:200], 7, 8]
    states = np.concatenate([states_of(ids)[:200], states_of([7, 8])])
    child = os.fork()
    if child == 0:
        host = Host(tmp_path, threads=1)
        (donor,) = host.capture([ids])
        if donor_sealed:
            host.writer.drain()
        record = replace(host.record(heir), donor=donor, shared_tokens=200)
        host.forward([(record, states, 200, 2)])
        host.settle()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    recovery = recovered(tmp_path)
    torn = [path.name for path in tmp_path.glob("*.torn")]
    if donor_sealed:
        assert (recovery.state, recovery.detail) == ("set aside", "no prompt is whole in it")
        assert torn == [recovery.partial.removesuffix(".partial") + ".torn"]
    else:
        assert (recovery.state, recovery.records, recovery.rows, torn) == ("recovered", 1, 302, [])
    assert_captured(tmp_path, [ids])
    assert verify(tmp_path).waste_frames == (0 if donor_sealed else 1)


def test_frames_that_lie(tmp_path: Path) -> None:
    """A whole frame whose proof is not that of its token ids makes no record."""
    die(tmp_path, [[1, 2, 3]], changes={"seed": (7, 8)})
    (partial,) = CaptureDirectory.open(tmp_path).partials()
    data = partial.read_bytes()
    assert b"0000000000000007" in data
    partial.write_bytes(data.replace(b"0000000000000007", b"0000000000000009"))
    assert recovered(tmp_path).state == "set aside"
    assert len(Reader(tmp_path)) == 0


@pytest.mark.parametrize("text", [b"{", b"[]", b"{}", b'{"__metadata__": 7}', b"[" * 60_000, b'{"__metadata__": {}}'])
def test_a_file_without_facts(tmp_path: Path, text: bytes) -> None:
    partial = die(tmp_path, PROMPTS)
    partial.write_bytes(bytes(8) + text)
    assert recovered(tmp_path).state == "set aside"
    assert len(Reader(tmp_path)) == 0


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost: the file stays as it is until there is room."""

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    partial = die(tmp_path, PROMPTS)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        recovery = recovered(tmp_path)
    assert recovery.state == "failed"
    assert "No space left" in recovery.detail
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(["hashtap.json", partial.name])
    assert recovered(tmp_path).records == 4
    assert_captured(tmp_path, PROMPTS)


def test_death_at_every_step_of_the_writer(tmp_path: Path) -> None:
    """After each, recovery finds every prompt that had been written, once."""
    seen = []
    for number in range(100):
        path = tmp_path / str(number)
        if not die_at(path, number):
            break
        if not (path / "hashtap.json").exists():
            continue
        for recovery in recover(CaptureDirectory.open(path)):
            assert recovery.state in ("recovered", "set aside", "live")
        seen.append(len(Reader(path)))
        with Host(path) as host:
            host.capture([ids for ids in PROMPTS if host.record(ids).key not in Reader(path)])
        assert_captured(path, PROMPTS)
    assert seen == sorted(seen)
    assert set(seen) == {0, 1, 2, 3, 4}


def test_death_at_every_step_of_a_recovery(tmp_path: Path) -> None:
    steps = ("os.open", "os.fsync", "os.link", "pathlib.Path.open", "pathlib.Path.unlink", "os.close")
    for number in range(100):
        path = tmp_path / str(number)
        partial = die(path, PROMPTS, codec="none")
        os.truncate(partial, partial.stat().st_size - 64)
        child = os.fork()
        if child == 0:
            left = [number]

            def step(_: str, left: list[int] = left) -> None:
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1

            with pytest.MonkeyPatch.context() as patch:
                for name in steps:
                    patch.setattr(name, announced(name, step))
                recover(CaptureDirectory.open(path))
            os._exit(0)
        died = os.waitpid(child, 0)[1] == signal.SIGKILL
        recover(CaptureDirectory.open(path))
        assert_captured(path, PROMPTS[:3])
        assert CaptureDirectory.open(path).partials() == []
        assert len(list(path.glob("*.torn"))) == 1
        assert list(path.glob(".*.partial")) == []
        if not died:
            assert number > 8
            return


def test_what_it_reads_of_facts(tmp_path: Path) -> None:
    """The facts in front of an unfinished file are those of the sealed one."""
    die(tmp_path / "a", PROMPTS, changes={"writer": "c" * 32, "server_flags": {"model": "Größe"}})
    recover(CaptureDirectory.open(tmp_path / "a"))
    facts = Reader(tmp_path / "a").facts
    assert (facts.writer, facts.server_flags) == ("c" * 32, {"model": "Größe"})
    header = next((tmp_path / "a").glob("*.safetensors")).read_bytes()
    assert json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"]["hashtap.rank"] == "0"
