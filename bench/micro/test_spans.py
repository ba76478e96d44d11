"""From a batch's lengths to the frames of a forward, as the scheduler's thread does it; ns a request of 64."""

from typing import Any

import numpy as np

from hashtap.spans import prompt_spans
from hashtap_kernels.layout import MAX_FRAME_TOKENS, Geometry
from hashtap_kernels.plan import OFFSET, ROW, TOKENS, FramePlan, Piece, plan_frames

GEOMETRY = Geometry(4, 576)
REQUESTS, EACH = 64, 128
TIMES = 50  # in a round
EXTENDS, PREFIXES, PROMPTS = [EACH] * REQUESTS, [0] * REQUESTS, [EACH] * REQUESTS
KEY = bytes(16)


def plan() -> FramePlan:
    spans = prompt_spans(EXTENDS, PREFIXES, PROMPTS)
    pieces = [Piece(row, tokens, first, PROMPTS[request], request, KEY) for request, row, tokens, first in spans]
    return plan_frames(pieces, GEOMETRY)


def bare_loop() -> int:
    rows = 0
    for extend, _, _ in zip(EXTENDS, PREFIXES, PROMPTS, strict=True):
        rows += extend
    return rows


def test_spans(beside: Any) -> None:
    found = plan()
    assert EACH <= MAX_FRAME_TOKENS
    assert found.rows == bare_loop() == REQUESTS * EACH
    assert found.descriptors[:, ROW].tolist() == list(range(0, REQUESTS * EACH, EACH))
    assert set(found.descriptors[:, TOKENS].tolist()) == {EACH}
    assert np.array_equal(found.descriptors[:, OFFSET], GEOMETRY.frame_bytes(EACH) * np.arange(REQUESTS))
    beside(
        lambda: [plan() for _ in range(TIMES)],
        "bare loop over the requests",
        lambda: [bare_loop() for _ in range(TIMES)],
        request=REQUESTS * TIMES,
    )
