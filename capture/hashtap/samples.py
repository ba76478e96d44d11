"""Reads the samples, one a row: ``input_ids`` and maybe ``loss_mask``, or a chat, or ``text``; maybe an ``id``.

Every line is judged before anything is sent: one token id outside the vocabulary ends a CPU server,
and a sample that cannot be captured is worth knowing of at once. A line with a fault becomes a
:class:`BadSample` with its number and reason; the others are kept in compact arrays (5 bytes a token).
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hashtap.chat import ChatTokenizer
from hashtap.errors import UsageError
from hashtap.identity import prompt_key
from hashtap.loaded_tokenizer import Job, Untokenised
from hashtap.sample_fields import Fault, Limits, chat_of, fields_of, id_of, loss_mask_of, text_of, token_ids_of
from hashtap.sample_rows import Row, read_rows
from hashtap.together import together

__all__ = ["BadSample", "Sample", "SampleFile", "load_samples"]

AT_A_TIME = 64
"""Rows whose texts are made ids together: two cores have enough to do, and few texts are in memory."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One usable line. ``token_ids`` is int32 ``[T]``, ``loss_mask`` uint8 ``[T]`` of 0 and 1, or None."""

    id: str
    line: int
    key: bytes
    token_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8] | None

    @property
    def tokens(self) -> int:
        """Length of the prompt, T."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class BadSample:
    """A line that is left out. ``reason`` is one of a few, to be counted; ``detail`` says what was seen."""

    line: int
    id: str | None
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class SampleFile:
    """All lines of one file, usable and not, each in the file's order."""

    path: Path
    samples: list[Sample]
    bad: list[BadSample]

    @property
    def lines(self) -> int:
        """Lines that are not blank."""
        return len(self.samples) + len(self.bad)

    def reasons(self) -> dict[str, int]:
        """Bad lines by reason, most frequent first."""
        return dict(Counter(bad.reason for bad in self.bad).most_common())


def load_samples(path: str | Path, limits: Limits | None = None, tokenizer: ChatTokenizer | None = None) -> SampleFile:
    """Read and judge every row of ``path``, which is anything that :mod:`hashtap.sample_rows` opens.

    A row with ``input_ids`` is taken as it is. ``messages``, ShareGPT's ``conversations`` (both with ``tools``) or
    ``text`` are made ids by ``tokenizer``, and the loss mask of a chat is made with them. A sample without ``id`` is
    named by its number, counted from 1. Of two rows with one id, the second is bad.

    Raises:
        UsageError: when the file cannot be read to its end, has no row at all, or needs a tokenizer that is missing.
    """
    path = Path(path)
    limits = limits or Limits()
    tokenizer = tokenizer or ChatTokenizer()
    samples: list[Sample] = []
    bad: list[BadSample] = []
    first_line: dict[str, int] = {}
    jobs = (_judged(row, number, limits, tokenizer) for number, row in read_rows(path))
    for judged in together(jobs, tokenizer.encode, AT_A_TIME):
        if isinstance(judged, BadSample):
            bad.append(judged)
        elif (first := first_line.setdefault(judged.id, judged.line)) != judged.line:
            bad.append(BadSample(judged.line, judged.id, "duplicate id", f"line {first} has the same id"))
        else:
            samples.append(judged)
    if not samples and not bad:
        raise UsageError(f'the sample file {path} is empty; write one {{"input_ids": [...]}} a line')
    return SampleFile(path, samples, bad)


def _judged(row: Row, number: int, limits: Limits, tokenizer: ChatTokenizer) -> Job[Sample | BadSample]:
    sample_id = None
    try:
        fields = fields_of(row) if isinstance(row, bytes) else row
        sample_id = id_of(fields.get("id"), number)
        ids, mask = yield from _prompt(fields, tokenizer)
        token_ids = token_ids_of(ids, limits)
        loss_mask = loss_mask_of(mask, len(token_ids))
    except Fault as fault:
        return BadSample(number, sample_id, fault.reason, fault.detail)
    return Sample(sample_id, number, prompt_key(token_ids), token_ids, loss_mask)


def _prompt(fields: dict[str, Any], tokenizer: ChatTokenizer) -> Job[tuple[Any, Any]]:
    """Token ids and loss mask that the row gives, or that the tokenizer makes of its chat or text."""
    ids, mask = fields.get("input_ids"), fields.get("loss_mask")
    if ids is not None or fields.keys().isdisjoint(("messages", "conversations", "text")):
        return ids, mask
    if mask is not None:
        raise Fault("bad loss_mask", "a loss_mask needs input_ids: that of messages comes from their turns")
    try:
        if (chat := chat_of(fields)) is not None:
            return (yield from tokenizer.chat_job(*chat))
        if (text := fields.get("text")) is not None:
            return (yield from tokenizer.text_job(text_of(text))), None
    except Untokenised as trouble:
        raise Fault(trouble.reason, trouble.detail) from None
    return None, None
