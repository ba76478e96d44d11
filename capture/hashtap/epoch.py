"""The epoch: which weights the states came from, as a fingerprint of the model's config and weights.

It samples the weights (up to :data:`SAMPLES` evenly spaced elements of every parameter), so that it costs
a moment on any size of model. Every update of the weights is counted besides.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

__all__ = ["SAMPLES", "combine_fingerprints", "epoch_name", "fingerprint"]

SAMPLES = 256
_VOLATILE = {"_name_or_path", "_commit_hash", "name_or_path", "transformers_version", "model_path", "context_len"}


def fingerprint(config: Mapping[str, Any], parameters: Iterable[tuple[str, Any]]) -> bytes:
    """16 bytes over a model's config and a sample of its weights.

    Args:
        config: the model's config as plain data; keys that say where or when it was loaded are left out.
        parameters: names and torch tensors of any shape, dtype and device, in any order.
    """
    import torch

    digest = blake2b(digest_size=16, person=b"hashtap-epoch-1")
    digest.update(json.dumps(_stable(config), sort_keys=True, separators=(",", ":")).encode())
    for name, tensor in sorted(parameters, key=lambda pair: pair[0]):
        digest.update(f"\n{name} {tuple(tensor.shape)} {tensor.dtype} ".encode())
        if tensor.numel():
            elements = _in_memory_order(tensor.detach()).view(torch.uint8).reshape(tensor.numel(), -1)
            step = max(1, tensor.numel() // SAMPLES)
            sample = torch.cat((elements[::step][:SAMPLES], elements[-1:]))
            digest.update(sample.cpu().numpy().tobytes())
    return digest.digest()


def combine_fingerprints(fingerprints: Sequence[bytes]) -> bytes:
    """One fingerprint of a model whose weights are spread over ranks, given theirs in the order of the ranks."""
    if len(fingerprints) == 1:
        return fingerprints[0]
    return blake2b(b"".join(fingerprints), digest_size=16, person=b"hashtap-epoch-1").digest()


def epoch_name(weights: bytes, updates: int) -> str:
    """How shards and receipts name an epoch: the fingerprint in hex, and ``+n`` after n updates of the weights."""
    return weights.hex() + (f"+{updates}" if updates else "")


def _in_memory_order(tensor: Any) -> Any:
    """``tensor`` flattened; a transposed one is not copied for it, its elements come in another order instead."""
    by_stride = sorted(range(tensor.dim()), key=lambda axis: (-tensor.stride(axis), axis))
    return tensor.permute(by_stride).reshape(-1)


def _stable(value: Any) -> Any:
    """``value`` as JSON data that is the same in every process; an object is represented by its type."""
    if isinstance(value, Mapping):
        return {str(key): _stable(item) for key, item in value.items() if str(key) not in _VOLATILE}
    if isinstance(value, list | tuple):
        return [_stable(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return value if isinstance(value, str | int | float | bool | None) else str(type(value).__name__)
