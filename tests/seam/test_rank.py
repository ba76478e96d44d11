"""Which requests are captured, which are refused, and which directories."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.capture.build import Host, facts

from hashtap.config import CaptureConfig
from hashtap.directory import CaptureDirectory
from hashtap.errors import MismatchError, SetupError, UsageError
from hashtap.rank import Rank, check_directory, refusal, wants_capture
from hashtap_kernels.layout import Geometry

HEALTH = "HEALTH_CHECK"
PLAIN: dict[str, Any] = {
    "rid": "0" * 32,
    "to_finish": None,
    "finished_reason": None,
    "lora_id": None,
    "multimodal_inputs": None,
    "input_embeds": None,
    "positional_embed_overrides": None,
    "token_type_ids": None,
    "session": None,
    "extra_key": None,
    "cache_salt": None,
}


def request(custom_params: Any = None, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**PLAIN, **changes}, sampling_params=SimpleNamespace(custom_params=custom_params))


@pytest.mark.parametrize(
    ("custom_params", "tagged", "everything"),
    [
        (None, False, True),
        ({}, False, True),
        ({"other": 1}, False, True),
        ({"hashtap": True}, True, True),
        ({"hashtap": False}, False, False),  # how the launching process marks warm-up
        ({"hashtap": "yes"}, False, False),
    ],
)
def test_whose_prompts(custom_params: Any, tagged: bool, everything: bool) -> None:
    assert wants_capture(request(custom_params), "tagged", HEALTH) is tagged
    assert wants_capture(request(custom_params), "all", HEALTH) is everything


@pytest.mark.parametrize(
    "changes", [{"rid": f"{HEALTH}_1"}, {"to_finish": "abort"}, {"finished_reason": "abort"}], ids=str
)
def test_health_checks_and_aborted_requests_are_never_captured(changes: dict[str, Any]) -> None:
    for requests in ("tagged", "all"):
        assert not wants_capture(request({"hashtap": True}, **changes), requests, HEALTH)


def test_refusals() -> None:
    assert refusal(request()) is None
    for name in ("lora_id", "multimodal_inputs", "input_embeds", "positional_embed_overrides", "token_type_ids"):
        assert refusal(request(**{name: "x"})) is not None
    assert "adapter" in str(refusal(request(lora_id="a", extra_key="a")))
    assert "session" in str(refusal(request(session=object())))
    assert "salt" in str(refusal(request(cache_salt="s")))


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
    directory = CaptureDirectory.open(tmp_path)
    check_directory(directory, facts())
    check_directory(directory, facts(epoch=""))
    with pytest.raises(MismatchError, match=f"its {named} is .*another --capture-dir"):
        check_directory(directory, facts(**changes))


def test_a_damaged_shard_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Host(tmp_path) as host:
        host.capture([[1, 2, 3]])
    directory = CaptureDirectory.open(tmp_path)
    (shard,) = directory.shards()
    shard.write_bytes(shard.read_bytes()[:100])
    check_directory(directory, facts(epoch="weights-2"))
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
