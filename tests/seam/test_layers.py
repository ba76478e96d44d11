"""Boundaries are set whatever a model class makes of the ids, and read back through its wrappers."""

import ast
from collections.abc import Sequence
from typing import Any

import pytest
from torch import nn

from hashtap.errors import SetupError
from hashtap.layers import SETTER, capture_boundaries, choose_boundaries, read_boundaries
from hashtap.releases import installed_sglang, predates

LAYERS = 8
LISTS = [(1, 4, 6), (2, 4, 5), (3, 5, 7), (0, 1, 2), (1,), (1, 2, 3, 4, 5, 6, 7)]


class Decoder(nn.Module):
    """The part of a model that has the layers, like SGLang's ``LlamaModel``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(LAYERS))
        self.layers_to_capture: list[int] = []


class AddsOne(nn.Module):
    """Llama, Qwen and most others: an id is the layer whose output is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()

    def set_eagle3_layers_to_capture(self, layer_ids: Sequence[int]) -> None:
        self.model.layers_to_capture = [value + 1 for value in layer_ids]


class AddsOneIfFirstIsOne(AddsOne):
    """DeepSeek and Kimi-K2, GLM-4-MoE-Lite."""

    def set_eagle3_layers_to_capture(self, layer_ids: Sequence[int]) -> None:
        plus = 1 if layer_ids[0] == 1 else 0
        self.model.layers_to_capture = [value + plus for value in layer_ids]


class AddsOneUnlessLastIsAll(AddsOne):
    """gpt-oss."""

    def set_eagle3_layers_to_capture(self, layer_ids: Sequence[int]) -> None:
        plus = 0 if max(layer_ids) == LAYERS else 1
        self.model.layers_to_capture = [value + plus for value in layer_ids]


class Marks(AddsOneIfFirstIsOne):
    """Qwen2-MoE and Qwen3-Next mark the layers too; here with the harder rule."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.model.layers:
            layer._is_layer_to_capture = False

    def set_eagle3_layers_to_capture(self, layer_ids: Sequence[int]) -> None:
        super().set_eagle3_layers_to_capture(layer_ids)
        for index in self.model.layers_to_capture:
            if 0 <= index < LAYERS:
                self.model.layers[index]._is_layer_to_capture = True


class Wrapper(nn.Module):
    """Kimi-K2.5: a vision tower beside a language model, which gets the call."""

    def __init__(self, language_model: nn.Module) -> None:
        super().__init__()
        self.vision_tower = Decoder()
        self.language_model = language_model

    def set_eagle3_layers_to_capture(self, layer_ids: Sequence[int]) -> None:
        if not hasattr(self.language_model, SETTER):
            raise AttributeError("language_model does not support EAGLE3 speculative decoding.")
        getattr(self.language_model, SETTER)(layer_ids)


MODELS: list[Any] = [
    AddsOne,
    AddsOneIfFirstIsOne,
    AddsOneUnlessLastIsAll,
    Marks,
    lambda: Wrapper(AddsOneIfFirstIsOne()),
    lambda: Wrapper(Marks()),
]


@pytest.mark.parametrize("boundaries", LISTS)
@pytest.mark.parametrize("make", MODELS)
def test_every_convention_leads_to_the_boundaries(make: Any, boundaries: tuple[int, ...]) -> None:
    model = make()
    assert read_boundaries(model) == ()
    capture_boundaries(model, boundaries)
    assert read_boundaries(model) == boundaries
    holder = model.language_model.model if isinstance(model, Wrapper) else model.model
    assert sorted(holder.layers_to_capture) == list(boundaries)
    marks = [index for index, layer in enumerate(holder.layers) if getattr(layer, "_is_layer_to_capture", False)]
    assert marks == (list(boundaries) if hasattr(holder.layers[0], "_is_layer_to_capture") else [])


def test_a_later_call_of_the_setter_is_noticed() -> None:
    model = AddsOne()
    capture_boundaries(model, (2, 4, 5))
    model.set_eagle3_layers_to_capture([2, 4, 5])
    assert read_boundaries(model) == (3, 5, 6)


def test_marks_that_disagree_with_the_list() -> None:
    model = Marks()
    capture_boundaries(model, (2, 4, 5))
    model.model.layers_to_capture = [1, 4, 5]
    with pytest.raises(SetupError, match=r"lists boundaries \(1, 4, 5\) but marks the layers \[2, 4, 5\]"):
        read_boundaries(model)


def test_a_class_without_the_setter_is_refused_with_those_that_have_it() -> None:
    with pytest.raises(SetupError, match=r"Linear has no set_eagle3.*LlamaForCausalLM, Qwen3ForCausalLM"):
        capture_boundaries(nn.Linear(1, 1), (1, 2), known=["LlamaForCausalLM", "Qwen3ForCausalLM"])


def test_a_wrapper_whose_language_model_cannot() -> None:
    with pytest.raises(SetupError, match="language_model does not support EAGLE3"):
        capture_boundaries(Wrapper(nn.Linear(1, 1)), (1, 2))


class Gemma3TextModel(Decoder):
    """It hands out what goes into a layer; since 0.5.18 that is without the residual, which goes in apart."""

    def __init__(self, layer: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(LAYERS))


class ResidualApart(nn.Module):
    def forward(self, hidden_states: Any, residual: Any = None) -> Any:
        """A layer of SGLang 0.5.18 and later."""


class ResidualWithin(nn.Module):
    def forward(self, hidden_states: Any) -> Any:
        """A layer of SGLang 0.5.16."""


def test_a_part_of_the_residual_stream_is_refused() -> None:
    model = AddsOne()
    model.model = Gemma3TextModel(ResidualWithin)
    capture_boundaries(model, (2, 4, 5))
    model.model = Gemma3TextModel(ResidualApart)
    with pytest.raises(SetupError, match=r"Gemma3TextModel of this SGLang hands out .* before it is added"):
        capture_boundaries(model, (2, 4, 5))


def test_sglangs_own_gemma_3_hands_on_the_residual_apart() -> None:
    """Where it no longer does, and says so by its layers' parameters, it may be captured again."""
    tree = ast.parse((installed_sglang()[1] / "srt" / "models" / "gemma3_causal.py").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    assert "Gemma3TextModel" in classes
    (forward,) = (part for part in classes["Gemma3DecoderLayer"].body if getattr(part, "name", "") == "forward")
    assert isinstance(forward, ast.FunctionDef)
    apart = "residual" in [argument.arg for argument in forward.args.args]
    assert apart != predates(installed_sglang()[0], "0.5.18")


def test_a_setter_that_sets_nothing() -> None:
    class Silent(AddsOne):
        def set_eagle3_layers_to_capture(self, layer_ids: Sequence[int]) -> None:
            """As on a pipeline stage that is not the last."""

    with pytest.raises(SetupError, match="0 of its parts hold layers_to_capture"):
        capture_boundaries(Silent(), (1, 2))


@pytest.mark.parametrize(("layers", "expected"), [(61, (2, 30, 58)), (32, (2, 16, 29)), (8, (2, 4, 5)), (7, (2, 3, 4))])
def test_default_boundaries(layers: int, expected: tuple[int, ...]) -> None:
    assert choose_boundaries(None, layers) == expected


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 6])
def test_no_default_on_a_tiny_model(layers: int) -> None:
    with pytest.raises(SetupError, match=f"on a model of {layers} layers.*--capture-layers"):
        choose_boundaries(None, layers)


@pytest.mark.parametrize(
    ("asked", "named"), [((2, 4, 8), "8"), ((2, 30, 59), "30"), ((-1, 2), "-1"), ((2, 2, 3), "2 2 3"), ((5, 2), "5 2")]
)
def test_boundaries_that_do_not_exist_or_repeat(asked: tuple[int, ...], named: str) -> None:
    with pytest.raises(SetupError, match=f"--capture-layers {named}"):
        choose_boundaries(asked, LAYERS)


def test_the_kimi_teams_layers() -> None:
    assert choose_boundaries((3, 31, 59), 61) == (3, 31, 59)
