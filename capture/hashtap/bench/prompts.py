"""What is sent: real text that every machine has, samples of the user's own, or random ids."""

import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hashtap.errors import UsageError
from hashtap.samples import load_samples

__all__ = ["Lengths", "cut_prompts", "random_prompts", "sample_prompts", "standard_library_tokens", "text_prompts"]

FEWEST_KINDS = 100
"""A tokenizer that makes fewer different ids of all that text does not know its words."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a prompt: anything from ``low`` to ``high``, drawn with ``seed``."""

    low: int
    high: int
    seed: int = 0

    def draw(self, count: int) -> list[int]:
        """``count`` lengths.

        Raises:
            UsageError: when ``low`` is less than 1 or more than ``high``.
        """
        if not 1 <= self.low <= self.high:
            raise UsageError(f"prompts of {self.low} to {self.high} tokens cannot be made: give 1 <= LOW <= HIGH")
        random = np.random.default_rng(self.seed)
        return [int(length) for length in random.integers(self.low, self.high + 1, count)]


def text_prompts(model: Path, count: int, lengths: Lengths) -> list[list[int]]:
    """Consecutive pieces of the standard library's sources by ``model``'s tokenizer, none of them twice.

    Raises:
        UsageError: when the model directory has no usable tokenizer, or there is too little text.
    """
    sizes = lengths.draw(count)
    try:
        ids = standard_library_tokens(model, sum(sizes))
    except ModuleNotFoundError as error:
        raise UsageError(f"prompts of text need {error.name}: pip install {error.name}, or use --random-ids") from None
    except Exception as error:  # tokenizers raises plain Exceptions
        raise UsageError(f"no text for {model}: {error}; give --samples FILE or --random-ids") from None
    if len(set(ids)) < min(FEWEST_KINDS, len(ids)):
        raise UsageError(f"the tokenizer of {model} makes {len(set(ids))} different ids of text: give --random-ids")
    return list(cut_prompts(ids, sizes))


def random_prompts(vocab_size: int, count: int, lengths: Lengths) -> list[list[int]]:
    """Prompts of ids drawn evenly from the vocabulary."""
    random = np.random.default_rng(lengths.seed)
    return [random.integers(0, vocab_size, size).tolist() for size in lengths.draw(count)]


def sample_prompts(path: Path) -> list[list[int]]:
    """The distinct prompts of a sample file, in its order.

    Raises:
        UsageError: when it cannot be read or has none.
    """
    file = load_samples(path)
    prompts = {sample.key: [int(token) for token in sample.token_ids] for sample in file.samples}
    if not prompts:
        raise UsageError(f"{path} has no sample with input_ids")
    return list(prompts.values())


def cut_prompts(ids: Sequence[int], sizes: Iterable[int]) -> Iterator[list[int]]:
    """``ids`` in consecutive pieces of ``sizes``."""
    start = 0
    for size in sizes:
        yield list(ids[start : start + size])
        start += size


def standard_library_tokens(model: Path, count: int) -> list[int]:
    """The first ``count`` token ids of the standard library's modules, in alphabetical order, by ``model``'s tokenizer.

    Raises:
        ValueError: when the library has fewer.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids: list[int] = []
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if len(ids) >= count:
            return ids[:count]
        ids += tokenizer.encode(source.read_text(encoding="utf-8", errors="replace"), add_special_tokens=False).ids
    if len(ids) < count:
        raise ValueError(f"the standard library has {len(ids)} tokens, {count} were asked for")
    return ids[:count]
