"""ModelOpt's offline dataset, served from shards: in place of ``modelopt.torch.speculative.eagle.utils``'s class.

source = TrainerSource("captures", "modelopt")
Trainer(..., train_dataset=CapturedDataset(source), data_collator=EagleOfflineDataCollator(train_len=2048))
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hashtap.errors import UsageError
from hashtap.trainers.source import TrainerSource

__all__ = ["CapturedDataset"]

_IGNORED = -100


class CapturedDataset(Dataset[dict[str, Any]]):
    """What ``OfflineSupervisedDataset`` makes of exported files, without the files.

    Args:
        source: for the target ``modelopt``.
        answer_only_loss: count the tokens of the samples' loss masks only.

    Raises:
        UsageError: when a sample has no loss mask and ``answer_only_loss`` asks for it.
    """

    def __init__(self, source: TrainerSource, answer_only_loss: bool = False) -> None:
        if answer_only_loss and not source.choice.loss_on_all:
            for sample in source.samples:
                if sample.loss_mask is None:
                    raise UsageError(
                        f"answer_only_loss needs loss masks, and sample {sample.sample_id!r} has none: give masks with "
                        "Choice(samples=FILE)"
                    )
        self._source = source
        self._answer_only_loss = answer_only_loss

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Sample ``index``, T tokens: ids, mask and labels int64 ``[T]``, the labels one token ahead of the ids."""
        fields = self._source[index]
        ids = cast("Tensor", fields["input_ids"])
        ones = torch.ones_like(ids)
        return {
            "input_ids": ids,
            "base_model_hidden_states": fields["hidden_states"],
            "aux_hidden_states": fields["aux_hidden_states"],
            "attention_mask": ones,
            "loss_mask": fields["loss_mask"] if self._answer_only_loss else ones.clone(),
            "labels": torch.cat([ids[1:], torch.full_like(ids[:1], _IGNORED)]),
            "base_hidden_prenorm": fields["hidden_states_prenorm"],
        }
