"""Boundaries: which layers to capture, said so that they mean one thing on every model class.

Boundary b is the residual stream after b decoder layers. SGLang's ``layers_to_capture`` holds boundaries
(value v: the input of layer v), but the setter that fills it takes ids that mean different layers on
different classes, so the list is read back from the model itself, through whatever wraps it.
"""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

from hashtap.errors import SetupError

__all__ = [
    "SETTER",
    "capture_boundaries",
    "check_boundaries",
    "choose_boundaries",
    "holder_of_boundaries",
    "read_boundaries",
]

SETTER = "set_eagle3_layers_to_capture"
_LIST = "layers_to_capture"
_FLAG = "_is_layer_to_capture"
_PARTS_OF_THE_STREAM = ("Gemma3TextModel",)
"""Classes that hand out what a layer made without the residual, where the layers hand that on apart (since 0.5.18)."""


def choose_boundaries(asked: Sequence[int] | None, layers: int) -> tuple[int, ...]:
    """The boundaries to capture on a model of ``layers`` decoder layers: those asked for, or 2, n/2 and n-3.

    Raises:
        SetupError: when one does not exist, or the model is too small for the default.
    """
    if asked is not None:
        check_boundaries(asked, layers)
        return tuple(asked)
    default = (2, layers // 2, layers - 3)
    if not 0 < default[0] < default[1] < default[2]:
        raise SetupError(
            f"the default boundaries 2, n/2 and n-3 are {', '.join(map(str, default))} on a model of {layers} layers, "
            "which are not three different ones in rising order: give --capture-layers"
        )
    return default


def check_boundaries(boundaries: Sequence[int], layers: int) -> None:
    """Refuse boundaries that are repeated, out of order or not between 0 and ``layers`` - 1.

    Raises:
        SetupError: naming the boundary.
    """
    for boundary in boundaries:
        if not 0 <= boundary < layers:
            raise SetupError(
                f"--capture-layers {boundary}: this model has boundaries 0 to {layers - 1} (b: after b of its {layers} "
                f"decoder layers; after all of them comes the final state, which is captured anyway)"
            )
    if list(boundaries) != sorted(set(boundaries)):
        raise SetupError(
            f"--capture-layers {' '.join(map(str, boundaries))}: give different boundaries in rising order"
        )


def capture_boundaries(model: Any, boundaries: Sequence[int], *, known: Sequence[str] = ()) -> None:
    """Make ``model`` hand out the states at ``boundaries``, and read back that it will.

    Args:
        model: SGLang's model object (a torch module), maybe a wrapper around the one with the layers.
        boundaries: in rising order.
        known: names of the model classes that can do it, for the error.

    Raises:
        SetupError: when the class has no setter, or cannot be brought to these boundaries.
    """
    name = type(model).__name__
    if not hasattr(model, SETTER):
        raise SetupError(
            f"{name} has no {SETTER}, so SGLang cannot hand out its layers; classes that can, and those derived from "
            f"them: {', '.join(known)}"
        )
    # Most classes take "the output of layer i" and add 1; some take the boundary as it is, some either way.
    for ids in ([boundary - 1 for boundary in boundaries], list(boundaries)):
        try:
            getattr(model, SETTER)(ids)
        except AttributeError as error:
            raise SetupError(f"{name} cannot hand out its layers: {error}") from error
        holders = list(_holders(model))
        if len(holders) != 1:
            raise SetupError(
                f"{name}: {len(holders)} of its parts hold {_LIST} after {SETTER}({ids}), one was expected; "
                "hashtap cannot tell which layers it would get"
            )
        if _boundaries_of(holders[0]) == tuple(boundaries):
            break
    else:
        # No ids lead there (DeepSeek adds 1 if the first id is 1, so it never reaches 1, 4, 6): set the result itself.
        setattr(holders[0], _LIST, list(boundaries))
    holder = holders[0]
    part = type(holder).__name__
    if part in _PARTS_OF_THE_STREAM and "residual" in inspect.signature(holder.layers[0].forward).parameters:
        raise SetupError(
            f"{name}: {part} of this SGLang hands out what a layer made before it is added to the residual stream, so "
            "its boundaries cannot be captured: use SGLang 0.5.16 for it"
        )
    _set_flags(holder, boundaries)
    found = read_boundaries(model)
    if found != tuple(boundaries):
        raise SetupError(f"{name} would capture boundaries {found}, not {tuple(boundaries)}")


def read_boundaries(model: Any) -> tuple[int, ...]:
    """The boundaries that ``model`` will hand out, in rising order; empty when none.

    Raises:
        SetupError: when its list and the marks on its layers disagree.
    """
    holders = list(_holders(model))
    if len(holders) != 1:
        return ()
    found = _boundaries_of(holders[0])
    marked = _marked(holders[0])
    if marked is not None and marked != set(found):
        raise SetupError(f"{type(model).__name__} lists boundaries {found} but marks the layers {sorted(marked)}")
    return found


def holder_of_boundaries(model: Any) -> Any:
    """The part of ``model`` that hands out the states: the one with the decoder layers and the final norm.

    Raises:
        SetupError: when no part or several of them do.
    """
    holders = list(_holders(model))
    if len(holders) != 1:
        raise SetupError(f"{type(model).__name__}: {len(holders)} of its parts hold {_LIST}, one was expected")
    return holders[0]


def _holders(model: Any) -> Iterator[Any]:
    """The parts of ``model`` that have a filled list of layers to capture."""
    return (part for part in model.modules() if getattr(part, _LIST, None))


def _boundaries_of(holder: Any) -> tuple[int, ...]:
    return tuple(sorted(getattr(holder, _LIST)))


def _marked(holder: Any) -> set[int] | None:
    """Indices of the layers marked for capture; None when this class does not mark layers."""
    layers = list(getattr(holder, "layers", ()))
    if not any(hasattr(layer, _FLAG) for layer in layers):
        return None
    return {index for index, layer in enumerate(layers) if getattr(layer, _FLAG, False)}


def _set_flags(holder: Any, boundaries: Sequence[int]) -> None:
    """Bring the marks in line: an attempt with other ids left its own behind."""
    if _marked(holder) is not None:
        for index, layer in enumerate(holder.layers):
            setattr(layer, _FLAG, index in boundaries)
