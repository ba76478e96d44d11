"""An epoch names weights: the same in every process, another after any change that the sample meets."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from hashtap.epoch import SAMPLES, combine_fingerprints, epoch_name, fingerprint

CONFIG = {"model_type": "llama", "hidden_size": 8, "rope_parameters": {"rope_theta": 1e4}, "eos_token_id": [1, 2]}


def parameters(**changes: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(0)
    made = {
        "embed": torch.randn(50, 8).bfloat16(),
        "norm": torch.ones(8),
        "scale": torch.tensor(0.5),
        "empty": torch.empty(0),
        "fp8": torch.randn(16, 4).to(torch.float8_e4m3fn),
    }
    return list({**made, **changes}.items())


def test_order_and_place_do_not_matter() -> None:
    moved = {**CONFIG, "_name_or_path": "/elsewhere", "transformers_version": "9"}
    assert fingerprint(CONFIG, parameters()) == fingerprint(moved, reversed(parameters()))


@pytest.mark.parametrize(
    "change",
    [
        {"norm": torch.full((8,), 1.001)},
        {"norm": torch.ones(8, dtype=torch.bfloat16)},
        {"norm": torch.ones(2, 4)},
        {"scale": torch.tensor(0.25)},
        {"new": torch.ones(1)},
    ],
)
def test_every_change_of_a_parameter_counts(change: dict[str, torch.Tensor]) -> None:
    assert fingerprint(CONFIG, parameters(**change)) != fingerprint(CONFIG, parameters())


@pytest.mark.parametrize(
    "change", [{"hidden_size": 9}, {"eos_token_id": [2, 1]}, {"rope_parameters": {"rope_theta": 2e4}}]
)
def test_the_config_counts(change: dict[str, Any]) -> None:
    assert fingerprint({**CONFIG, **change}, parameters()) != fingerprint(CONFIG, parameters())


def test_first_and_last_element_of_a_large_parameter_are_sampled() -> None:
    large = torch.zeros(SAMPLES * 10 + 7)
    for place in (0, -1):
        other = large.clone()
        other[place] = 1
        assert fingerprint(CONFIG, [("w", large)]) != fingerprint(CONFIG, [("w", other)])


def test_a_transposed_parameter_is_sampled() -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    changed = weight.clone()
    changed[1, 2] = 0
    assert fingerprint(CONFIG, [("w", weight.t())]) == fingerprint(CONFIG, [("w", weight.clone().t())])
    assert fingerprint(CONFIG, [("w", weight.t())]) != fingerprint(CONFIG, [("w", changed.t())])
    assert fingerprint(CONFIG, [("w", weight.t())]) != fingerprint(CONFIG, [("w", weight)])


def test_an_object_in_the_config_has_no_address() -> None:
    code = (
        "import torch; from hashtap.epoch import fingerprint\n"
        "class Odd: pass\n"
        "print(fingerprint({'odd': Odd(), 'set': {'a', 'b', 'c'}}, [('w', torch.arange(9.0))]).hex())"
    )
    answers = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(answers) == 1


def test_ranks_are_combined_in_their_order() -> None:
    a, b = fingerprint(CONFIG, parameters()), fingerprint(CONFIG, [])
    assert combine_fingerprints([a]) == a
    assert len({a, combine_fingerprints([a, b]), combine_fingerprints([b, a])}) == 3


def test_names() -> None:
    assert epoch_name(bytes(16), 0) == "0" * 32
    assert epoch_name(bytes(16), 3) == "0" * 32 + "+3"
