"""Texts and chats to token ids, with the model's own tokenizer and chat template, and the loss mask of a chat.

    tokenizer = ChatTokenizer("MODEL_DIR")
    ids, mask = tokenizer.chat([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}])

Many are made side by side: ``together(map(tokenizer.text_job, texts), tokenizer.encode, 64)``. The tokenizer then
gets the texts of all of them at once, which it spreads over the cores.

Needs transformers, which is imported at the first text.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hashtap.errors import UsageError
from hashtap.loaded_tokenizer import Job, LoadedTokenizer, Question, Untokenised
from hashtap.together import together

__all__ = ["ChatTokenizer"]

R = TypeVar("R")


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
        self._loaded: LoadedTokenizer | None = None

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

    def _load(self) -> LoadedTokenizer:
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
            self._loaded = LoadedTokenizer(self._name, template, trust_remote_code=self._trust)
        return self._loaded
