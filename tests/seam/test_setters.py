"""The setter of every model class of the installed SGLang is brought to the boundaries asked for.

Nothing of SGLang is imported: each setter is compiled alone, from its source, and put on a stand-in for the model.
"""

import __future__

import ast
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from hashtap.layers import SETTER, capture_boundaries, read_boundaries
from hashtap.releases import classes_with_setter, installed_sglang

LAYERS = 12
ROOT = installed_sglang()[1]
LAST_STAGE = SimpleNamespace(is_last_rank=True)


def setters() -> Iterator[tuple[str, str, ast.FunctionDef]]:
    """File, class and syntax tree of each setter that takes ids, not boundaries."""
    for path in sorted((ROOT / "srt" / "models").glob("*.py")):
        if SETTER not in (text := path.read_text()):
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                for part in node.body:
                    if isinstance(part, ast.FunctionDef) and part.name == SETTER and "For" in node.name:
                        yield path.stem, node.name, part


SETTERS = list(setters())


def compiled(function: ast.FunctionDef) -> Callable[..., None]:
    """The function itself, with what it looks up in its module."""
    module = ast.fix_missing_locations(ast.Module([function], []))
    code = compile(module, SETTER, "exec", flags=__future__.annotations.compiler_flag)
    names: dict[str, Any] = {
        "get_parallel": lambda: SimpleNamespace(pp_group=LAST_STAGE),
        "get_pp_group": lambda: LAST_STAGE,  # as 0.5.16 spells it
    }
    exec(code, names)
    return names[SETTER]  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """The part with the layers; some classes hand boundaries on to a setter of its own, which marks layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(LAYERS))
        self.layers_to_capture: list[int] = []

    def set_eagle3_layers_to_capture(self, boundaries: list[int]) -> None:
        self.layers_to_capture = list(boundaries)
        for index in boundaries:
            self.layers[index]._is_layer_to_capture = True


class DeepseekV2(nn.Module):
    """The language model inside a wrapper, with DeepSeek's own setter."""

    def __init__(self) -> None:
        super().__init__()
        self.pp_group, self.config, self.model = LAST_STAGE, SimpleNamespace(num_hidden_layers=LAYERS), Decoder()

    set_eagle3_layers_to_capture = compiled(next(part for _, name, part in SETTERS if name == "DeepseekV2ForCausalLM"))


def stand_in(name: str, setter: ast.FunctionDef) -> nn.Module:
    """A model of the class ``name``: what its setter may touch is there."""
    model: Any = type(name, (nn.Module,), {SETTER: compiled(setter)})()
    counts = {"num_hidden_layers": LAYERS}
    model.pp_group, model.config = LAST_STAGE, SimpleNamespace(**counts, text_config=SimpleNamespace(**counts))
    uses = ast.unparse(setter)
    if "self.language_model" in uses:
        model.language_model = Decoder() if "self.language_model.layers_to_capture" in uses else DeepseekV2()
    if "self.model" in uses:
        model.model = Decoder()
    if "self.layers[" in uses:
        model.layers = Decoder().layers
    return model  # type: ignore[no-any-return]


def test_every_class_is_tried() -> None:
    assert sorted({name for _, name, _ in SETTERS}) == classes_with_setter(ROOT)


@pytest.mark.parametrize("boundaries", [(1, 4, 6), (2, 6, 9), (3, 5, 11), (1, 2, 3), (5,)], ids=str)
@pytest.mark.parametrize(("name", "setter"), [pytest.param(n, s, id=f"{f}-{n}") for f, n, s in SETTERS])
def test_setter(name: str, setter: ast.FunctionDef, boundaries: tuple[int, ...]) -> None:
    model = stand_in(name, setter)
    capture_boundaries(model, boundaries)
    assert read_boundaries(model) == boundaries
