"""AngelSlim's offline EAGLE-3 dataset, served from shards: in place of its ``OfflineEagle3Dataset``.

OfflineEagle3Trainer(..., train_dataset=CapturedDataset(TrainerSource("captures", "angelslim")))
"""

from typing import cast

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hashtap.trainers.source import TrainerSource

__all__ = ["CapturedDataset"]


class CapturedDataset(Dataset[dict[str, Tensor]]):
    """What ``OfflineEagle3Dataset`` makes of exported files, without the files; ``source`` is for ``angelslim``."""

    def __init__(self, source: TrainerSource) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Sample ``index``: ids and masks int64 ``[1, T]``, states ``[1, T, 3H]`` and ``[1, T, H]``."""
        fields = cast("dict[str, Tensor]", self._source[index])
        return {**fields, "attention_mask": torch.ones_like(fields["input_ids"])}
