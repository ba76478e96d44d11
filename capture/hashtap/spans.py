"""Which rows of a batch are whose prompt tokens.

A batch of prefill rows is the ragged concatenation of its requests. Request ``r`` brings
``extend_lens[r]`` rows, the first of which stands at position ``prefix_lens[r]`` of that request.
"""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Span", "prompt_spans"]


class Span(NamedTuple):
    """Consecutive prompt rows of one request in one batch."""

    request: int  # index in the batch
    row: int  # first row in the batch
    tokens: int  # number of rows, at least 1
    first_position: int  # position of the first row in the prompt


def prompt_spans(
    extend_lens: Sequence[int], prefix_lens: Sequence[int], prompt_lens: Sequence[int | None]
) -> list[Span]:
    """The spans of the requests whose prompt length is given (None: not captured).

    A request's prompt length is its own, not the batch's: with mixed chunks the decode rows of other
    requests arrive as extends of one token, and after a retraction generated tokens are prefilled
    again. Rows at positions past the prompt are nobody's prompt and are left out.

    Raises:
        ValueError: when the lists differ in length or a length is negative.
    """
    if not len(extend_lens) == len(prefix_lens) == len(prompt_lens):
        raise ValueError(
            f"{len(extend_lens)} extend, {len(prefix_lens)} prefix and {len(prompt_lens)} prompt lengths: must be equal"
        )
    spans = []
    row = 0
    make = tuple.__new__  # a third of the time of Span(...), on the scheduler's thread
    for request, (extend, prefix, prompt) in enumerate(zip(extend_lens, prefix_lens, prompt_lens, strict=True)):
        if extend < 0 or prefix < 0:
            raise ValueError(f"request {request} of the batch has extend length {extend} and prefix length {prefix}")
        if prompt is not None and (tokens := min(extend, prompt - prefix)) > 0:
            spans.append(make(Span, (request, row, tokens, prefix)))
        row += extend
    return spans
