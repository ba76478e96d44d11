"""The gather of hashtap: one launch that turns the layer tensors of a batch into frames.

``layout``, ``proof``, ``plan`` and ``planes`` need NumPy only. The names below need torch, and triton where they run a
kernel; they are loaded when first asked for, so importing this package loads neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hashtap_kernels.gather import Gather
    from hashtap_kernels.reference import gather_reference

__all__ = ["Gather", "gather_reference"]

_HOME = {"Gather": "gather", "gather_reference": "reference"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)
