"""What people write first: a forward hook that saves each request's rows of each layer, on the model's own thread.

SGLang loads it by ``--forward-hooks``; it shows what the obvious way costs and is not meant to be used.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hashtap.bench.sides import RID_PREFIX

__all__ = ["make_hook"]


def make_hook(config: dict[str, Any]) -> Callable[..., None]:
    """A hook for ``LogitsProcessor`` that writes ``RID-FIRST_ROW-LAYER.pt`` into ``config["folder"]``."""
    folder = Path(config["folder"])
    folder.mkdir(parents=True, exist_ok=True)

    def hook(module: Any, inputs: tuple[Any, ...], output: Any) -> None:
        _, final, _, batch, aux, *_ = inputs
        if not batch.forward_mode.is_extend() or (torch.distributed.is_initialized() and torch.distributed.get_rank()):
            return
        layers = [*(aux.chunk(aux.shape[-1] // final.shape[-1], -1) if torch.is_tensor(aux) else aux), final]
        start = 0
        for rid, rows, first in zip(batch.rids, batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True):
            if rid.startswith(RID_PREFIX):
                for number, layer in enumerate(layers):
                    torch.save(layer[start : start + rows].cpu().clone(), folder / f"{rid}-{first}-{number}.pt")
            start += rows

    return hook
