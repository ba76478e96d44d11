"""One captured sample, before it takes a trainer's form."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["View"]


@dataclass(frozen=True, slots=True)
class View:
    """One captured sample, T tokens, A auxiliary layers.

    Attributes:
        sample_id: its name.
        input_ids: int64 ``[T]``.
        loss_mask: int64 ``[T]`` of 0 and 1, or None.
        states: ``[T, A + 1, H]`` as captured, the final state last, but for its norm where that was undone.
        prenorm: whether the final state in ``states`` is the one before the final norm.
    """

    sample_id: str
    input_ids: Tensor
    loss_mask: Tensor | None
    states: Tensor
    prenorm: bool

    @property
    def mask(self) -> Tensor:
        """The loss mask. AssertionError where there is none, which the source refuses for those who need it."""
        assert self.loss_mask is not None
        return self.loss_mask

    @property
    def aux(self) -> Tensor:
        """The auxiliary layers side by side, lowest first, ``[T, A * H]``, in memory of their own."""
        return _own(self.states[:, :-1].flatten(1))

    @property
    def final(self) -> Tensor:
        """The final state ``[T, H]``, in memory of its own."""
        return _own(self.states[:, -1])


def _own(tensor: Tensor) -> Tensor:
    """A copy: torch.save would write all that a view is a part of."""
    return tensor.clone(memory_format=torch.contiguous_format)
