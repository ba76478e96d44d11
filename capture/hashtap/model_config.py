"""What a model's ``config.json`` says of its size."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from hashtap.errors import UsageError

__all__ = ["ModelShape"]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Decoder layers, elements of a hidden state, and token ids of a model."""

    layers: int
    hidden: int
    vocab_size: int

    @classmethod
    def read(cls, path: Path) -> Self:
        """From a ``config.json`` or the directory that holds it; of a model with images, its text part.

        Raises:
            UsageError: when there is none, or it does not say.
        """
        file = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(file.read_text())
            text = config.get("text_config", config)
            return cls(*(int(text[name]) for name in ("num_hidden_layers", "hidden_size", "vocab_size")))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"{file} is no model's config.json: {error}") from None
        except KeyError as missing:
            raise UsageError(f"{file} does not say {missing}: is it a decoder model's config.json?") from None
