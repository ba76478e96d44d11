"""What the states of a prompt must be: transformers in float32, one prompt at a time."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["Reference", "assert_same_states"]

MIN_COSINE = 0.999
NORM_RATIOS = (0.98, 1.02)


class Reference:
    """A model in transformers, float32 arithmetic on its bfloat16 weights."""

    def __init__(self, model_dir: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers and torchvision warn when they are imported
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self.model: Any = model.eval()
        self.layers: int = self.model.config.num_hidden_layers
        self._before_norm: list[torch.Tensor] = []
        self.model.model.norm.register_forward_pre_hook(lambda _, args: self._before_norm.append(args[0]))

    @torch.no_grad()
    def states(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Float32 ``[T, n + 2, H]``: boundaries 0 to n (n: before the final norm), then the state after the norm."""
        self._before_norm.clear()
        out = self.model(torch.tensor([list(token_ids)]), output_hidden_states=True)
        boundaries = [*out.hidden_states[: self.layers], self._before_norm[0]]
        final = self.model.model.norm(self._before_norm[0])
        torch.testing.assert_close(self.model.lm_head(final), out.logits)
        return torch.stack([state[0] for state in (*boundaries, final)], dim=1)

    @torch.no_grad()
    def logits(self, final: torch.Tensor) -> torch.Tensor:
        """What ``lm_head`` makes of final states ``[..., H]``."""
        return torch.as_tensor(self.model.lm_head(final.float()))


def assert_same_states(captured: torch.Tensor, reference: torch.Tensor, boundaries: Sequence[int]) -> None:
    """Captured ``[T, L, H]`` are the reference's ``[T, n + 2, H]`` at ``boundaries`` and after the final norm.

    Every row must point where its reference points, be as long, and be nearer to it than to the rows of the
    neighbouring positions and boundaries.
    """
    last = reference.shape[1] - 1
    assert captured.shape == (reference.shape[0], len(boundaries) + 1, reference.shape[2])
    for index, layer in enumerate([*boundaries, last]):
        mine, own = captured[:, index].float(), reference[:, layer]
        cosine = torch.nn.functional.cosine_similarity(mine, own, dim=-1)
        ratio = mine.norm(dim=-1) / own.norm(dim=-1)
        assert cosine.min() > MIN_COSINE, f"layer {index}: cosine {cosine.min():.5f} at row {int(cosine.argmin())}"
        assert ratio.min() > NORM_RATIOS[0], f"layer {index}: norm ratio {ratio.min():.4f}"
        assert ratio.max() < NORM_RATIOS[1], f"layer {index}: norm ratio {ratio.max():.4f}"
        distance = (mine - own).norm(dim=-1)
        for other in {max(layer - 1, 0), min(layer + 1, last)} - {layer}:
            assert (distance < (mine - reference[:, other]).norm(dim=-1)).all(), f"layer {index} is like layer {other}"
        if len(mine) > 1:
            assert (distance[1:] < (mine[1:] - own[:-1]).norm(dim=-1)).all(), f"layer {index} is one position late"
            assert (distance[:-1] < (mine[:-1] - own[1:]).norm(dim=-1)).all(), f"layer {index} is one position early"
