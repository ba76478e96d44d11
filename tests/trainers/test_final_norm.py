"""Which tensor is the final norm, what it multiplies by, and that who applies it again sees no difference."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import rms_norm

from hashtap.errors import UsageError
from hashtap.trainers.final_norm import ONE_PLUS, FinalNorm

H = 64


def model_dir(path: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    for number, (name, tensor) in enumerate(tensors.items()):
        save_file({name: tensor}, path / f"model-{number}.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    return path


def weights() -> Tensor:
    return (torch.rand(H, generator=torch.Generator().manual_seed(3)) * 3 - 0.5).bfloat16()


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "language_model.model.norm.weight",
        "model.language_model.norm.weight",
        "backbone.norm_f.weight",
    ],
)
def test_the_tensor_is_found_among_many(tmp_path: Path, name: str) -> None:
    others = dict.fromkeys(["model.layers.3.norm.weight", "mtp.norm.weight", "visual.norm.weight"], torch.zeros(H))
    norm = FinalNorm.load(model_dir(tmp_path, {name: weights(), **others}))
    assert norm.scale.equal(weights().float())
    assert norm.origin == f"{name} of {tmp_path}"


@pytest.mark.parametrize("config", [{"model_type": "gemma2"}, {"text_config": {"model_type": "qwen3_5_moe_text"}}])
def test_norms_that_add_one(tmp_path: Path, config: dict[str, Any]) -> None:
    norm = FinalNorm.load(model_dir(tmp_path, {"model.norm.weight": weights()}, **config))
    assert norm.scale.equal(weights().float() + 1)
    assert norm.origin.startswith("1 + model.norm.weight")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, r"has no \*\.safetensors"),
        ({"model.embed.weight": torch.ones(H)}, "has 0 tensors that could be the final norm's weight"),
        ({"a.model.norm.weight": weights(), "b.model.norm.weight": weights()}, "has 2 tensors that could be"),
        ({"model.norm.weight": weights(), "model.norm.bias": weights()}, "has a bias: it is no RMSNorm"),
        ({"model.norm.weight": weights() * (torch.arange(H) != 7)}, "1 of 64 factors .* are nearly zero"),
    ],
)
def test_what_cannot_be_undone(tmp_path: Path, tensors: dict[str, Tensor], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        FinalNorm.load(model_dir(tmp_path, tensors))


def test_no_model_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is no model directory: its config\.json cannot be read"):
        FinalNorm.load(tmp_path)
    model_dir(tmp_path, {})
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0garbage!")
    with pytest.raises(UsageError, match=r"the weights in .* cannot be read"):
        FinalNorm.load(tmp_path)


def test_another_width() -> None:
    with pytest.raises(UsageError, match=r"have 72 channels, the final norm \(w of m\) 64"):
        FinalNorm(torch.ones(H), "w of m", False).check_width(72)


@pytest.mark.parametrize(("model_type", "added"), [("llama", 0), ("gemma2", 1)])
def test_applied_again_it_gives_what_was_captured(tmp_path: Path, model_type: str, added: int) -> None:
    """To the rounding of the two bfloat16 numbers."""
    factors = weights().float() + added

    def norm(states: Tensor) -> Tensor:
        return rms_norm(states.float(), [H], factors, eps=1e-6).bfloat16()

    states = (torch.randn(300, H, generator=torch.Generator().manual_seed(4)) * 40).bfloat16()
    post = norm(states)
    undone = FinalNorm.load(model_dir(tmp_path, {"model.norm.weight": weights()}, model_type=model_type)).undo(post)
    assert undone.dtype == torch.bfloat16
    assert not torch.allclose(undone, states), "it is the same up to a factor for each row"
    torch.testing.assert_close(norm(undone), post, rtol=3 * 2**-8, atol=1e-6)


def test_the_list_of_norms_that_add_one_is_that_of_transformers() -> None:
    """The types of every model family whose norm class, used as the final norm, multiplies by 1 + w."""
    package = find_spec("transformers")
    assert package is not None
    assert package.origin is not None
    found: set[str] = set()
    for path in sorted((Path(package.origin).parent / "models").glob("*/modeling_*.py")):
        source = path.read_text()
        classes = re.findall(r"^class (\w*RMSNorm)\((.*?)(?=^class |\Z)", source, re.DOTALL | re.MULTILINE)
        adding = {name for name, body in classes if re.search(r"1(\.0)? \+ self\.weight", body)}
        if adding & set(re.findall(r"self\.(?:norm|final_norm) = (\w+)\(", source)):
            configuration = path.with_name(path.name.replace("modeling_", "configuration_")).read_text()
            found |= set(re.findall(r'model_type(?:: str)? = "(\w+)"', configuration))
    text = {name for name in found if not name.endswith("_vision") and not name.startswith(("t5gemma", "t5_gemma"))}
    assert text == ONE_PLUS
