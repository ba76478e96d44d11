"""Captures of a real model for the trainers' tests: ``python -m tests.trainers.smollm2 OUT``, once.

SmolLM2-135M-Instruct runs in transformers over the standard library's sources; what its layers make goes through a real
session, kernel and writer. ``OUT/post`` and ``OUT/pre`` are capture directories of the same 24 samples of 256 tokens,
the final state after and before the final norm. ``OUT/truth.safetensors`` never went through hashtap: of the first four
samples every boundary and both final states; and ``losses`` float32 ``[24, 255]``, the model's own of each next token.
"""

import sys
import warnings
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from bench.smollm2 import build_once
from bench.text import standard_library_tokens
from safetensors.torch import save_file
from tests.models import smollm2
from torch import Tensor
from torch.nn.functional import cross_entropy

from hashtap.config import CaptureConfig
from hashtap.directory import CaptureDirectory
from hashtap.facts import ShardFacts
from hashtap.identity import prompt_key
from hashtap.manifest import Manifest
from hashtap.samples import Sample
from hashtap.session import Batch, Session
from hashtap_kernels.layout import Dtype, Geometry

SAMPLES, TOKENS, BOUNDARIES, TOLD = 24, 256, (2, 15, 27), 4
MODEL_LAYERS, HIDDEN = 30, 576
UNCOUNTED = 32  # tokens at the beginning of each sample that the loss mask leaves out


class Capturing:
    """A session that is handed the states of one prompt after the other."""

    def __init__(self, path: Path, norm: Any) -> None:
        self.directory = CaptureDirectory.create(path)
        geometry = Geometry(len(BOUNDARIES) + 1, HIDDEN, Dtype.BF16)
        facts = ShardFacts(
            model="SmolLM2-135M-Instruct",
            epoch="smollm2-v1",
            boundaries=BOUNDARIES,
            final_norm=norm,
            geometry=geometry,
            seed=(1, 2),
            directory_uuid=self.directory.uuid,
            writer=uuid4().hex,
            rank=0,
            versions={},
            server_flags={},
        )
        config = CaptureConfig(capture_dir=str(path), capture_ring_gib=0.1)
        self._session = Session(config, facts, self.directory, device="cpu", max_forward_tokens=TOKENS)

    def take(self, ids: list[int], aux: list[Tensor], final: Tensor) -> None:
        """Capture one prompt; ``aux`` and ``final`` are ``[T, H]``."""
        tracked = self._session.admit("only", np.array(ids, np.int64))
        rows, places = torch.tensor(ids), torch.arange(len(ids))
        self._session.capture(Batch(["only"], [len(ids)], [0], rows, places, aux, final))
        assert tracked.state == "captured", tracked.reason

    def close(self, samples: list[Sample]) -> None:
        """Seal, and name the samples."""
        self._session.close()
        Manifest.merge(self.directory.path, samples, epoch="smollm2-v1", directory_uuid=self.directory.uuid)


@torch.no_grad()
def make(out: Path) -> None:
    """Write everything into ``out``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers and torchvision warn when they are imported
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.bfloat16).eval()
    before_norm: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0][0]))
    text = standard_library_tokens(smollm2(), SAMPLES * TOKENS)
    post, pre = Capturing(out / "post", "post"), Capturing(out / "pre", "pre")
    samples, losses, truth = [], [], {}
    for number in range(SAMPLES):
        ids = text[number * TOKENS :][:TOKENS]
        output = model(torch.tensor([ids]), output_hidden_states=True)
        states = [state[0] for state in output.hidden_states]
        aux, after = [states[boundary] for boundary in BOUNDARIES], states[MODEL_LAYERS]
        before = before_norm.pop()
        post.take(ids, aux, after)
        pre.take(ids, aux, before)
        losses.append(cross_entropy(output.logits[0, :-1].float(), torch.tensor(ids[1:]), reduction="none"))
        if number < TOLD:
            truth[str(number)] = torch.stack([*states[:MODEL_LAYERS], before, after], dim=1)
        mask = np.ones(TOKENS, np.uint8)
        mask[:UNCOUNTED] = 0
        samples.append(Sample(f"text-{number}", number + 1, prompt_key(ids), np.array(ids, np.int32), mask))
    post.close(samples)
    pre.close(samples)
    save_file({**truth, "losses": torch.stack(losses)}, out / "truth.safetensors")


if __name__ == "__main__":
    print(build_once(Path(sys.argv[1]), make))
