"""A tokenizer of transformers that is loaded: a chat to ids and loss mask by its template, texts to ids many at a time.

What makes ids is a job (:mod:`hashtap.together`): it asks for the ids of one text after the other.
"""

import logging
import re
import warnings
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hashtap.errors import UsageError

__all__ = ["Job", "LoadedTokenizer", "Question", "Untokenised"]

R = TypeVar("R")

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class Question(NamedTuple):
    """A text whose ids a job asks for; ``special``: with what the tokenizer puts around it by itself."""

    text: str
    special: bool = False


Job = Generator[Question, list[int], R]
"""Makes ids of one text or chat, see :mod:`hashtap.together`."""


class Untokenised(Exception):
    """A text or chat that has no ids or no mask: ``reason`` is one of a few, ``detail`` says what was seen."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


class LoadedTokenizer:
    """A tokenizer of transformers, and the template that chats are written by; None for its own.

    Raises:
        UsageError: when it cannot be loaded.
    """

    def __init__(self, name: str, template: str | None, *, trust_remote_code: bool) -> None:
        self._tokenizer, self._name, self._template = _from_pretrained(name, trust_remote_code), name, template
        with_special, bare = self._encode(["a"], True)[0], self._encode(["a"], False)[0]
        starts = (at for at in range(len(with_special)) if with_special[at : at + len(bare)] == bare)
        self.lead = with_special[: next(starts, 0)]
        """Ids that the tokenizer puts before a text by itself: BOS, or nothing."""

    def encode(self, questions: Sequence[Question]) -> list[list[int] | Exception]:
        """The ids of each, or what the tokenizer raised."""
        replies: dict[int, list[int] | Exception] = {}
        for special in (False, True):
            places = [at for at, question in enumerate(questions) if question.special == special]
            texts = [questions[at].text for at in places]
            try:
                replies |= zip(places, self._encode(texts, special), strict=True)
            except Exception as error:
                if len(questions) == 1:
                    return [error]
                # Of one of them; the others have ids.
                return [self.encode([question])[0] for question in questions]
        return [replies[at] for at in range(len(questions))]

    def _encode(self, texts: list[str], special: bool) -> list[list[int]]:
        return list(self._tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]) if texts else []

    def blocks(self, messages: Any, tools: Any) -> tuple[list[int], list[int]] | None:
        """Ids and mask by the template's generation blocks; None where it has none, or they cannot be told apart."""
        if not self._tokenizer.is_fast or not _GENERATION.search(self._chosen(tools)):
            return None
        made = self._tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=self._template,
            return_dict=True,
            return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )
        end = 0
        for start, stop in made.encodings[0].offsets:
            if start > end:
                # A tokenizer that drops characters: a block that ends in one would be marked to the chat's end.
                return None
            end = max(end, stop)
        return list(made["input_ids"]), list(made["assistant_masks"])

    def turns(self, messages: Any, tools: Any) -> Job[tuple[list[int], list[int]]]:
        """Ids and mask by comparing the whole with what it begins with."""
        whole = self._render(messages, tools)
        ids = yield Question(whole)
        mask = [0] * len(ids)
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            start = yield from _length(self._render(messages[:turn], tools, prompt=True), ids, turn, "before")
            up_to = self._render(messages[: turn + 1], tools)
            stop = len(ids) if up_to == whole else (yield from _length(up_to, ids, turn, "up to"))
            ends = [at for at in range(start, stop) if ids[at] == self._tokenizer.eos_token_id]
            stop = ends[-1] + 1 if ends else stop
            mask[start:stop] = [1] * (stop - start)
        return ids, mask

    def _render(self, messages: Any, tools: Any, prompt: bool = False) -> str:
        self._chosen(tools)
        text: str = self._tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=self._template, tokenize=False, add_generation_prompt=prompt
        )
        return text

    def _chosen(self, tools: Any) -> str:
        if self._template is None and not self._tokenizer.chat_template:
            raise UsageError(f"the tokenizer {self._name} has no chat template: give --chat-template FILE")
        template: str = self._tokenizer.get_chat_template(self._template, tools)
        return template


def _length(text: str, ids: list[int], turn: int, which: str) -> Job[int]:
    """Tokens of ``text``, which must be what ``ids`` begin with."""
    begin = yield Question(text)
    if ids[: len(begin)] != begin:
        pairs = zip(begin, ids, strict=False)
        at = next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), len(ids))
        raise Untokenised(
            "turns cannot be told apart",
            f"the chat {which} message {turn} is no prefix of the whole: they differ at token {at}; give "
            "--chat-template with {% generation %} blocks, or input_ids and loss_mask",
        )
    return len(begin)


def _from_pretrained(name: str, trust_remote_code: bool) -> Any:
    with warnings.catch_warnings():
        # What they warn of is about models and images; ids are all that is wanted here.
        warnings.simplefilter("ignore")
        try:
            import jinja2  # noqa: F401 - transformers misses it only at the first chat
            from transformers import AutoTokenizer
            from transformers.utils import logging as noise
        except ModuleNotFoundError as error:
            raise UsageError(
                f"messages and text need {error.name}: pip install transformers jinja2, or give input_ids"
            ) from None
        verbosity = noise.get_verbosity()
        noise.set_verbosity(logging.ERROR)
        try:
            local = Path(name).is_dir()
            return AutoTokenizer.from_pretrained(name, local_files_only=local, trust_remote_code=trust_remote_code)
        except Exception as error:
            # It raises whatever reading the files raised.
            raise UsageError(f"cannot load a tokenizer from {name}: {error}; give --tokenizer DIR") from None
        finally:
            noise.set_verbosity(verbosity)
