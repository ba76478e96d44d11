"""The captured numbers are the model's: compared with transformers, row by row and layer by layer."""

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

from hashtap.verify import verify

pytestmark = pytest.mark.server

LENGTHS = (1, 5, 37, 127, 128, 129, 256, 300, 700)  # around the chunk of 128, alone and in several chunks
BF16_NOISE = 2**-6  # of the largest logit: what two roundings to 8 bits of mantissa may move


def check_values(served: Served, reference: Reference, prompts: list[list[int]], final: str = "post") -> None:
    answers = send_together(served.server, prompts)
    clear = 0
    for prompt, answer, capture in zip(prompts, answers, served.captured(*prompts), strict=True):
        assert receipt(answer)["rows"] == len(prompt)
        assert capture.boundaries == served.boundaries
        assert capture.token_ids.tolist() == prompt
        assert capture.final_norm == final
        states, finals = capture.tensor(), capture.facts.finals
        assert_same_states(states, reference.states(prompt), served.boundaries, finals)

        if "post" not in finals:
            continue
        logits = reference.logits(states[-1, len(served.boundaries) + finals.index("post")])
        best, second = logits.topk(2).values.tolist()
        if best - second > BF16_NOISE * float(logits.abs().max()):
            clear += 1
            assert int(logits.argmax()) == answer["output_ids"][0]
    assert final == "pre" or clear >= len(prompts) // 2

    # As a user asks for it: chunks, batches and SGLang's kernels beside one shot of transformers.
    report = verify(served.captures, recompute=served.model)
    assert report.ok, report.problems
    assert report.warnings == []
    assert all(0 < layer.p99 < layer.bound for layer in report.recomputed)


def test_llama(llama: Served) -> None:
    check_values(llama, Reference(models.llama(plain=True)), random_prompts(LENGTHS, seed=11))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("boundaries", "flags"),
    [
        pytest.param(
            (1, 4, 6),
            ("--chunked-prefill-size", 96, "--page-size", 16),
            marks=[
                pytest.mark.cell("another model class", "exact", "Qwen3, chunks of 96 tokens, pages of 16"),
                pytest.mark.cell("pages of 16 tokens", "exact", "chunk ends are rounded down to a page; Qwen3"),
            ],
        ),
        pytest.param(
            (2, 4, 5),
            ("--capture-final", "pre"),
            marks=pytest.mark.cell("the state before Qwen3's final norm", "exact", "`--capture-final pre`"),
        ),
        pytest.param(
            (3, 5, 7),
            ("--capture-final", "both"),
            marks=pytest.mark.cell("both final states of Qwen3", "exact", "`--capture-final both`"),
        ),
    ],
)
def test_qwen3(tmp_path: Path, boundaries: tuple[int, ...], flags: tuple[object, ...]) -> None:
    model, captures = models.qwen3(), tmp_path / "captures"
    with Server(model, *COMMON_FLAGS, *capture_flags(captures, *boundaries), *flags, threads=2) as server:
        prompts = random_prompts([*LENGTHS, 15, 16, 17, 200, 201, 900], seed=sum(boundaries))
        final = str(flags[1]) if flags[0] == "--capture-final" else "post"
        check_values(Served(server, model, captures, boundaries), Reference(models.qwen3(plain=True)), prompts, final)


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
