"""Whatever lies in a capture directory: one typed error, little memory, no traceback, nothing unpickled."""

import json
import os
import pickle
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.attacks.attack import GOOD_PROMPTS, OUTSIDE, TARGET, TARGET_PROMPTS, copy_of, make_base
from tests.attacks.beside import ASIDE, BESIDE, IDENTITY, LIES, MANIFEST, NO_FILES, ORDER, SPOILT, WRITTEN
from tests.attacks.files import FACTS, FILES, HEADERS, LENGTHS, trap
from tests.attacks.frames import FRAMES, SECTIONS, section
from tests.attacks.tables import INDEX, RECORDS, resealed_with
from tests.capture.tamper import Tampered

from hashtap.reader import Reader
from hashtap.shard import read_shard

ROOT = Path(__file__).parents[2]
SHARDS = FILES | LENGTHS | HEADERS | FACTS | INDEX | RECORDS
PAYLOADS = FRAMES | SECTIONS
ATTACKS = SHARDS | PAYLOADS | BESIDE
WAYS = {"manifest": MANIFEST, "order": ORDER, "write": WRITTEN}
"""In which way of using a directory an attack is noticed, other than by reading it."""
UNSPOILT = "nothing"
"""A directory that nobody attacks; it is read first, and must be read whole."""


@dataclass(frozen=True, slots=True)
class Hostile:
    """All attacked directories, and what came of reading each.

    Attributes:
        home: the directory that holds them.
        outcomes: by the attack's name, see ``victim.Outcome``.
    """

    home: Path
    outcomes: dict[str, Any]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Hostile:
    """Every attack is made, and one process reads them all."""
    home = tmp_path_factory.mktemp("attacks")
    base = make_base(home / "base")
    folders = {UNSPOILT: str(base / "captures")}
    for number, (name, attack) in enumerate(ATTACKS.items()):
        shard = copy_of(base, home / str(number))
        attack.make(shard)
        folders[name] = str(shard.parent)
    # The C library would reserve address space for each new thread, which counts against the limit.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-m", "tests.attacks.victim", *folders.values()]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    return Hostile(home, {name: found[folder] for name, folder in folders.items()})


def test_the_directory_itself_is_good(hostile: Hostile) -> None:
    outcome = hostile.outcomes[UNSPOILT]
    assert set(outcome["errors"].values()) == {""}
    assert outcome["captured"] == GOOD_PROMPTS + TARGET_PROMPTS
    assert {command: code for command, (code, _) in outcome["codes"].items()} == {"verify": 0, "show": 0}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_one_typed_error(hostile: Hostile, name: str) -> None:
    attack, outcome = ATTACKS[name], hostile.outcomes[name]
    errors = outcome["errors"]
    assert not [error for error in errors.values() if error.startswith("NOT TYPED")]
    told = errors[next((way for way, table in WAYS.items() if name in table), "reader")]
    if name in LIES:  # they are found out where the shard says otherwise; who verifies does not listen to them
        assert told.startswith("FormatError: ") or not told
        assert errors["verify"] == ""
    elif attack.reason:
        assert told.startswith(("FormatError: ", "UsageError: ") if name in ORDER | WRITTEN else "FormatError: ")
        assert re.search(attack.reason, told)
        assert len(told.splitlines()) == 1
    else:
        assert set(errors.values()) == {""}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_takes_little_memory(hostile: Hostile, name: str) -> None:
    assert hostile.outcomes[name]["grown_mb"] < ATTACKS[name].limit_mb


@pytest.mark.parametrize("name", ATTACKS)
def test_the_command_line_shows_no_traceback(hostile: Hostile, name: str) -> None:
    attack, codes = ATTACKS[name], hostile.outcomes[name]["codes"]
    for code, err in codes.values():
        assert code in (0, 1)
        assert "Traceback" not in err
        assert len(err.splitlines()) <= 1
    if name not in MANIFEST | ORDER | WRITTEN:
        assert codes["verify"][0] == (1 if attack.reason and name not in LIES else 0)


@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in IDENTITY | ASIDE])
def test_an_attack_hides_nothing_else(hostile: Hostile, name: str) -> None:
    """All that the attack did not touch is read, and nothing from outside the directory."""
    captured = hostile.outcomes[name]["captured"]
    assert captured[: len(GOOD_PROMPTS)] == GOOD_PROMPTS
    left = [ids for ids in captured[len(GOOD_PROMPTS) :] if ids in TARGET_PROMPTS]
    assert len(left) == len(captured) - len(GOOD_PROMPTS)
    if name in BESIDE and name not in LIES:
        assert left == TARGET_PROMPTS
    elif name in PAYLOADS and ATTACKS[name].reason:
        assert left == TARGET_PROMPTS[1:]


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_is_written_outside(hostile: Hostile, name: str) -> None:
    outside = hostile.home / str(list(ATTACKS).index(name)) / OUTSIDE
    assert sorted(os.listdir(outside.parent)) == ["captures", OUTSIDE]
    assert outside.read_bytes() == (hostile.home / "base" / OUTSIDE).read_bytes()


@pytest.mark.parametrize("name", SPOILT | NO_FILES)
def test_what_a_dead_writer_left_is_dealt_with(hostile: Hostile, name: str) -> None:
    """Nothing whole is in it that is not sealed already: it is set aside, or left alone where it is no such file."""
    folder = hostile.home / str(list(ATTACKS).index(name)) / "captures"
    left = [path for path in folder.iterdir() if path.name.startswith("hashtap-")]
    assert [path.suffix for path in left] == [".torn" if name in SPOILT else ".partial"]


def test_resealing_alone_changes_nothing(hostile: Hostile) -> None:
    """It is the attacks that are noticed, not how they are made."""
    shard = copy_of(hostile.home / "base", hostile.home / "resealed")
    before = shard.read_bytes()
    resealed_with(shard, "index", 0, 0, 0)
    assert shard.read_bytes() == before
    Tampered(shard).reseal()
    assert (read_shard(shard).index == read_shard(hostile.home / "base" / "captures" / TARGET).index).all()
    section(bytes)(shard)
    assert Reader(shard.parent, strict=False).by_token_ids(TARGET_PROMPTS[0]).hidden_states.any()


def test_nothing_was_unpickled(hostile: Hostile) -> None:
    """Each pickle would have left a file behind: that it can is shown first."""
    left = hostile.home / "base" / "pickle-was-loaded"
    pickle.loads(trap(hostile.home / "base" / "captures" / "x"))
    assert left.exists()
    assert list(hostile.home.glob("[0-9]*/pickle-was-loaded")) == []
