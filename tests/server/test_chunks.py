"""Chunks of every size, several prompts in each, whatever the scheduler does besides."""

from pathlib import Path

import numpy as np
import pytest
from tests.server.conftest import served
from tests.server.prompts import random_prompts, receipt, send_together
from tests.server.reference import Reference

from hashtap.reader import Reader

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.mark.parametrize(
    ("chunk", "flags"),
    [
        pytest.param(
            64,
            ("--disable-overlap-schedule",),
            marks=[
                pytest.mark.cell(
                    "chunks of 64 tokens", "exact", "40 prompts of 1 to 700 tokens at once, several a chunk"
                ),
                pytest.mark.cell("overlap schedule off", "exact", "the same, with chunks of 64"),
            ],
        ),
        pytest.param(
            512,
            ("--schedule-policy", "lof", "--max-running-requests", 8),
            marks=[
                pytest.mark.cell("chunks of 512 tokens", "exact", "as for 64"),
                pytest.mark.cell("longest output first", "exact", "`--schedule-policy lof`, with chunks of 512"),
                pytest.mark.cell("few running requests", "exact", "`--max-running-requests 8`, 40 at once"),
            ],
        ),
        pytest.param(
            2048,
            ("--enable-mixed-chunk",),
            marks=pytest.mark.cell("chunks of 2,048 tokens", "exact", "as for 64, with mixed chunks"),
        ),
        pytest.param(
            -1,
            ("--mem-fraction-static", 0.3),  # without chunks SGLang's own share comes out below zero here
            marks=pytest.mark.cell("no chunks", "exact", "`--chunked-prefill-size -1`; as for 64"),
        ),
    ],
)
def test_chunks(tmp_path: Path, reference: Reference, chunk: int, flags: tuple[object, ...]) -> None:
    lengths = [1, 63, 64, 65, chunk, chunk + 1, *np.random.default_rng(80).integers(1, 700, 34).tolist()]
    prompts = random_prompts([max(1, length) for length in lengths], seed=81)
    with served(tmp_path, "--chunked-prefill-size", chunk, *flags) as server:
        for prompt, answer in zip(prompts, send_together(server.server, prompts, max_new_tokens=3), strict=True):
            assert (receipt(answer)["state"], receipt(answer)["rows"]) == ("captured", len(prompt))
        server.check(reference, *prompts)
        assert server.server.terminate() == 0
    assert len(Reader(server.captures)) == len({tuple(prompt) for prompt in prompts})
