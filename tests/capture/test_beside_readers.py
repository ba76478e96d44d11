"""Shards appear, vanish, are renamed or recovered between any two steps of a reader: nothing wrong is handed out."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.capture.build import Host, states_of
from tests.capture.test_crash import announced
from tests.capture.test_recover import die

from hashtap import catalog
from hashtap.directory import CaptureDirectory
from hashtap.errors import FormatError, UsageError
from hashtap.index_cache import CACHE_NAME, load_cache
from hashtap.reader import Reader
from hashtap.recover import recover
from hashtap.verify import verify

PROMPTS = [[n] * 40 for n in range(6)]
NEW = [7, 7, 7]
STEPS = ("os.listdir", "os.scandir", "os.lstat", "os.open", "os.fstat", "os.pread", "pathlib.Path.open")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six sealed shards, and a dead writer's file with one prompt more."""
    path = tmp_path_factory.mktemp("made")
    with Host(path, threads=1, shard_bytes=1) as host:
        host.capture(PROMPTS)
    die(path, [NEW])
    return path


def shards(path: Path) -> list[Path]:
    return CaptureDirectory.open(path).shards()


def appear(path: Path) -> None:
    with Host(path) as host:
        host.capture([NEW])


def vanish(path: Path) -> None:
    shards(path)[2].unlink()


def rename(path: Path) -> None:
    shards(path)[2].rename(path / "renamed.safetensors")


def exchange(path: Path) -> None:
    """Two shards change places, under the same names."""
    one, two = shards(path)[1:3]
    one.rename(path / "aside")
    two.rename(one)
    (path / "aside").rename(two)


def go_away(path: Path) -> None:
    path.rename(path.with_name("away"))


def is_recovered(path: Path) -> None:
    recover(CaptureDirectory.open(path))


MISCHIEF = (appear, vanish, rename, exchange, is_recovered, go_away)


@pytest.mark.parametrize("cached", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("mischief", MISCHIEF, ids=lambda mischief: mischief.__name__)
def test_between_any_two_steps(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mischief: Callable[[Path], None], cached: bool
) -> None:
    """What comes back is right or a typed error, and reading again finds all that is there then."""
    if cached:
        monkeypatch.setattr(catalog, "_WORTH_CACHING", 1)
    whole = 0
    for number in range(1000):
        path = tmp_path / f"{number}" / "captures"
        shutil.copytree(made, path)
        if cached:
            Reader(path)
        left = [number]

        def step(_: str, left: list[int] = left, path: Path = path) -> None:
            left[0] -= 1
            if left[0] == -1:
                mischief(path)

        with pytest.MonkeyPatch.context() as patch:
            for name in STEPS:
                patch.setattr(name, announced(name, step))
            whole += reads_right(path)
        if left[0] >= 0:
            assert number > 10
            break
        path = path.with_name("away") if mischief is go_away else path
        assert verify(path).ok
        assert {tuple(ids) for ids in captured(path)} >= {tuple(ids) for n, ids in enumerate(PROMPTS) if n != 2}
        shutil.rmtree(path.parent)
    assert whole > 0


def reads_right(path: Path) -> bool:
    """Open the directory and read all of it; False when an error says that this could not be done."""
    try:
        captured(path)
    except (FormatError, UsageError):
        return False
    return True


def captured(path: Path) -> list[list[int]]:
    found = []
    for capture in Reader(path):
        assert (capture.hidden_states == states_of(capture.token_ids.tolist())).all()
        found.append(capture.token_ids.tolist())
    return found


def test_death_at_every_step_of_the_index_cache(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that is killed while it writes the cache leaves none, or a whole one."""
    monkeypatch.setattr(catalog, "_WORTH_CACHING", 1)
    for number in range(1000):
        path = tmp_path / str(number)
        shutil.copytree(made, path)
        if (child := os.fork()) == 0:
            left = [number]

            def step(_: str, left: list[int] = left) -> None:
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1

            for name in ("pathlib.Path.open", "pathlib.Path.replace"):
                monkeypatch.setattr(name, announced(name, step))
            Reader(path)
            os._exit(0)
        died = os.waitpid(child, 0)[1] == signal.SIGKILL
        assert len(load_cache(path)) == (0 if died else len(PROMPTS))
        assert sorted(captured(path)) == PROMPTS
        assert len(load_cache(path)) == len(PROMPTS)
        assert (path / CACHE_NAME).exists()
        if not died:
            assert number >= 2
            break
