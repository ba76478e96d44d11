"""Capture options: one declaration behind flag, environment and ``hashtap.enable``."""

import argparse
import subprocess
import sys
from dataclasses import fields

import pytest

import hashtap
from hashtap.config import CaptureConfig, child_environment
from hashtap.errors import UsageError

FULL = {
    "capture_dir": "/data/run 1",
    "capture_layers": (0, 15, 27),
    "capture_requests": "all",
    "capture_ring_gib": 0.5,
    "capture_writers": 3,
    "capture_codec": "none",
    "capture_when_full": "drop",
}


def parse(*words: str, environ: dict[str, str] | None = None) -> CaptureConfig | None:
    parser = argparse.ArgumentParser()
    CaptureConfig.add_arguments(parser)
    return CaptureConfig.from_args(parser.parse_args(words), environ or {})


def test_off_without_a_directory() -> None:
    assert parse() is None
    assert CaptureConfig.from_env({"HASHTAP_CAPTURE_DIR": ""}) is None


def test_flags() -> None:
    config = parse("--capture-dir", "/data", "--capture-layers", "2", "15", "27", "--capture-ring-gib", "0.5")
    assert config == CaptureConfig(capture_dir="/data", capture_layers=(2, 15, 27), capture_ring_gib=0.5)
    assert config.ring_bytes == 2**29
    assert config.stage_bytes == 512 * 2**20
    assert config.shard_bytes == 2**31


def test_environment_carries_every_option() -> None:
    config = CaptureConfig(**FULL)
    assert CaptureConfig.from_env(config.to_env()) == config
    assert set(CaptureConfig(capture_dir="/d").to_env()) | {"HASHTAP_CAPTURE_LAYERS"} == {
        "HASHTAP_" + option.name.upper() for option in fields(CaptureConfig)
    }


def test_a_flag_beats_its_twin() -> None:
    environ = {"HASHTAP_CAPTURE_DIR": "/twin", "HASHTAP_CAPTURE_WRITERS": "5"}
    config = parse("--capture-dir", "/flag", environ=environ)
    assert config == CaptureConfig(capture_dir="/flag", capture_writers=5)


def test_help_has_a_group_of_its_own() -> None:
    parser = argparse.ArgumentParser()
    CaptureConfig.add_arguments(parser)
    text = parser.format_help()
    assert "hashtap: capture of hidden states" in text
    for option in fields(CaptureConfig):
        assert "--" + option.name.replace("_", "-") in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--capture-writers", "x"], "--capture-writers 'x' is not INT"),
        (["--capture-writers", "0"], "--capture-writers 0 is out of range"),
        (["--capture-ring-gib", "nan"], "--capture-ring-gib nan is out of range"),
        (["--capture-final", "before"], "--capture-final 'before': choose from post, pre, both"),
        (["--capture-layers", "2", "2", "3"], "--capture-layers 2 2 3: give 1 to 7 different boundaries"),
        (["--capture-final", "both", "--capture-layers", *"1234567"], "give 1 to 6 different boundaries"),
        (["--capture-layers", "5", "2"], "in rising order"),
        (["--capture-layers", "-1", "2"], "--capture-layers"),
        (["--capture-layers", "a"], "--capture-layers 'a' is not BOUNDARY"),
    ],
)
def test_bad_values_name_the_option(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("[", r"\[")):
        parse("--capture-dir", "/data", *words)


def test_options_without_a_directory() -> None:
    with pytest.raises(UsageError, match="--capture-writers is given without --capture-dir"):
        parse("--capture-writers", "2")


def test_an_option_is_called_as_it_was_given() -> None:
    with pytest.raises(UsageError, match=r"^--capture-dir is empty: name the directory"):
        parse("--capture-dir", "")
    with pytest.raises(UsageError, match=r"^HASHTAP_CAPTURE_WRITERS 'x' is not INT"):
        parse("--capture-dir", "/data", environ={"HASHTAP_CAPTURE_WRITERS": "x"})


def test_unknown_twin() -> None:
    with pytest.raises(UsageError, match="HASHTAP_CAPTURE_DIRECTORY is no capture option"):
        CaptureConfig.from_env({"HASHTAP_CAPTURE_DIRECTORY": "/data"})


def test_enable_reaches_child_processes() -> None:
    """In a process of its own, whose environment is its own to change."""
    child = "import hashtap; print(hashtap.CaptureConfig.from_env())"
    code = (
        "import hashtap, subprocess, sys\n"
        "print(hashtap.enable(capture_dir='/data', capture_layers=[2, 15, 27]), flush=True)\n"
        f"subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    enabled, found = answer.stdout.splitlines()
    assert enabled == found == str(CaptureConfig(capture_dir="/data", capture_layers=(2, 15, 27)))


def test_enable_names_unknown_keys() -> None:
    with pytest.raises(UsageError, match="no option 'capture_layer'"):
        hashtap.enable(capture_dir="/data", capture_layer=[1])
    with pytest.raises(UsageError, match="needs capture_dir"):
        hashtap.enable(capture_writers=1)


def test_a_child_captures_only_if_told_so() -> None:
    outer = {"PATH": "/bin", "HASHTAP_CAPTURE_DIR": "/data", "HASHTAP_CAPTURE_WRITERS": "3", "HASHTAP_API_KEY": "k"}
    assert child_environment({}, outer) == {"PATH": "/bin", "HASHTAP_API_KEY": "k"}
    assert child_environment({"HASHTAP_CAPTURE_DIR": "/own"}, outer)["HASHTAP_CAPTURE_DIR"] == "/own"
