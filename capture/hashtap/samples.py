"""Reads the samples, one a row: ``input_ids`` and maybe ``loss_mask``, or ``messages``, or ``text``; maybe an ``id``.

Every line is judged before anything is sent: one token id outside the vocabulary ends a CPU server,
and a sample that cannot be captured is worth knowing of at once. A line with a fault becomes a
:class:`BadSample` with its number and reason; the others are kept in compact arrays (5 bytes a token).
"""

import json
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
from hashtap.sample_rows import Row, read_rows
from hashtap.together import together

__all__ = ["BadSample", "Limits", "Sample", "SampleFile", "load_samples"]

MAX_TOKEN_ID = (1 << 31) - 1
AT_A_TIME = 64
"""Rows whose texts are made ids together: two cores have enough to do, and few texts are in memory."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server takes: ids below ``vocab_size`` and prompts shorter than ``context_length``, all in tokens."""

    vocab_size: int | None = None
    context_length: int | None = None


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


class _Fault(Exception):
    """Why a line is left out."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def load_samples(path: str | Path, limits: Limits | None = None, tokenizer: ChatTokenizer | None = None) -> SampleFile:
    """Read and judge every row of ``path``: JSON lines, ``.zst`` of them, Parquet, Arrow, or a directory of these two.

    A row with ``input_ids`` is taken as it is. ``messages`` (with ``tools``) or ``text`` are made ids by ``tokenizer``,
    and the loss mask of messages is made with them. A sample without ``id`` is named by its number, counted from 1. Of
    two rows with one id, the second is bad.

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
        fields = _parsed(row) if isinstance(row, bytes) else row
        sample_id = _sample_id(fields.get("id"), number)
        ids, mask = yield from _prompt(fields, limits, tokenizer)
    except _Fault as fault:
        return BadSample(number, sample_id, fault.reason, fault.detail)
    return Sample(sample_id, number, prompt_key(ids), ids, mask)


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line.rstrip())
    except RecursionError:
        raise _Fault("malformed JSON", "nested too deeply") from None
    except json.JSONDecodeError as error:
        raise _Fault("malformed JSON", f"{error.msg} at column {error.colno}") from None
    except ValueError as error:
        raise _Fault("malformed JSON", str(error)) from None
    if not isinstance(fields, dict):
        raise _Fault("malformed JSON", f"a line is one object, not {_kind(fields)}")
    return fields


def _prompt(
    fields: dict[str, Any], limits: Limits, tokenizer: ChatTokenizer
) -> Job[tuple[npt.NDArray[np.int32], npt.NDArray[np.uint8] | None]]:
    """Token ids and loss mask; those that the row gives, or what the tokenizer makes of its messages or text."""
    ids, mask = fields.get("input_ids"), fields.get("loss_mask")
    if ids is None and not fields.keys().isdisjoint(("messages", "text")):
        if mask is not None:
            raise _Fault("bad loss_mask", "a loss_mask needs input_ids: that of messages comes from their turns")
        try:
            if (messages := fields.get("messages")) is not None:
                ids, mask = yield from tokenizer.chat_job(_messages(messages), _tools(fields.get("tools")))
            elif (text := fields.get("text")) is not None:
                ids = yield from tokenizer.text_job(_text(text))
        except Untokenised as trouble:
            raise _Fault(trouble.reason, trouble.detail) from None
    tokens = _token_ids(ids, limits)
    return tokens, _loss_mask(mask, len(tokens))


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise _Fault("bad messages", f"messages must be a list of one or more, not {_kind(value)}")
    for at, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _Fault("bad messages", f"message {at} must be an object with a role, not {_kind(message)}")
    return value


def _tools(value: Any) -> list[Any] | None:
    if value is not None and not isinstance(value, list):
        raise _Fault("bad tools", f"tools must be a list, not {_kind(value)}")
    return value or None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Fault("bad text", f"text must be a string, not {_kind(value)}")
    return value


def _sample_id(value: Any, number: int) -> str:
    if value is None:
        return str(number)
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise _Fault("bad id", f"id must be a string or a whole number, not {_kind(value)}")
    if isinstance(value, str) and not value.isprintable():
        raise _Fault("bad id", f"id must be printable text, not {_kind(value)}")
    return str(value)


def _token_ids(value: Any, limits: Limits) -> npt.NDArray[np.int32]:
    if value is None:
        raise _Fault("no input_ids", "the line has no input_ids, messages or text")
    if not isinstance(value, list):
        raise _Fault("bad input_ids", f"input_ids must be a list, not {_kind(value)}")
    if not value:
        raise _Fault("empty prompt", "input_ids has no token")
    if wrong := _other_than_int(value):
        raise _Fault("bad input_ids", f"token ids must be whole numbers; {wrong}")
    end = limits.vocab_size if limits.vocab_size is not None else MAX_TOKEN_ID + 1
    if min(value) < 0 or max(value) >= end:
        at = next(i for i, token in enumerate(value) if not 0 <= token < end)
        raise _Fault("out of vocabulary", f"token id {value[at]} at position {at}; ids go from 0 to {end - 1}")
    if limits.context_length is not None and len(value) >= limits.context_length:
        detail = f"{len(value)} tokens and one to generate; the server's context length is {limits.context_length}"
        raise _Fault("too long", detail)
    return np.array(value, np.int32)


def _loss_mask(value: Any, tokens: int) -> npt.NDArray[np.uint8] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise _Fault("bad loss_mask", f"loss_mask must be a list, not {_kind(value)}")
    if len(value) != tokens:
        raise _Fault("bad loss_mask", f"loss_mask has {len(value)} elements for {tokens} tokens")
    if wrong := _other_than_int(value):
        raise _Fault("bad loss_mask", f"loss_mask holds 0 and 1; {wrong}")
    if min(value) < 0 or max(value) > 1:
        raise _Fault("bad loss_mask", f"loss_mask holds 0 and 1, not {min(value)} to {max(value)}")
    return np.array(value, np.uint8)


def _other_than_int(values: list[Any]) -> str | None:
    # By type, not by value: NumPy would take true for 1 and cut 1.5.
    if set(map(type, values)) == {int}:
        return None
    at = next(i for i, value in enumerate(values) if type(value) is not int)
    return f"position {at} holds {_kind(values[at])}"


def _kind(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 40 else f"{text[:37]}..."
