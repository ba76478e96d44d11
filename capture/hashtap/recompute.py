"""Captured prompts computed once more by transformers, each in one shot, and how far what was captured is from that.

Bits need not agree: batch, chunks and kernels decide how sums are rounded. A row's difference is relative:
‖captured - computed‖ / ‖computed‖. transformers and torch are imported when a model is loaded.
"""

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from hashtap.capture import Capture
from hashtap.checks import Ranges, ranges
from hashtap.errors import UsageError
from hashtap.facts import DTYPE_NAME, ShardFacts
from hashtap.model_config import ModelShape
from hashtap.report import Difference
from hashtap_kernels.layout import Dtype

if TYPE_CHECKING:
    import torch

__all__ = ["FOREIGN", "FOREIGN_RUN", "ROUNDING_STEPS", "NotComputed", "Recomputer", "spread"]

T = TypeVar("T")

ROUNDING_STEPS = 16
"""Rounding moves 99 % of a layer's rows by less than so many steps (2**-7 in bfloat16, so 0.125).

Measured on SmolLM2: 3.6 steps served in chunks of 128, 7.7 in batches of short prompts; transformers' own bfloat16 is
8.1, its float16 7.6 steps from its float32. The last layers of a model twice as deep may be 1.4 times as far.
"""

FOREIGN = 0.25
"""Rows that differ by more are not this prompt's, or not of these weights, where :data:`FOREIGN_RUN` stand together.

It is four times what 99 % of SmolLM2's rows differ by at most; of rows of another prompt, 99 % differ by more than 0.4
(the first position left out, where attention sinks are alike), of other weights by more than 1.
"""

FOREIGN_RUN = 4
"""So many rows beside each other, or all of a shorter prompt.

Rounding decides which tokens become attention sinks: 51 of SmolLM2's 36,220 rows differed by more than FOREIGN, one by
2.2, but never two beside each other. What is foreign comes as a chunk or a prompt.
"""

_SERVED = "give the directory of the model that was served"


class NotComputed(Exception):
    """A model cannot compute a prompt: too little memory, or it has not all of the token ids."""


def spread(entries: Sequence[T], most: int) -> list[T]:
    """At most ``most`` of ``entries``, evenly spread, the same ones every time."""
    count = min(most, len(entries))
    return [entries[place * len(entries) // count] for place in range(count)]


class Recomputer:
    """A model in transformers, and how far the captures that it was shown are from what it computes.

    Args:
        model: the directory of the model that was served.
        facts: of the shards whose captures it will be shown; the first one's dtype is what the model computes in.
        trust_remote_code: run code that comes with the model.

    Raises:
        UsageError: when these captures cannot be of this model, its weights cannot be loaded, or a package is missing.
    """

    def __init__(self, model: Path, facts: Sequence[ShardFacts], *, trust_remote_code: bool = False) -> None:
        shape, dtype = ModelShape.read(model), facts[0].geometry.dtype
        for each in facts:
            if each.geometry.hidden != shape.hidden:
                raise UsageError(
                    f"{model} has a hidden size of {shape.hidden}, what was captured {each.geometry.hidden}: {_SERVED}"
                )
            if (last := max(each.boundaries, default=0)) >= shape.layers:
                raise UsageError(
                    f"{model} has {shape.layers} decoder layers, so no boundary {last}, which was captured: {_SERVED}"
                )
        if dtype is Dtype.FP8_E4M3:
            raise UsageError(f"no model computes in {DTYPE_NAME[dtype]}, as captured: leave out --recompute")
        self._model = model
        self._differences: dict[str, list[npt.NDArray[np.float32]]] = defaultdict(list)
        self._decoder, self._device, step = _load(model, DTYPE_NAME[dtype], trust_remote_code)
        self._bound = ROUNDING_STEPS * step

    def compare(self, capture: Capture) -> list[tuple[str, Ranges, str]]:
        """Note a capture's differences; the layers that hold foreign rows, with these rows and a sentence about them.

        Raises:
            FormatError: when its frames are damaged.
            NotComputed: when the model cannot compute the prompt.
        """
        foreign: list[tuple[str, Ranges, str]] = []
        for layer, column in enumerate(self._away(capture)):
            name = capture.facts.layer_name(layer)
            self._differences[name].append(column)
            together = min(FOREIGN_RUN, len(column))
            rows = tuple(
                run for run in ranges(np.flatnonzero(column > FOREIGN).tolist()) if run[1] - run[0] >= together
            )
            if rows:
                median = np.median(np.concatenate([column[start:stop] for start, stop in rows]))
                detail = (
                    f"{self._model} computes other states for this prompt: they differ by {median:.3g} in the median, "
                    f"and rounding explains {self._bound:.3g}"
                )
                foreign.append((name, rows, detail))
        return foreign

    def differences(self) -> list[Difference]:
        """The distribution of the differences noted so far, layer by layer."""
        found = []
        for name, columns in self._differences.items():
            rows = np.concatenate(columns).astype(np.float64)
            median, most, largest = np.quantile(rows, (0.5, 0.99, 1)).tolist()
            found.append(Difference(name, len(rows), float(rows.mean()), median, most, largest, self._bound))
        return found

    def _away(self, capture: Capture) -> list[npt.NDArray[np.float32]]:
        """How far each row of each layer is away, L times ``[T]``."""
        captured = capture.tensor()
        try:
            columns = []
            for layer, states in enumerate(self._states(capture)):  # one at a time: float32 takes twice the memory
                computed = states.float()
                away = (captured[:, layer].float() - computed).norm(dim=-1) / computed.norm(dim=-1)
                # A row that is no number, or computed as zero, is like no other; JSON has no infinity.
                columns.append(away.nan_to_num(nan=1e9, posinf=1e9).numpy())
            return columns
        except Exception as error:
            # Too little memory, ids that it has no embedding of, and what its own code raises.
            raise NotComputed(
                f"{self._model} cannot compute the {len(capture)} tokens of {capture.key.hex()}: {_one_line(error)}"
            ) from None

    def _states(self, capture: Capture) -> "list[torch.Tensor]":
        """What the model computes where ``capture`` was taken, L times ``[T, H]`` on the CPU, in the model's dtype."""
        import torch

        seen: dict[int | str, torch.Tensor] = {}

        def keep(place: int | str) -> Callable[..., None]:
            def hook(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
                # A copy: the layer may add to its input in place.
                seen[place] = (args[0] if args else named["hidden_states"])[0].to("cpu", copy=True)

            return hook

        places: dict[int | str, Any] = {"pre": self._decoder.norm}
        places |= {boundary: self._decoder.layers[boundary] for boundary in capture.boundaries}
        with ExitStack() as hooks, torch.no_grad():
            for place, module in places.items():
                hooks.enter_context(module.register_forward_pre_hook(keep(place), with_kwargs=True))
            ids = torch.from_numpy(capture.token_ids)[None].to(self._device)
            output = self._decoder(ids, use_cache=False)
        seen["post"] = output.last_hidden_state[0].cpu()
        layers: list[int | str] = [*capture.boundaries, *capture.facts.finals]
        return [seen[layer] for layer in layers]


def _load(model: Path, dtype_name: str, trust_remote_code: bool) -> tuple[Any, str, float]:
    """The model's decoder, its device, and the step that a 1 of its dtype is rounded to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers and torchvision warn when they are imported
        try:
            import torch

            transformers: Any = import_module("transformers")
            noise: Any = import_module("transformers.utils.logging")
        except ModuleNotFoundError as error:
            raise UsageError(f"--recompute needs {error.name}: pip install torch transformers") from None
        dtype: torch.dtype = getattr(torch, dtype_name)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        verbosity, bar = noise.get_verbosity(), noise.is_progress_bar_enabled()
        noise.set_verbosity_error()
        noise.disable_progress_bar()
        try:
            whole, info = transformers.AutoModelForCausalLM.from_pretrained(
                model, dtype=dtype, local_files_only=True, output_loading_info=True, trust_remote_code=trust_remote_code
            )
            if missing := sorted(info["missing_keys"]):
                raise UsageError(f"{len(missing)} of its weights are missing, {missing[0]} for one")
            decoder = whole.get_decoder().to(device).eval()
            _ = decoder.layers, decoder.norm
        except Exception as error:
            # It raises whatever reading the files raised.
            raise UsageError(f"cannot load {model}: {_one_line(error)}; {_SERVED}, with its weights") from None
        finally:
            noise.set_verbosity(verbosity)
            if bar:
                noise.enable_progress_bar()
    # Kernels may multiply float32 as TF32, whose step is float16's.
    return decoder, device, max(torch.finfo(dtype).eps, torch.finfo(torch.float16).eps)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
