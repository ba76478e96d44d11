"""What the states of a prompt must be: transformers, one prompt at a time.

Float32 arithmetic on the model's bfloat16 weights is the truth; bfloat16 arithmetic on them tells how much
rounding alone moves a row. Attention sinks of a real model have norms of 25,000 beside 150 elsewhere, so that a
bfloat16 step is larger than what a layer adds: no bfloat16 server can tell two boundaries apart there.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

__all__ = ["Reference", "States", "assert_same_states"]

MIN_COSINE = 0.999
MAX_NORM_ERROR = 0.02
NOISY_SHARE = 0.01  # of the rows, besides one, may be decided by rounding; for them hold:
NOISY_MIN_COSINE, NOISY_MAX_NORM_ERROR = 0.97, 0.1


class States(NamedTuple):
    """Float32 ``[T, n + 2, H]``: boundaries 0 to n (n: before the final norm), then the state after the norm."""

    exact: torch.Tensor
    rounded: torch.Tensor
    token_ids: torch.Tensor  # int64 [T]


class Reference:
    """A model in transformers."""

    def __init__(self, model_dir: Path) -> None:
        torch.set_num_threads(1)  # beside a server, threads that wait for each other take many times as long
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers and torchvision warn when they are imported
            from transformers import AutoModelForCausalLM

            models = [AutoModelForCausalLM.from_pretrained(model_dir, dtype=t) for t in (torch.float32, torch.bfloat16)]
        self._exact, self._rounded = (model.eval() for model in models)

    def states(self, token_ids: Sequence[int]) -> States:
        """The states of a prompt."""
        return States(_states(self._exact, token_ids), _states(self._rounded, token_ids), torch.tensor(list(token_ids)))

    @torch.no_grad()
    def logits(self, final: torch.Tensor) -> torch.Tensor:
        """What ``lm_head`` makes of final states ``[..., H]``."""
        return torch.as_tensor(self._exact.lm_head(final.float()))


@torch.no_grad()
def _states(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    before_norm: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0]))
    out = model(torch.tensor([list(token_ids)]), output_hidden_states=True)
    hook.remove()
    final = model.model.norm(before_norm[0])
    torch.testing.assert_close(model.lm_head(final), out.logits)
    boundaries = [*out.hidden_states[: model.config.num_hidden_layers], before_norm[0]]
    return torch.stack([state[0].float() for state in (*boundaries, final)], dim=1)


def assert_same_states(
    captured: torch.Tensor, reference: States, boundaries: Sequence[int], finals: Sequence[str] = ("post",)
) -> None:
    """Captured ``[T, L, H]`` are the reference's at ``boundaries`` and at the final states named.

    Every row must point where its reference points, be as long, and be nearer to it than to the rows of the
    neighbouring positions and boundaries, as far as bfloat16 can tell those apart.
    """
    exact, rounded, token_ids = reference
    last = exact.shape[1] - 1
    layers = [*boundaries, *({"pre": last - 1, "post": last}[final] for final in finals)]
    assert captured.shape == (exact.shape[0], len(layers), exact.shape[2])
    for index, layer in enumerate(layers):
        mine, own, noisy = captured[:, index].float(), exact[:, layer], rounded[:, layer]
        _assert_close(_turn(mine, own), 1 - MIN_COSINE, 1 - NOISY_MIN_COSINE, f"layer {index}: 1 - cosine")
        _assert_close(_stretch(mine, own), MAX_NORM_ERROR, NOISY_MAX_NORM_ERROR, f"layer {index}: norm error")
        distance, resolution = (mine - own).norm(dim=-1), 2 * (noisy - own).norm(dim=-1)
        for other in {max(layer - 1, 0), min(layer + 1, last)} - {layer}:
            told_apart = (own - exact[:, other]).norm(dim=-1) > resolution
            nearer = distance < (mine - exact[:, other]).norm(dim=-1)
            assert nearer[told_apart].all(), f"layer {index} is like layer {other}"
            assert (~told_apart).sum() <= 1 + NOISY_SHARE * len(mine)
        if len(mine) > 1:
            # The states of a token that comes twice running, as spaces do, may differ by less than rounding.
            twice = token_ids[1:] == token_ids[:-1]
            told_apart = (own[1:] - own[:-1]).norm(dim=-1) > torch.maximum(resolution[1:], resolution[:-1])
            assert (~told_apart & ~twice).sum() <= 1 + NOISY_SHARE * len(mine)
            late = distance[1:] >= (mine[1:] - own[:-1]).norm(dim=-1)
            early = distance[:-1] >= (mine[:-1] - own[1:]).norm(dim=-1)
            assert not late[told_apart].any(), f"layer {index} is one position late"
            assert not early[told_apart].any(), f"layer {index} is one position early"


def _turn(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return 1 - torch.nn.functional.cosine_similarity(one, other, dim=-1)


def _stretch(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one.norm(dim=-1) / other.norm(dim=-1) - 1).abs()


def _assert_close(error: torch.Tensor, limit: float, floor: float, what: str) -> None:
    """No row's error reaches ``floor``, and but for a few rows none reaches ``limit``."""
    over = int((error > limit).sum())
    assert over <= 1 + NOISY_SHARE * len(error), f"{what} is above {limit:g} in {over} of {len(error)} rows"
    assert error.max() < floor, f"{what} is {error.max():.5f} in row {int(error.argmax())}"
