"""Texts and chats to token ids, with the model's own tokenizer and chat template, and the loss mask of a chat.

    tokenizer = ChatTokenizer("MODEL_DIR")
    ids, mask = tokenizer.chat([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}])

Many are made side by side: ``together(map(tokenizer.text_job, texts), tokenizer.encode, 64)``. The tokenizer then
gets the texts of all of them at once, which it spreads over the cores.

Needs transformers, which is imported at the first text.
"""

import logging
import re
import warnings
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hashtap.errors import UsageError
from hashtap.together import together

__all__ = ["ChatTokenizer", "Job", "Question", "Untokenised"]

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


class ChatTokenizer:
    """A model's tokenizer, loaded when it is first needed.

    Args:
        name: directory of the tokenizer, or its name on the hub; None leaves it to :meth:`for_model`.
        chat_template: a file with a template to use instead of the tokenizer's own.
        trust_remote_code: whether code that comes with the tokenizer may run.
    """

    def __init__(
        self, name: str | None = None, *, chat_template: Path | None = None, trust_remote_code: bool = False
    ) -> None:
        self._name, self._template_file, self._trust = name, chat_template, trust_remote_code
        self._missing = "no model is known"
        self._loaded: _Loaded | None = None

    def for_model(self, model: str) -> "ChatTokenizer":
        """This one; where it has no name, that of the model directory ``model``, if it can be read here."""
        if self._name is not None:
            return self
        readable = Path(model).is_dir()
        chosen = ChatTokenizer(
            model if readable else None, chat_template=self._template_file, trust_remote_code=self._trust
        )
        chosen._missing = f"the server's model {model!r} is no directory here"
        return chosen

    def text(self, text: str) -> list[int]:
        """Ids of a plain text, as the tokenizer makes them: with its BOS if it adds one, but never with a second.

        Raises:
            Untokenised: when the tokenizer refuses the text.
            UsageError: when there is no tokenizer, or it cannot be loaded.
        """
        return self._alone(self.text_job(text))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> tuple[list[int], list[int]]:
        """Ids of a chat, and its loss mask of 0 and 1: which of them an assistant's turn wrote, its end token included.

        The ids are the template's alone, as the chat route of a server makes them: a BOS that only the tokenizer would
        put before a text is not there. The mask is that of the template's ``{% generation %}`` blocks. Where it has
        none, a turn is what lies between the chat before it, with the generation prompt, and the chat up to it;
        whatever the template writes behind the turn's last EOS is not of it.

        Raises:
            Untokenised: when the template refuses the chat, or the chat up to a turn is no prefix of the whole.
            UsageError: when there is no tokenizer or template, or they cannot be loaded.
        """
        return self._alone(self.chat_job(messages, tools))

    def text_job(self, text: str) -> Job[list[int]]:
        """What :meth:`text` does, as a job."""
        lead = self._load().lead
        try:
            ids = yield Question(text, special=True)
        except Exception as error:
            # What a tokenizer raises depends on its kind.
            raise Untokenised("tokenizer failed", f"{type(error).__name__}: {error}") from None
        return ids[len(lead) :] if lead and ids[: 2 * len(lead)] == [*lead, *lead] else ids

    def chat_job(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> Job[tuple[list[int], list[int]]]:
        """What :meth:`chat` does, as a job."""
        loaded = self._load()
        try:
            return loaded.blocks(messages, tools) or (yield from loaded.turns(messages, tools))
        except (UsageError, Untokenised):
            raise
        except Exception as error:
            # A template is a program; what it raises depends on the chat.
            raise Untokenised("chat template failed", f"{type(error).__name__}: {error}") from None

    def encode(self, questions: Sequence[Question]) -> list[list[int] | Exception]:
        """The ids of each; an error where the tokenizer raised one. A fast tokenizer takes them on all cores."""
        return self._load().encode(questions)

    def _alone(self, job: Job[R]) -> R:
        (result,) = together([job], self.encode, 1)
        return result

    def _load(self) -> "_Loaded":
        if self._loaded is None:
            if self._name is None:
                raise UsageError(
                    f"messages and text need the model's tokenizer, and {self._missing}: give --tokenizer DIR"
                )
            template = None
            try:
                if self._template_file is not None:
                    template = self._template_file.read_text(encoding="utf-8")
            except (OSError, UnicodeError) as error:
                raise UsageError(f"cannot read the chat template {self._template_file}: {error}") from None
            self._loaded = _Loaded(_from_pretrained(self._name, self._trust), self._name, template)
        return self._loaded


class _Loaded:
    """A tokenizer of transformers, and the template that chats are written by."""

    def __init__(self, tokenizer: Any, name: str, template: str | None) -> None:
        self._tokenizer, self._name, self._template = tokenizer, name, template
        with_special, bare = self._encode(["a"], True)[0], self._encode(["a"], False)[0]
        starts = (at for at in range(len(with_special)) if with_special[at : at + len(bare)] == bare)
        self.lead = with_special[: next(starts, 0)]
        """Ids that the tokenizer puts before a text by itself: BOS, or nothing."""

    def encode(self, questions: Sequence[Question]) -> list[list[int] | Exception]:
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
