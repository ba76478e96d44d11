"""Modes of SGLang in which capture would be wrong or was never tried: refused at start, each by one clear line."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hashtap.config import CaptureConfig
from hashtap.errors import SetupError
from hashtap.releases import predates

__all__ = ["WATCHDOG_SHARE", "check_modes", "most_rows_of_a_forward"]

WATCHDOG_SHARE = 0.5
"""The largest part of SGLang's watchdog time-out that holding back prompts may take."""


@dataclass(frozen=True, slots=True)
class _Mode:
    option: str  # field of SGLang's resolved arguments
    refused: Callable[[Any], bool]
    reason: str
    since: str = ""  # the first tested release that has the option
    until: str = ""  # the first tested release in which it does no harm


def _on(value: Any) -> bool:
    return bool(value)


def _several(value: Any) -> bool:
    return value is not None and value > 1


_MODES = (
    _Mode("pp_size", _several, "layers of the earlier pipeline stages never reach the rank that captures"),
    _Mode("attn_cp_size", _several, "context parallelism spreads the tokens of a prompt over ranks"),
    _Mode("dcp_size", _several, "context parallelism spreads the tokens of a prompt over ranks"),
    _Mode("enable_prefill_cp", _on, "context parallelism spreads the tokens of a prompt over ranks"),
    _Mode("enable_layernorm_sp", _on, "the states that hashtap reads are spread over ranks", "0.5.20"),
    _Mode("enable_two_batch_overlap", _on, "it splits a batch in two, out of the order that hashtap reads"),
    _Mode("enable_pdmux", _on, "it runs a prefill layer by layer, past the point where hashtap reads"),
    _Mode("speculative_algorithm", _on, "a draft model runs forwards of its own between those of the model"),
    _Mode("dllm_algorithm", _on, "a diffusion model computes a prompt more than once"),
    _Mode("is_embedding", _on, "an embedding server never comes to the point where hashtap reads"),
    _Mode("enable_return_aux_hidden_states", _on, "it sets the layers to capture, as hashtap does", "0.5.23"),
    _Mode("enable_return_hidden_states", _on, "with layers captured it returns those in place of the final state"),
    _Mode(
        "return_hidden_states_mode", _on, "with layers captured it returns those in place of the final state", "0.5.18"
    ),
    _Mode("disaggregation_mode", lambda value: value not in (None, "null"), "it was never tried"),
    _Mode("encoder_only", _on, "an encoder has no prompt to capture"),
    _Mode("language_only", _on, "its prompts come as embeddings from elsewhere, not as token ids"),
    _Mode("tokenizer_worker_num", _several, "its workers would not have hashtap's routes"),
    _Mode("smg_grpc_mode", _on, "the gRPC server has no hashtap routes"),
    _Mode("grpc_mode", _on, "the gRPC server has no hashtap routes"),
    _Mode("use_ray", _on, "it was never tried"),
    _Mode("elastic_ep_backend", _on, "a batch that a rank was lost in is computed twice, and the first time wrong"),
    _Mode(
        "startup_weight_load_mode",
        lambda value: value == "overlap",
        "the weights come after hashtap has named them: give serial",
        "0.5.18",
    ),
    _Mode("enable_attn_tp_input_scattered", _on, "each rank would hand out its part of the rows"),
    _Mode("nnodes", _several, "the ranks of the other nodes cannot tell this one that they capture"),
    _Mode(
        "flashinfer_allreduce_fusion_backend",
        _on,
        "before SGLang 0.5.23 some models hand out a layer before the sum over ranks that is fused into the next norm, "
        "which SGLang turns on by itself with --tp-size: give --enforce-disable-flashinfer-allreduce-fusion",
        until="0.5.23",
    ),
    _Mode(
        "enable_aiter_allreduce_fusion",
        _on,
        "before SGLang 0.5.23 some models hand out a layer before the sum over ranks that is fused into the next norm",
        until="0.5.23",
    ),
)

_OTHER_CACHES = tuple(
    _Mode(option, _on, "with --capture-prefix-cache on, rows that it brings back may be of other weights", since)
    for option, since in {
        "enable_hierarchical_cache": "",
        "enable_lmcache": "",
        "enable_flexkv": "",
        "radix_cache_backend": "",
        "enable_unified_cache_external_linker": "0.5.20",
    }.items()
)


def check_modes(args: Any, config: CaptureConfig, sglang: str) -> None:
    """Refuse what capture cannot do.

    Args:
        args: SGLang's resolved arguments.
        config: the capture options.
        sglang: its version.

    Raises:
        SetupError: naming option, value and reason.
    """
    for mode in _MODES + (_OTHER_CACHES if config.capture_prefix_cache == "on" else ()):
        if mode.until and not predates(sglang, mode.until):
            continue
        try:
            value = getattr(args, mode.option)
        except AttributeError:
            if predates(sglang, mode.since):
                continue
            raise SetupError(
                f"SGLang {sglang} has no argument {mode.option!r}, which hashtap must check: it does not know that one"
            ) from None
        if mode.refused(value):
            raise SetupError(f"{_flag(mode.option)} {_shown(value)}does not go together with capture: {mode.reason}")
    if not args.disable_radix_cache and config.capture_prefix_cache == "off":
        raise SetupError(
            "the radix cache is on, and rows that it serves are never computed: start with --disable-radix-cache, "
            "or --capture-prefix-cache on"
        )
    limit_s = WATCHDOG_SHARE * (args.watchdog_timeout or float("inf"))
    if config.capture_when_full == "wait" and config.capture_wait_s > limit_s:
        raise SetupError(
            f"--capture-wait-s {config.capture_wait_s:g} comes too near to SGLang's --watchdog-timeout "
            f"{args.watchdog_timeout:g}, which ends a server that makes no progress: give at most {limit_s:g}"
        )


def most_rows_of_a_forward(chunked_prefill_size: int | None, max_prefill_tokens: int, context_len: int) -> int:
    """The most prompt rows that one forward can bring.

    Without chunks SGLang adds whole prompts until the budget is spent, the last one past it.
    """
    if chunked_prefill_size is not None and chunked_prefill_size > 0:
        return chunked_prefill_size
    return max_prefill_tokens + context_len


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _shown(value: Any) -> str:
    return "" if value is True else f"{value} "
