"""Spans against the plainest account of a batch: one row at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hashtap.spans import Span, prompt_spans

MEMBERS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.none() | st.integers(0, 15)), max_size=6)


@given(MEMBERS)
def test_every_prompt_row_once(members: list[tuple[int, int, int | None]]) -> None:
    rows = []  # (row, request, position) of each prompt row
    row = 0
    for request, (extend, prefix, prompt) in enumerate(members):
        for position in range(prefix, prefix + extend):
            if prompt is not None and position < prompt:
                rows.append((row, request, position))
            row += 1
    spans = prompt_spans(*map(list, zip(*members, strict=True))) if members else prompt_spans([], [], [])
    assert rows == [(s.row + i, s.request, s.first_position + i) for s in spans for i in range(s.tokens)]
    assert len(spans) == len({s.request for s in spans})


def test_a_mixed_chunk() -> None:
    """Two prompt chunks and the decode rows of three others, which look like extends of one token."""
    spans = prompt_spans([97, 206, 1, 1, 1], [206, 0, 50, 50, 51], [303, 400, 20, 50, None])
    assert spans == [Span(0, 0, 97, 206), Span(1, 97, 206, 0)]


def test_a_retracted_request_comes_back_with_generated_tokens() -> None:
    assert prompt_spans([128, 84], [0, 256], [20, 256]) == [Span(0, 0, 20, 0)]


@pytest.mark.parametrize(
    ("lens", "message"), [(([1], [0, 0], [1]), "must be equal"), (([-1], [0], [1]), "extend length -1")]
)
def test_what_is_no_batch(lens: tuple[list[int], list[int], list[int | None]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prompt_spans(*lens)
