import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.capture.build import Host, states_of

from hashtap import catalog, index_cache
from hashtap.index_cache import CACHE_NAME, load_cache
from hashtap.reader import Reader
from hashtap.shard import read_shard

PROMPTS = [[n, n + 1] for n in range(70)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of 70 shards, some with a prompt that ends in the next one."""
    path = tmp_path_factory.mktemp("made")
    with Host(path, threads=1, shard_bytes=1) as host:
        host.capture(PROMPTS, chunk=1)
        host.writer.drain()
    return path


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "captures")
    return tmp_path / "captures"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Gives the names of the shards that were read since it was last called."""
    names: list[str] = []

    def read(path: Path) -> object:
        names.append(path.name)
        return read_shard(path)

    def taken() -> list[str]:
        found, names[:] = list(names), []
        return found

    monkeypatch.setattr(catalog, "read_shard", read)
    return taken


def assert_right(path: Path) -> None:
    reader = Reader(path)
    assert sorted(capture.token_ids.tolist() for capture in reader) == PROMPTS
    for capture in reader:
        assert (capture.hidden_states == states_of(capture.token_ids.tolist())).all()


def test_the_second_opening_reads_no_shard(path: Path, reads: Callable[[], list[str]]) -> None:
    shards = Reader(path).shards
    assert len(reads()) == len(shards) >= 64
    cached = Reader(path).shards
    assert reads() == []
    for ours, theirs in zip(cached, shards, strict=True):
        assert (ours.path, ours.file_bytes, ours.facts) == (theirs.path, theirs.file_bytes, theirs.facts)
        assert (ours.frames_at, ours.frames_bytes) == (theirs.frames_at, theirs.frames_bytes)
        assert ours.index.tobytes() == theirs.index.tobytes()
        assert ours.records.tobytes() == theirs.records.tobytes()
    assert_right(path)


def test_what_changed_is_read_again(path: Path, reads: Callable[[], list[str]]) -> None:
    first, second, third = Reader(path).directory.shards()[:3]
    reads()
    data = first.read_bytes()
    first.unlink()
    first.write_bytes(data)
    renamed = second.rename(path / "renamed.safetensors")
    os.utime(third, ns=(0, 0))
    assert_right(path)
    assert sorted(reads()) == sorted([first.name, renamed.name, third.name])


def test_a_damaged_shard_is_not_covered_up(path: Path) -> None:
    shards = Reader(path).directory.shards()
    before = os.stat(shards[0])
    data = bytearray(shards[0].read_bytes())
    data[-1] ^= 1
    shards[0].write_bytes(data)
    os.utime(shards[0], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert set(Reader(path, strict=False).bad_shards) == {shards[0]}


def test_a_shard_that_went_away(path: Path) -> None:
    shards = Reader(path).directory.shards()
    shards[5].unlink()
    assert len(Reader(path).shards) == len(shards) - 1


def test_new_shards_are_picked_up(path: Path, reads: Callable[[], list[str]]) -> None:
    Reader(path)
    with Host(path) as host:
        host.capture([[1000]])
    reads()
    assert len(Reader(path)) == len(PROMPTS) + 1
    assert len(reads()) == 1


def test_every_damage_to_the_cache_is_as_good_as_none(path: Path) -> None:
    Reader(path)
    cache = path / CACHE_NAME
    data = cache.read_bytes()
    assert len(load_cache(path)) == len(Reader(path).shards)
    damaged = [data[:size] for size in (0, 7, 8, 24, 31, 32, 100, len(data) - 1)] + [data + b"x", b"\0" * 64]
    spots = (0, 8, 24, 31, 40, len(data) // 2, len(data) - 1)
    damaged += [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in spots]
    for text in damaged:
        cache.write_bytes(text)
        assert load_cache(path) == {}
        assert_right(path)
    assert cache.read_bytes() != damaged[-1], "it is written anew"


def test_a_cache_of_another_version(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_cache, "_VERSION", 2)
    Reader(path)
    monkeypatch.undo()
    assert load_cache(path) == {}
    assert_right(path)


def test_a_directory_that_cannot_be_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.replace", refuse)
        assert_right(path)
    assert [file.name for file in path.iterdir() if file.name.startswith(".")] == []


def test_few_shards_are_not_worth_it(tmp_path: Path) -> None:
    with Host(tmp_path) as host:
        host.capture(PROMPTS[:3])
    Reader(tmp_path)
    assert not (tmp_path / CACHE_NAME).exists()
