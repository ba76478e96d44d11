"""Real text that every machine has: the sources of Python's standard library, tokenised."""

import sysconfig
from pathlib import Path

__all__ = ["standard_library_tokens"]


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
