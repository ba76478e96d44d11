"""Models for tests: tiny random ones, and SmolLM2. Built once into a cache directory.

The cache is ``$HASHTAP_TEST_CACHE``, or ``.cache/models`` at the root of the checkout. Every model is
bfloat16. ``plain=True`` gives the same weights with plain RoPE, for transformers.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.smollm2 import build_once, edit_config, make_smollm2, plain_rope_as_longrope

__all__ = [
    "MAX_POSITIONS",
    "TINY_HIDDEN",
    "TINY_LAYERS",
    "TINY_VOCAB",
    "gemma3",
    "kimi_k2",
    "llama",
    "qwen3",
    "smollm2",
    "vllm_stub",
]

TINY_VOCAB, TINY_HIDDEN, TINY_LAYERS, MAX_POSITIONS = 512, 256, 8, 4096
HEAD_DIM, KV_HEADS = 64, 2
RECIPE = "v1"  # change it when a model is made differently
BASE: dict[str, Any] = {
    "vocab_size": TINY_VOCAB,
    "hidden_size": TINY_HIDDEN,
    "intermediate_size": 512,
    "num_hidden_layers": TINY_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def llama(*, plain: bool = False, layers: int = TINY_LAYERS, seed: int = 0, kv_heads: int = KV_HEADS) -> Path:
    """A tiny Llama: hidden 256, vocabulary 512, ``layers`` decoder layers, 4 heads."""
    name = f"llama-{layers}x{seed}" + (f"-kv{kv_heads}" if kv_heads != KV_HEADS else "") + ("-plain" if plain else "")
    return _build(name, lambda out: _grouped(out, "Llama", plain, layers, seed, kv_heads))


def qwen3(*, plain: bool = False) -> Path:
    """A tiny Qwen3: as :func:`llama`, with norms on queries and keys."""
    name = "qwen3" + ("-plain" if plain else "")
    return _build(name, lambda out: _grouped(out, "Qwen3", plain, TINY_LAYERS, 0, KV_HEADS))


def gemma3() -> Path:
    """A tiny Gemma 3, text alone."""
    return _build("gemma3", _gemma3)


def kimi_k2() -> Path:
    """A tiny Kimi-K2-class model (MLA, mixture of experts), whose auxiliary states come packed ``[T, 3 H]``.

    To be served with :func:`vllm_stub` on the path. SGLang's CPU attention runs its first chunk by
    another formula than DeepSeek's, so its values are not to be compared with transformers.
    """
    return _build("kimi-k2", _kimi_k2)


def smollm2() -> Path:
    """SmolLM2-135M-Instruct: 30 layers, hidden 576, vocabulary 49,152."""
    return make_smollm2(_cache() / f"smollm2-{RECIPE}")


def vllm_stub() -> Path:
    """A directory for PYTHONPATH with the one vllm function that SGLang imports (and never calls) on a CPU."""

    def build(out: Path) -> None:
        package = out / "vllm"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "_custom_ops.py").write_text(
            "def rotary_embedding(*args, **kwargs):\n    raise NotImplementedError\n"
        )

    return _build("vllm-stub", build)


def _cache() -> Path:
    return Path(os.environ.get("HASHTAP_TEST_CACHE") or Path(__file__).parents[1] / ".cache" / "models")


def _build(name: str, build: Callable[[Path], None]) -> Path:
    return build_once(_cache() / f"{name}-{RECIPE}", build)


def _grouped(out: Path, family: str, plain: bool, layers: int, seed: int, kv_heads: int) -> None:
    import transformers

    rope = plain_rope_as_longrope(10000.0, HEAD_DIM, MAX_POSITIONS)
    config = getattr(transformers, f"{family}Config")(
        **BASE
        | {"num_key_value_heads": kv_heads, "head_dim": HEAD_DIM, "num_hidden_layers": layers}
        | ({} if plain else {"rope_parameters": rope})
    )
    _save(out, getattr(transformers, f"{family}ForCausalLM"), config, seed)


def _gemma3(out: Path) -> None:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(**BASE, num_key_value_heads=2, head_dim=HEAD_DIM, query_pre_attn_scalar=HEAD_DIM)
    _save(out, Gemma3ForCausalLM, config, seed=0)


def _kimi_k2(out: Path) -> None:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **BASE,
        num_key_value_heads=4,
        # Equal ranks: the only ones whose shapes fit SGLang's torch_native attention.
        kv_lora_rank=32,
        qk_rope_head_dim=32,
        qk_nope_head_dim=32,
        v_head_dim=32,
        q_lora_rank=128,
        moe_intermediate_size=128,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 1.0,
            "original_max_position_embeddings": MAX_POSITIONS,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )
    _save(out, DeepseekV3ForCausalLM, config, seed=0)
    edit_config(
        out,
        model_type="kimi_k2",
        moe_layer_freq=1,
        num_nextn_predict_layers=0,
        ep_size=1,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
    )


def _save(out: Path, model_class: Any, config: Any, seed: int) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(seed)
    model_class(config).to(torch.bfloat16).save_pretrained(out)
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"t{i}": i for i in range(3, TINY_VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(out)
