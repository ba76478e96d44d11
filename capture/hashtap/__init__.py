"""hashtap: capture the hidden states of a running SGLang server, matched to their prompts by hash.

>>> import hashtap
>>> reader = hashtap.open("captures")                       # doctest: +SKIP
>>> reader.by_token_ids([1, 2, 3]).hidden_states.shape      # doctest: +SKIP
(3, 4, 576)
"""

from hashtap.config import CaptureConfig, enable
from hashtap.errors import (
    FormatError,
    HashtapError,
    MismatchError,
    ServerLost,
    SetupError,
    UsageError,
)
from hashtap.identity import prompt_key, salt_of
from hashtap.reader import Capture, Reader

__all__ = [
    "Capture",
    "CaptureConfig",
    "FormatError",
    "HashtapError",
    "MismatchError",
    "Reader",
    "ServerLost",
    "SetupError",
    "UsageError",
    "enable",
    "open",
    "prompt_key",
    "salt_of",
]

__version__ = "0.1.0"

open = Reader  # noqa: A001 - people say hashtap.open
