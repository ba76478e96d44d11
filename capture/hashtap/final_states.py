"""The final states of a forward pass: after the final norm, as SGLang hands it out, or before it.

The state before the norm is the model's own tensor, the updated residual that the norm adds up and reads. It is
caught by a forward hook on the norm's module, so it is copied, never computed. A pass that replays a CUDA graph or
fuses the norm with a collective does not run that hook; then nothing is caught and the pass is refused.
"""

from collections.abc import Callable, Sequence
from typing import Any

from hashtap.errors import SetupError
from hashtap.layers import holder_of_boundaries

__all__ = ["FinalStates"]


class FinalStates:
    """Finds the final states of a pass.

    Args:
        model: SGLang's model object, its boundaries set.
        finals: which, see :attr:`hashtap.facts.ShardFacts.finals`.
        wanted: whether the pass that runs now may be captured; what others compute is not kept.

    Raises:
        SetupError: when the state before the norm is wanted and the model's final norm is not found.
    """

    def __init__(self, model: Any, finals: Sequence[str], wanted: Callable[[], bool]) -> None:
        self._finals = tuple(finals)
        self._wanted = wanted
        self._caught: tuple[Any, Any] | None = None  # after the norm, before it
        if "pre" not in finals:
            return
        norm = getattr(holder_of_boundaries(model), "norm", None)
        if norm is None or not hasattr(norm, "register_forward_hook"):
            raise SetupError(
                f"{type(model).__name__}: hashtap does not find its final norm, so it cannot capture the state before "
                "it: give --capture-final post"
            )
        norm.register_forward_hook(self._catch)

    def of(self, post: Any) -> list[Any]:
        """The final states wanted, tensors ``[>= T, H]``, ``post`` being the one after the norm.

        Raises:
            SetupError: when the norm did not run in this pass, or what it made is not ``post``.
        """
        caught, self._caught = self._caught, None
        if "pre" not in self._finals:
            return [post]
        if caught is None or caught[0].data_ptr() != post.data_ptr() or caught[0].shape != post.shape:
            raise SetupError(
                "the final norm did not run where hashtap reads the state before it (a CUDA graph or a fused kernel "
                "took its place): give --capture-final post, or --disable-prefill-cuda-graph"
            )
        return [{"post": post, "pre": caught[1]}[final] for final in self._finals]

    def _catch(self, norm: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if self._wanted():
            # With a residual the norm adds it to its input and returns the sum too; without, it reads its input.
            self._caught = (output[0], output[1]) if isinstance(output, tuple) else (output, inputs[0])
