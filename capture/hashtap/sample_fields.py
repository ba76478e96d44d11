"""The fields of one sample, judged: what cannot be used is a :class:`Fault`."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Fault", "Limits", "chat_of", "fields_of", "id_of", "loss_mask_of", "text_of", "token_ids_of"]

MAX_TOKEN_ID = (1 << 31) - 1

SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
"""Who a turn of ShareGPT is from, and the role of its message."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the server takes: ids below ``vocab_size`` and prompts of at most ``max_prompt_tokens``."""

    vocab_size: int | None = None
    max_prompt_tokens: int | None = None


class Fault(Exception):
    """Why a sample is left out: ``reason`` is one of a few, to be counted; ``detail`` says what was seen."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def fields_of(line: bytes) -> dict[str, Any]:
    """The fields of a line of JSON. What follows takes them one by one; each raises :class:`Fault`."""
    try:
        fields = json.loads(line.rstrip())
    except RecursionError:
        raise Fault("malformed JSON", "nested too deeply") from None
    except json.JSONDecodeError as error:
        raise Fault("malformed JSON", f"{error.msg} at column {error.colno}") from None
    except ValueError as error:
        raise Fault("malformed JSON", str(error)) from None
    if not isinstance(fields, dict):
        raise Fault("malformed JSON", f"a line is one object, not {_kind(fields)}")
    return fields


def id_of(value: Any, number: int) -> str:
    """The sample's name; its row's number where it has none."""
    if value is None:
        return str(number)
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise Fault("bad id", f"id must be a string or a whole number, not {_kind(value)}")
    if isinstance(value, str) and not value.isprintable():
        raise Fault("bad id", f"id must be printable text, not {_kind(value)}")
    return str(value)


def chat_of(fields: dict[str, Any]) -> tuple[list[dict[str, Any]], list[Any] | None] | None:
    """Messages and tools, from ``messages`` or ShareGPT's ``conversations``; None where neither is there."""
    if (messages := fields.get("messages")) is not None:
        return _messages(messages, "messages"), _tools(fields.get("tools"))
    if (turns := fields.get("conversations")) is not None:
        return _messages(_as_messages(turns), "conversations"), _tools(fields.get("tools"))
    return None


def _as_messages(turns: Any) -> Any:
    """ShareGPT's ``{"from", "value"}`` as messages; some files have messages there, which are left as they are."""
    if not isinstance(turns, list):
        return turns
    return [_as_message(at, turn) for at, turn in enumerate(turns)]


def _as_message(at: int, turn: Any) -> Any:
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    speaker, said = turn["from"], turn.get("value")
    role = SPEAKERS.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        detail = f"turn {at} is from {_kind(speaker)}; known are {', '.join(SPEAKERS)}: name it so, or give messages"
        raise Fault("bad conversations", detail)
    if not isinstance(said, str):
        raise Fault("bad conversations", f"the value of turn {at} must be a string, not {_kind(said)}")
    return {"role": role, "content": said}


def _messages(value: Any, field: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise Fault(f"bad {field}", f"{field} must be a list of one or more, not {_kind(value)}")
    for at, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Fault(f"bad {field}", f"message {at} must be an object with a role, not {_kind(message)}")
    return value


def _tools(value: Any) -> list[Any] | None:
    if value is not None and not isinstance(value, list):
        raise Fault("bad tools", f"tools must be a list, not {_kind(value)}")
    return value or None


def text_of(value: Any) -> str:
    """A plain text."""
    if not isinstance(value, str):
        raise Fault("bad text", f"text must be a string, not {_kind(value)}")
    return value


def token_ids_of(value: Any, limits: Limits) -> npt.NDArray[np.int32]:
    """Token ids ``[T]``, each of which the server's model has."""
    if value is None:
        raise Fault("no input_ids", "the line has no input_ids, messages, conversations or text")
    if not isinstance(value, list):
        raise Fault("bad input_ids", f"input_ids must be a list, not {_kind(value)}")
    if not value:
        raise Fault("empty prompt", "input_ids has no token")
    if wrong := _other_than_int(value):
        raise Fault("bad input_ids", f"token ids must be whole numbers; {wrong}")
    end = limits.vocab_size if limits.vocab_size is not None else MAX_TOKEN_ID + 1
    if min(value) < 0 or max(value) >= end:
        at = next(i for i, token in enumerate(value) if not 0 <= token < end)
        raise Fault("out of vocabulary", f"token id {value[at]} at position {at}; ids go from 0 to {end - 1}")
    if limits.max_prompt_tokens is not None and len(value) > limits.max_prompt_tokens:
        detail = f"{len(value)} tokens; by its context length and memory the server takes {limits.max_prompt_tokens}"
        raise Fault("too long", detail)
    return np.array(value, np.int32)


def loss_mask_of(value: Any, tokens: int) -> npt.NDArray[np.uint8] | None:
    """0 and 1 ``[T]`` for ``tokens`` T, or None where the sample has no mask."""
    if value is None:
        return None
    if not isinstance(value, list):
        raise Fault("bad loss_mask", f"loss_mask must be a list, not {_kind(value)}")
    if len(value) != tokens:
        raise Fault("bad loss_mask", f"loss_mask has {len(value)} elements for {tokens} tokens")
    if wrong := _other_than_int(value):
        raise Fault("bad loss_mask", f"loss_mask holds 0 and 1; {wrong}")
    if min(value) < 0 or max(value) > 1:
        raise Fault("bad loss_mask", f"loss_mask holds 0 and 1, not {min(value)} to {max(value)}")
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
