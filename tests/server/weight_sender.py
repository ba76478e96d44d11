"""A training process that sends its weights to a running server, with SGLang's own means for that.

python -m tests.server.weight_sender URL MODEL_DIR (tensor | distributed)
"""

import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file
from sglang.srt.utils.common import MultiprocessingSerializer, init_custom_process_group

from hashtap.releases import installed_sglang, predates

Post = Callable[[str, dict[str, Any]], None]
PIECES = 3  # of an update: each is a call of its own
GROUP = "weights-of-a-test"


def post(url: str, path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(url + path, json=body, timeout=120)
    assert answer.is_success, answer.text
    assert answer.json()["success"], answer.text


def send_tensors(tell: Post, weights: list[tuple[str, torch.Tensor]]) -> None:
    """The server maps the memory that they lie in."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    for piece in range(PIECES):
        text = MultiprocessingSerializer.serialize(weights[piece::PIECES], output_str=True)
        tell("/update_weights_from_tensor", {"serialized_named_tensors": [text], "flush_cache": True})


def broadcast(tell: Post, weights: list[tuple[str, torch.Tensor]]) -> None:
    """Trainer and server are ranks 0 and 1 of a process group."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    body |= {"group_name": GROUP, "backend": "gloo"}
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(tell, "/init_weights_update_group", body)
        place = f"tcp://127.0.0.1:{port}"
        group = init_custom_process_group("gloo", place, world_size=2, rank=0, group_name=GROUP)
        joined.result()
        for piece in range(PIECES):
            some = weights[piece::PIECES]
            body = {"names": [name for name, _ in some], "shapes": [list(tensor.shape) for _, tensor in some]}
            body |= {"dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in some], "group_name": GROUP}
            told = pool.submit(tell, "/update_weights_from_distributed", body)
            for _, tensor in some:
                torch.distributed.broadcast(tensor, src=0, group=group)
            told.result()
    tell("/destroy_weights_update_group", {"group_name": GROUP})


def main(url: str, model: Path, how: str) -> None:
    """Send all weights of a checkpoint."""
    tell, weights = partial(post, url), list(load_file(model / "model.safetensors").items())
    in_steps = not predates(installed_sglang()[0], "0.5.23")
    if in_steps:
        tell("/begin_weight_update", {"selector": "all"})
    {"tensor": send_tensors, "distributed": broadcast}[how](tell, weights)
    if in_steps:
        tell("/end_weight_update", {})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
