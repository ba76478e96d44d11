"""Real text that every machine has: the sources of Python's standard library, tokenised."""

from hashtap.bench.prompts import standard_library_tokens

__all__ = ["standard_library_tokens"]
