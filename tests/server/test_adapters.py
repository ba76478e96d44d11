"""LoRA adapters beside the base model: what goes through an adapter is refused, the rest is exact, in one batch."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests import models
from tests.server.conftest import Served, served
from tests.server.plugins import plugin
from tests.server.prompts import random_prompts, receipt
from tests.server.reference import Reference

from hashtap.identity import prompt_key
from hashtap.reader import Reader

pytestmark = [pytest.mark.server, pytest.mark.slow]

RANK, HIDDEN, HEADS, GROUPS, HEAD_DIM = 4, 256, 4, 2, 64

NO_PINNED_MEMORY = """
# SGLang's LoRA asks for pinned memory, which a machine without a GPU does not have.
import functools
import torch

def register():
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    for name in ("tensor", "empty", "zeros", "ones", "full"):
        setattr(torch, name, unpinned(getattr(torch, name)))

def unpinned(make):
    @functools.wraps(make)
    def call(*args, pin_memory=False, **kwargs):
        return make(*args, **kwargs)
    return call
"""


def make_adapter(path: Path, seed: int) -> Path:
    path.mkdir()
    random = torch.Generator().manual_seed(seed)
    outputs = {"q_proj": HEADS, "k_proj": GROUPS, "v_proj": GROUPS, "o_proj": HIDDEN // HEAD_DIM}
    tensors = {}
    for layer in range(models.TINY_LAYERS):
        for name, heads in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=random).bfloat16()
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(heads * HEAD_DIM, RANK, generator=random).bfloat16()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": list(outputs), "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("adapted")
    flags = ("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", RANK)
    flags += ("--lora-paths", f"ad1={make_adapter(path / 'ad1', 1)}", "--max-loras-per-batch", 2)
    flags += ("--lora-target-modules", "q_proj", "k_proj", "v_proj", "o_proj")
    with served(path, *flags, environment=plugin(path, NO_PINNED_MEMORY)) as server:
        yield server


def generate(served: Served, prompt: list[int], adapter: str | None) -> Any:
    params = {"max_new_tokens": 2, "temperature": 0, "custom_params": {"hashtap": True}}
    body = {"input_ids": prompt, "sampling_params": params, "lora_path": adapter}
    return served.post("/generate", body)


@pytest.mark.cell("LoRA adapters", "refused", "prompts that go through one, also one that was loaded later")
@pytest.mark.cell("beside LoRA adapters", "exact", "the base model's prompts, in the same batches and when one is gone")
def test_base_and_adapter_in_one_batch(adapted: Served, reference: Reference, tmp_path: Path) -> None:
    loaded = {"lora_name": "ad2", "lora_path": str(make_adapter(tmp_path / "ad2", 2))}
    adapted.post("/load_lora_adapter", loaded)
    prompts = random_prompts([40, 200, 90, 300] * 3, seed=110)
    adapters = [None, "ad1", None, "ad2", None, None, "ad1", "ad2", None, "ad1", None, None]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda one: generate(adapted, *one), zip(prompts, adapters, strict=True)))
    base = [prompt for prompt, adapter in zip(prompts, adapters, strict=True) if adapter is None]
    for answer, adapter in zip(answers, adapters, strict=True):
        assert receipt(answer)["state"] == ("captured" if adapter is None else "refused")
        assert adapter is None or "LoRA" in receipt(answer)["reason"]
    adapted.check(reference, *base)
    for prompt, adapter in zip(prompts, adapters, strict=True):
        assert adapter is None or prompt_key(prompt) not in Reader(adapted.captures)
    # Away with one: it has no part in the base model's weights, so the epoch is what it was.
    epochs = {receipt(answer)["epoch"] for answer in answers}
    adapted.post("/unload_lora_adapter", {"lora_name": "ad2"})
    (late,) = random_prompts([120], seed=112)
    assert {receipt(generate(adapted, late, None))["epoch"]} == epochs
    adapted.check(reference, late)
    # The same ids with and without an adapter: two states, of which one is stored.
    (twice,) = random_prompts([70], seed=111)
    with_adapter, without = generate(adapted, twice, "ad1"), generate(adapted, twice, None)
    assert with_adapter["output_ids"] != without["output_ids"]
    adapted.check(reference, twice)
