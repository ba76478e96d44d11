"""The columns are those of SGLang's own ``--enable-return-aux-hidden-states``, bit for bit.

That flag gives the auxiliary layers of short prompts as JSON; hashtap's own way of setting the layers, and
models that hand them out as one packed tensor (the Kimi-K2 class), are checked against it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from bench.server import Server
from tests import models
from tests.server.conftest import COMMON_FLAGS, Served, capture_flags
from tests.server.prompts import random_prompts, receipt, send_together
from tests.server.reference import Reference
from tests.server.test_values import LENGTHS, check_values

pytestmark = pytest.mark.server

PROMPTS = random_prompts([7, 60, 120], seed=20)  # each in one chunk: the flag gives the last chunk only


def official(model: Path, layer_ids: Sequence[int], environment: Mapping[str, str]) -> list[torch.Tensor]:
    """The states of each prompt at these layers, bfloat16 ``[T, layers, H]``, as SGLang's own flag gives them."""
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
    states = torch.tensor(answer["meta_info"]["hidden_states"][0]).bfloat16()
    return states.unflatten(1, (-1, models.TINY_HIDDEN))


@contextmanager
def capturing(
    tmp_path: Path,
    model: Path,
    boundaries: tuple[int, ...],
    *flags: object,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Served]:
    captures = tmp_path / "captures"
    flags = (*COMMON_FLAGS, *capture_flags(captures, *boundaries), *flags)
    with Server(model, *flags, threads=1, environment=dict(environment or {})) as server:
        yield Served(server, model, captures, boundaries)


def check_against(theirs: Sequence[torch.Tensor], served: Served) -> None:
    """``theirs`` begin at boundary 1."""
    for prompt in PROMPTS:  # one by one, as the flag is asked: other batches round differently
        served.server.generate(prompt)
    columns = [boundary - 1 for boundary in served.boundaries]
    for states, capture in zip(theirs, served.captured(*PROMPTS), strict=True):
        mine = capture.tensor()[:, : len(columns)]
        torch.testing.assert_close(mine, states[:, columns], rtol=0, atol=0)


@pytest.fixture(scope="module")
def kimi_environment() -> dict[str, str]:
    return {"PYTHONPATH": str(models.vllm_stub())}


@pytest.fixture(scope="module")
def official_kimi(kimi_environment: dict[str, str]) -> list[torch.Tensor]:
    # DeepSeek's setter takes ids as they are unless the first is 1; in another order they name the same layers.
    return official(models.kimi_k2(), [2, 1, 3, 4, 5, 6, 7], kimi_environment)


@pytest.mark.timeout(600)
@pytest.mark.cell("packed layers", "exact", "the Kimi-K2 class; bit for bit what SGLang's own flag returns")
@pytest.mark.parametrize(
    "boundaries",
    [
        (3, 5, 7),
        # Its setter cannot name these as they are: ids that begin with 1 are raised by 1.
        pytest.param((1, 4, 6), marks=pytest.mark.slow),
    ],
)
def test_kimi_k2(
    tmp_path: Path,
    official_kimi: list[torch.Tensor],
    kimi_environment: dict[str, str],
    boundaries: tuple[int, ...],
) -> None:
    with capturing(tmp_path, models.kimi_k2(), boundaries, environment=kimi_environment) as served:
        check_against(official_kimi, served)

        # And many together, in chunks: every row, once, under its own prompt.
        many = random_prompts([1, 127, 128, 129, 300, 700, 33, 64], seed=21)
        for prompt, answer in zip(many, send_together(served.server, many), strict=True):
            assert (receipt(answer)["state"], receipt(answer)["rows"]) == ("captured", len(prompt))
        for prompt, capture in zip(many, served.captured(*many), strict=True):
            assert capture.boundaries == boundaries
            assert capture.token_ids.tolist() == prompt
            assert capture.hidden_states.shape == (len(prompt), 4, models.TINY_HIDDEN)


@pytest.fixture(scope="module")
def official_llama() -> list[torch.Tensor]:
    return official(models.llama(), range(models.TINY_LAYERS - 1), {})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_llama(llama: Served, official_llama: list[torch.Tensor]) -> None:
    check_against(official_llama, llama)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.cell("the state before Llama's final norm", "exact", "`--capture-final pre`, `both`")
@pytest.mark.parametrize(("boundaries", "final"), [((2, 4, 5), "pre"), ((3, 5, 7), "both")])
def test_llama_with_another_final_state(
    tmp_path: Path, official_llama: list[torch.Tensor], boundaries: tuple[int, ...], final: str
) -> None:
    with capturing(tmp_path, models.llama(), boundaries, "--capture-final", final) as served:
        check_against(official_llama, served)
        check_values(served, Reference(models.llama(plain=True)), random_prompts(LENGTHS, seed=sum(boundaries)), final)
