"""The captured numbers are the model's: compared with transformers, row by row and layer by layer."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from bench.server import Server
from bench.text import standard_library_tokens
from tests import models
from tests.server.conftest import COMMON_FLAGS, Served, capture_flags
from tests.server.prompts import random_prompts, receipt, send_together
from tests.server.reference import Reference, assert_same_states

pytestmark = pytest.mark.server

LENGTHS = (1, 5, 37, 127, 128, 129, 256, 300, 700)  # around the chunk of 128, alone and in several chunks
BF16_NOISE = 2**-6  # of the largest logit: what two roundings to 8 bits of mantissa may move
LISTS = ((1, 4, 6), (2, 4, 5), (3, 5, 7))


def check_values(served: Served, reference: Reference, prompts: list[list[int]]) -> None:
    answers = send_together(served.server, prompts)
    clear = 0
    for prompt, answer, capture in zip(prompts, answers, served.captured(*prompts), strict=True):
        assert receipt(answer)["rows"] == len(prompt)
        assert capture.boundaries == served.boundaries
        assert capture.token_ids.tolist() == prompt
        states = capture.tensor()
        assert_same_states(states, reference.states(prompt), served.boundaries)

        logits = reference.logits(states[-1, -1])
        best, second = logits.topk(2).values.tolist()
        if best - second > BF16_NOISE * float(logits.abs().max()):
            clear += 1
            assert int(logits.argmax()) == answer["output_ids"][0]
    assert clear >= len(prompts) // 2


def test_llama(llama: Served) -> None:
    check_values(llama, Reference(models.llama(plain=True)), random_prompts(LENGTHS, seed=11))


@pytest.mark.slow
@pytest.mark.parametrize("boundaries", LISTS)
@pytest.mark.parametrize("model", [models.llama, models.qwen3], ids=["llama", "qwen3"])
def test_tiny_models(tmp_path: Path, model: Callable[..., Path], boundaries: tuple[int, ...]) -> None:
    with Server(model(), *COMMON_FLAGS, *capture_flags(tmp_path / "captures", *boundaries), threads=2) as server:
        served = Served(server, model(), tmp_path / "captures", boundaries)
        check_values(served, Reference(model(plain=True)), random_prompts(LENGTHS, seed=sum(boundaries)))


@pytest.mark.slow
@pytest.mark.parametrize("boundaries", [(1, 14, 28), (2, 15, 27), (3, 16, 29)])
def test_smollm2(tmp_path: Path, boundaries: tuple[int, ...]) -> None:
    # Real text: random ids drive a real model into states that rounding decides.
    model = models.smollm2()
    tokens = standard_library_tokens(model, sum(LENGTHS))
    ends = np.cumsum(LENGTHS).tolist()
    prompts = [tokens[end - length : end] for end, length in zip(ends, LENGTHS, strict=True)]
    with Server(model, *COMMON_FLAGS, *capture_flags(tmp_path / "captures", *boundaries), threads=2) as server:
        check_values(Served(server, model, tmp_path / "captures", boundaries), Reference(model), prompts)


@pytest.mark.slow
@pytest.mark.cell("the state before the final norm", "exact", "`--capture-final pre`, `both`; Llama and Qwen3")
@pytest.mark.parametrize("final", ["pre", "both"])
@pytest.mark.parametrize("model", [models.llama, models.qwen3], ids=["llama", "qwen3"])
def test_the_state_before_the_final_norm(tmp_path: Path, model: Callable[..., Path], final: str) -> None:
    captures, prompts = tmp_path / "captures", random_prompts(LENGTHS, seed=40)
    flags = (*capture_flags(captures, 1, 4, 6), "--capture-final", final)
    with Server(model(), *COMMON_FLAGS, *flags, threads=2) as server:
        send_together(server, prompts)
        found = Served(server, model(), captures, (1, 4, 6)).captured(*prompts)
    reference = Reference(model(plain=True))
    for prompt, capture in zip(prompts, found, strict=True):
        assert capture.final_norm == final
        assert_same_states(capture.tensor(), reference.states(prompt), (1, 4, 6), capture.facts.finals)


@pytest.mark.slow
def test_boundary_0_is_the_embeddings(tmp_path: Path) -> None:
    boundaries = (0, 3)
    captures = tmp_path / "captures"
    with Server(models.llama(), *COMMON_FLAGS, *capture_flags(captures, *boundaries), threads=2) as server:
        served = Served(server, models.llama(), captures, boundaries)
        reference = Reference(models.llama(plain=True))
        (prompt,) = random_prompts([50])
        server.generate(prompt)
        (capture,) = served.captured(prompt)
        torch.testing.assert_close(capture.tensor()[:, 0].float(), reference.states(prompt).exact[:, 0])
