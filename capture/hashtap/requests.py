"""What SGLang's requests say: whether they are to be captured, whether they may be, whether they are sound."""

from collections.abc import Mapping
from typing import Any

from hashtap.identity import PAST_THE_CACHE

__all__ = ["check_ids", "check_no_beams", "is_past_the_cache", "mark_as_warm_up", "refusal", "wants_capture"]

_CHANGES_STATES = {
    "lora_id": "it uses a LoRA adapter",
    "multimodal_inputs": "it holds images, audio or video",
    "input_embeds": "it is given as embeddings",
    "positional_embed_overrides": "it overrides embeddings",
    "token_type_ids": "it has token types",
    "multi_item_delimiter_indices": "it scores several items, which do not see each other",
    "session": "it continues a session, so its ids are not the whole prompt",
    "extra_key": "it has an extra_key or cache salt",
    "cache_salt": "it has a cache salt",
}


def wants_capture(req: Any, requests: str, health_prefix: str) -> bool:
    """Whether a request that reached the scheduler is to be captured.

    Args:
        req: SGLang's ``Req``.
        requests: the option ``capture_requests``.
        health_prefix: what the rids of health checks start with.
    """
    if req.rid.startswith(health_prefix) or req.to_finish is not None or req.finished_reason is not None:
        return False
    if getattr(req, "beam_group", None) is not None:
        return False  # it has lost its custom_params, and with them the tag
    params = req.sampling_params.custom_params
    tag = params.get("hashtap") if isinstance(params, Mapping) else None
    return requests == "all" if tag is None else tag is True


def refusal(req: Any) -> str | None:
    """Why a prompt must not be captured: its states depend on more than its token ids. None when it may."""
    for name, reason in _CHANGES_STATES.items():
        if getattr(req, name, None) is not None and not (name == "extra_key" and is_past_the_cache(req)):
            return reason
    return None


def is_past_the_cache(req: Any) -> bool:
    """Whether a request has a part of the prefix cache for itself, as ``hashtap extract`` sends one again."""
    return req.extra_key is not None and req.extra_key.startswith(PAST_THE_CACHE)


def check_ids(input_ids: Any, vocab_size: int) -> None:
    """Refuse token ids that the model does not have: one of them would end a server on a CPU.

    Args:
        input_ids: a prompt's ids, a list of such, or None for a prompt given otherwise.
        vocab_size: the model's.

    Raises:
        ValueError: naming the id; SGLang answers it with status 400.
    """
    if not isinstance(input_ids, list) or not input_ids:
        return
    if isinstance(input_ids[0], list):
        for one in input_ids:
            check_ids(one, vocab_size)
        return
    low, high = min(input_ids), max(input_ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise ValueError(f"token id {wrong} is not in the vocabulary of {vocab_size}")


def check_no_beams(sampling_params: Any) -> None:
    """Refuse to capture prompts of beam searches, of which SGLang gives no receipt.

    Args:
        sampling_params: of a request that has just come, a dict or a list of such.

    Raises:
        ValueError: SGLang answers it with status 400.
    """
    for one in sampling_params if isinstance(sampling_params, list) else [sampling_params]:
        if isinstance(one, dict) and (one.get("beam_width") or 1) > 1:
            params = one.get("custom_params")
            if isinstance(params, Mapping) and params.get("hashtap") is True:
                raise ValueError(
                    f"beam_width {one['beam_width']}: hashtap captures no prompt of a beam search; send it without"
                )


def mark_as_warm_up(obj: Any) -> None:
    """Keep SGLang's ``GenerateReqInput`` out of ``--capture-requests all``, unless it is tagged itself."""
    if obj.sampling_params is None:
        obj.sampling_params = {}
    params = obj.sampling_params if isinstance(obj.sampling_params, list) else [obj.sampling_params]
    for one in params:
        if isinstance(one, dict):
            one["custom_params"] = {"hashtap": False, **(one.get("custom_params") or {})}
