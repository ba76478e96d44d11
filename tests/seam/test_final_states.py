"""The state before the final norm is the model's own tensor, or the pass is refused."""

from typing import Any

import pytest
import torch
from torch import nn

from hashtap.errors import SetupError
from hashtap.final_states import FinalStates


class Norm(nn.Module):
    """As SGLang's: with a residual it writes the sum into it and returns both."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return x * 0.5
        residual += x
        return residual * 0.5, residual


class Decoder(nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.norm, self.fused, self.layers_to_capture = Norm(), fused, [1]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The state after the norm and the one before it."""
        if self.fused:
            return self.norm(x, torch.ones_like(x))[0], x + 1
        return self.norm(x), x


def made(finals: tuple[str, ...], *, fused: bool = True, wanted: bool = True) -> tuple[Decoder, FinalStates]:
    decoder = Decoder(fused)
    return decoder, FinalStates(nn.Sequential(decoder), finals, lambda: wanted)


@pytest.mark.parametrize("fused", [True, False])
def test_both_are_the_tensors_of_the_model(fused: bool) -> None:
    decoder, states = made(("pre", "post"), fused=fused)
    for _ in range(2):
        post, expected = decoder(torch.randn(3, 8).bfloat16())
        pre, same = states.of(post)
        assert same is post
        assert torch.equal(pre, expected)


def test_before_the_norm_alone_and_after_it_alone() -> None:
    decoder, states = made(("pre",))
    post, expected = decoder(torch.randn(2, 8))
    assert [torch.equal(state, expected) for state in states.of(post)] == [True]
    decoder, states = made(("post",))
    post, _ = decoder(torch.randn(2, 8))
    assert [state is post for state in states.of(post)] == [True]


def test_a_pass_in_which_the_norm_did_not_run() -> None:
    decoder, states = made(("pre",))
    post, _ = decoder(torch.randn(2, 8))
    states.of(post)
    with pytest.raises(SetupError, match=r"the final norm did not run.*--disable-prefill-cuda-graph"):
        states.of(post)


def test_what_the_norm_made_is_not_what_is_handed_out() -> None:
    decoder, states = made(("pre",))
    post, _ = decoder(torch.randn(2, 8))
    with pytest.raises(SetupError, match="the final norm did not run"):
        states.of(post.clone())
    decoder(torch.randn(3, 8))
    with pytest.raises(SetupError, match="the final norm did not run"):
        states.of(post)


def test_nothing_is_kept_of_what_others_compute() -> None:
    decoder, states = made(("pre",), wanted=False)
    post, _ = decoder(torch.randn(2, 8))
    with pytest.raises(SetupError):
        states.of(post)


def test_a_model_without_a_norm_where_it_is_looked_for() -> None:
    model = Decoder(True)
    del model.norm
    with pytest.raises(SetupError, match=r"Decoder: hashtap does not find its final norm.*--capture-final post"):
        FinalStates(model, ("pre",), lambda: True)
    FinalStates(model, ("post",), lambda: True)
