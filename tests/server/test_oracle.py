"""The columns are those of SGLang's own ``--enable-return-aux-hidden-states``, bit for bit.

That flag gives the auxiliary layers of short prompts as JSON; hashtap's own way of setting the layers, and
models that hand them out as one packed tensor (the Kimi-K2 class), are checked against it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from bench.server import Server
from tests import models
from tests.server.conftest import COMMON_FLAGS, Served, capture_flags
from tests.server.prompts import random_prompts, receipt, send_together

pytestmark = pytest.mark.server

PROMPTS = random_prompts([7, 60, 120], seed=20)  # each in one chunk: the flag gives the last chunk only


def official(model: Path, layer_ids: Sequence[int], environment: Mapping[str, str]) -> list[torch.Tensor]:
    """The auxiliary states of each prompt, bfloat16 ``[T, 3 H]``, as SGLang's own flag gives them."""
    flags = ("--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3", "--disable-radix-cache")
    ids = ("--return-aux-hidden-state-layer-ids", *layer_ids)
    with Server(model, *COMMON_FLAGS, *flags, *ids, threads=1, environment=dict(environment)) as server:
        return [_states(server, prompt) for prompt in PROMPTS]


def _states(server: Server, prompt: list[int]) -> torch.Tensor:
    body: dict[str, Any] = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_hidden_states": True,
    }
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=60).raise_for_status().json()
    return torch.tensor(answer["meta_info"]["hidden_states"][0]).bfloat16()


def check_against_official(
    tmp_path: Path,
    model: Path,
    boundaries: tuple[int, ...],
    layer_ids: Sequence[int],
    environment: Mapping[str, str] | None = None,
) -> None:
    captures, environment = tmp_path / "captures", environment or {}
    flags = (*COMMON_FLAGS, *capture_flags(captures, *boundaries))
    with Server(model, *flags, threads=1, environment=dict(environment)) as server:
        served = Served(server, model, captures, boundaries)
        for prompt in PROMPTS:  # one by one, as the flag is asked: other batches round differently
            server.generate(prompt)
        mine = [capture.tensor() for capture in served.captured(*PROMPTS)]

        # And many together, in chunks: every row, once, under its own prompt.
        many = random_prompts([1, 127, 128, 129, 300, 700, 33, 64], seed=21)
        for prompt, answer in zip(many, send_together(server, many), strict=True):
            assert (receipt(answer)["state"], receipt(answer)["rows"]) == ("captured", len(prompt))
        for prompt, capture in zip(many, served.captured(*many), strict=True):
            assert capture.boundaries == boundaries
            assert capture.token_ids.tolist() == prompt
            assert capture.hidden_states.shape == (len(prompt), 4, models.TINY_HIDDEN)
    for states, theirs in zip(mine, official(model, layer_ids, environment), strict=True):
        torch.testing.assert_close(states[:, :3].flatten(1), theirs, rtol=0, atol=0)


def kimi_environment() -> dict[str, str]:
    return {"PYTHONPATH": str(models.vllm_stub())}


@pytest.mark.timeout(600)
@pytest.mark.cell("packed layers", "exact", "the Kimi-K2 class; bit for bit what SGLang's own flag returns")
def test_kimi_k2(tmp_path: Path) -> None:
    # DeepSeek's setter takes ids as they are unless the first is 1.
    check_against_official(tmp_path, models.kimi_k2(), (3, 5, 7), [3, 5, 7], kimi_environment())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kimi_k2_boundaries_that_its_setter_cannot_name(tmp_path: Path) -> None:
    # Ids that begin with 1 would be raised by 1; in another order they name the same layers.
    check_against_official(tmp_path, models.kimi_k2(), (1, 4, 6), [4, 1, 6], kimi_environment())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("boundaries", [(1, 4, 6), (2, 4, 5), (3, 5, 7)])
def test_llama(tmp_path: Path, boundaries: tuple[int, ...]) -> None:
    check_against_official(tmp_path, models.llama(), boundaries, [boundary - 1 for boundary in boundaries])
