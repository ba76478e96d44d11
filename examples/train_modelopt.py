"""ModelOpt's EAGLE-3 on captures, served from shards: ``python examples/train_modelopt.py CAPTURES MODEL OUT [STEPS]``.

MODEL is the directory of the served model; the drafter's sizes below are for SmolLM2-135M-Instruct on a CPU. Writes
``OUT/draft``, the exported drafter, ``OUT/state.pt`` to go on from, and ``OUT/losses.json``.
"""

import json
import sys
from pathlib import Path
from typing import Any

import modelopt.torch.opt as mto
import modelopt.torch.speculative as mtsp
import torch
from modelopt.torch.export import export_speculative_decoding
from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator
from modelopt.torch.speculative.utils import load_vlm_or_llm
from transformers import Trainer, TrainingArguments

from hashtap.trainers.modelopt import CapturedDataset
from hashtap.trainers.source import TrainerSource

TRAIN_TOKENS = 256
DRAFTER = {
    "num_hidden_layers": 1,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rope_theta": 100000.0,
    "use_aux_hidden_state": True,
    "use_last_layernorm": True,
    "has_lm_head": True,
    "draft_vocab_size": 2048,
}


def drafter(model: Path) -> Any:
    """The teacher's embeddings, norm and head in float32, and an EAGLE-3 drafter on them."""
    made = load_vlm_or_llm(str(model), use_offline_training=True, dtype=torch.float32)
    options = {
        "eagle_offline": True,
        "eagle_use_torch_compile": False,
        "eagle_ttt_steps": 3,
        "eagle_architecture_config": DRAFTER,
    }
    mtsp.convert(made, [("eagle", options)])
    return made


class Float32Collator(EagleOfflineDataCollator):
    """ModelOpt's own; a CPU trains in float32."""

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = super().__call__(features)
        states = batch["base_model_outputs"]
        floats = {name: value.float() for name, value in states.items() if isinstance(value, torch.Tensor)}
        return {**batch, "base_model_outputs": {**states, **floats}}


def main(captures: Path, model: Path, out: Path, steps: int) -> None:
    """Train ``steps`` steps of two samples and export."""
    dataset = CapturedDataset(TrainerSource(captures, "modelopt"), answer_only_loss=True)
    arguments = TrainingArguments(
        output_dir=str(out / "run"),
        use_cpu=True,
        remove_unused_columns=False,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        max_steps=steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trained = drafter(model)
    trainer = Trainer(trained, arguments, data_collator=Float32Collator(TRAIN_TOKENS), train_dataset=dataset)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    (out / "losses.json").write_text(json.dumps(losses))
    mto.save(trained, out / "state.pt")
    export_speculative_decoding(trained, export_dir=str(out / "draft"))


if __name__ == "__main__":
    captures, model, out = map(Path, sys.argv[1:4])
    main(captures, model, out, int(sys.argv[4]) if len(sys.argv) > 4 else 36)
