"""Undoing a model's final norm: from what ``lm_head`` reads to what the norm reads, up to one factor a token.

RMSNorm is x / rms(x) * w, and it gives the same for every multiple of x. So ``post / w`` is as good as x to whoever
applies the norm again; what is lost is the rounding of one division.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hashtap.errors import UsageError

__all__ = ["ONE_PLUS", "FinalNorm"]

# transformers' model types whose final norm multiplies by 1 + w.
ONE_PLUS = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "minimax_m3_vl",
        "minimax_m3_vl_text",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
        "recurrent_gemma",
        "step3p5",
        "step3p7",
        "vaultgemma",
    }
)
_NAMES = ("model.norm", "language_model.norm", "transformer.norm", "model.final_layernorm", "backbone.norm_f")
_LEAST = 1e-3
"""A factor smaller than this part of the median one cannot be divided by: what it left has too few bits."""


@dataclass(frozen=True, slots=True)
class FinalNorm:
    """The factors of a model's final norm.

    Attributes:
        scale: float32 ``[H]``, w or 1 + w.
        origin: the tensor and the model directory that they come from.
        one_plus: whether it is 1 + w.
    """

    scale: Tensor
    origin: str
    one_plus: bool

    @classmethod
    def load(cls, model: Path) -> Self:
        """The final norm of a model directory: ``config.json`` and safetensors.

        Raises:
            UsageError: when there is none, several, one with a bias, or one that cannot be undone.
        """
        config = _config(model)
        found = {name: file for name, file in _tensors(model).items() if _is_final_norm(name)}
        weights = [name for name in found if name.endswith(".weight")]
        if len(weights) != 1:
            raise UsageError(
                f"{model} has {len(weights)} tensors that could be the final norm's weight ({', '.join(weights)}), "
                "not one: capture with --capture-final pre instead"
            )
        (name,) = weights
        if name.removesuffix("weight") + "bias" in found:
            raise UsageError(
                f"the final norm {name} of {model} has a bias: it is no RMSNorm and cannot be undone; capture with "
                "--capture-final pre"
            )
        with safe_open(found[name], framework="pt") as file:
            weight = file.get_tensor(name).to(torch.float32)
        types = {config.get("model_type"), (config.get("text_config") or {}).get("model_type")}
        one_plus = bool(types & ONE_PLUS)
        norm = cls(weight + 1 if one_plus else weight, f"{'1 + ' if one_plus else ''}{name} of {model}", one_plus)
        norm.check()
        return norm

    def check(self) -> None:
        """Raise UsageError when a factor is too small to be divided by."""
        size = self.scale.abs()
        least = _LEAST * float(size.median())
        if small := int((size <= least).sum()):
            raise UsageError(
                f"{small} of {len(size)} factors of the final norm ({self.origin}) are nearly zero (the smallest is "
                f"{float(size.min()):g}): what they wiped out cannot be undone; capture with --capture-final pre"
            )

    def check_width(self, hidden: int) -> None:
        """Raise UsageError when the captured states, ``[T, hidden]``, are not of this norm's width."""
        if hidden != len(self.scale):
            raise UsageError(
                f"the captured states have {hidden} channels, the final norm ({self.origin}) {len(self.scale)}: give "
                "the directory of the model that was served"
            )

    def undo(self, post: Tensor) -> Tensor:
        """The state before the norm, up to one factor a row, from that after it; ``[T, H]`` and dtype as given."""
        return (post.to(torch.float32) / self.scale).to(post.dtype)


def _is_final_norm(name: str) -> bool:
    stem, _, kind = name.rpartition(".")
    return kind in ("weight", "bias") and any(stem == end or stem.endswith(f".{end}") for end in _NAMES)


def _config(model: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((model / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{model} is no model directory: its config.json cannot be read: {error}") from None
    return config


def _tensors(model: Path) -> dict[str, Path]:
    """Every tensor of a model directory and its file."""
    tensors: dict[str, Path] = {}
    try:
        for path in sorted(model.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                tensors |= dict.fromkeys(file.keys(), path)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"the weights in {model} cannot be read: {error}") from None
    if not tensors:
        raise UsageError(f"{model} has no *.safetensors: give the directory of the model that was served")
    return tensors
