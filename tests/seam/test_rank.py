"""What a rank settles before it captures, and which directories it refuses."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.capture.build import Host, facts

from hashtap.config import CaptureConfig
from hashtap.directory import CaptureDirectory
from hashtap.errors import MismatchError, SetupError, UsageError
from hashtap.rank import Rank, check_same_kind, facts_of_shards
from hashtap_kernels.layout import Geometry

HEALTH = "HEALTH_CHECK"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"boundaries": (1, 4, 6)}, "boundaries"),
        ({"final_norm": "pre"}, "final norm"),
        ({"geometry": Geometry(4, 128)}, "geometry"),
        ({"epoch": "weights-2"}, "epoch"),
    ],
)
def test_a_directory_of_another_server(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with Host(tmp_path) as host:
        host.capture([[1, 2, 3]])
    others = facts_of_shards(CaptureDirectory.open(tmp_path))
    assert len(others) == 1
    check_same_kind(facts(), others)
    check_same_kind(facts(epoch=""), others)
    with pytest.raises(MismatchError, match=f"its {named} is .*another --capture-dir"):
        check_same_kind(facts(**changes), others)


def test_a_damaged_shard_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Host(tmp_path) as host:
        host.capture([[1, 2, 3]])
    directory = CaptureDirectory.open(tmp_path)
    (shard,) = directory.shards()
    shard.write_bytes(shard.read_bytes()[:100])
    assert facts_of_shards(directory) == {}
    assert shard.name in caplog.text


def model_config(**changes: Any) -> SimpleNamespace:
    values = {"hidden_size": 256, "model_path": "m", "vocab_size": 512, "context_len": 4096}
    return SimpleNamespace(**{**values, **changes})


def plan(path: Path, config: Any = None, dtype: str = "bfloat16") -> Any:
    rank = Rank(CaptureConfig(capture_dir=str(path)), HEALTH)
    return rank.plan(config or model_config(), dtype, (2, 4, 5), rank=0, flags={})


def test_what_cannot_be_captured_is_refused_before_the_weights_are_loaded(tmp_path: Path) -> None:
    assert plan(tmp_path).geometry == Geometry(4, 256)
    with pytest.raises(SetupError, match=r"states of int8.*--dtype"):
        plan(tmp_path, dtype="int8")
    with pytest.raises(SetupError, match="hidden size 250"):
        plan(tmp_path, model_config(hidden_size=250))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is not a directory"):
        plan(tmp_path / "file")


def test_two_runs_have_different_seeds_and_writers(tmp_path: Path) -> None:
    one, other = plan(tmp_path), plan(tmp_path)
    assert one.seed != other.seed
    assert one.writer != other.writer
    assert one.directory_uuid == other.directory_uuid
