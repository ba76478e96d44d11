"""The captures of a directory as one trainer's samples, after it was checked that they can be.

What a trainer would take silently and learn nothing from is refused: another norm, layers missing or in another order,
no loss mask.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from hashtap.errors import FormatError, UsageError
from hashtap.identity import prompt_key
from hashtap.reader import Capture, Reader
from hashtap.trainers.final_norm import FinalNorm
from hashtap.trainers.fit import taken_final, taken_layers
from hashtap.trainers.listing import Choice, Listed, list_samples
from hashtap.trainers.targets import Fields, Target, target_named
from hashtap.trainers.view import View

__all__ = ["Choice", "TrainerSource"]


class TrainerSource(Dataset[Fields]):
    """Samples of a capture directory, each as the file that the trainer would read of it.

    They are those of the manifest, or of ``choice.samples``, in that order; without either all captures, named by their
    keys. May be sent to other processes.

    Args:
        directory: the capture directory.
        target: the trainer.

    Raises:
        UsageError: when the captures are not what the trainer reads; the message says what helps.
        MismatchError: when there are captures of several weights or kinds.
        FormatError: when a shard or the manifest is damaged.
    """

    def __init__(self, directory: str | os.PathLike[str], target: Target | str, choice: Choice | None = None) -> None:
        self.directory = Path(directory)
        self.target = target if isinstance(target, Target) else target_named(target)
        self.choice = choice or Choice()
        self._reader: Reader | None = Reader(directory, epoch=self.choice.epoch)
        if not len(self._reader):
            raise UsageError(f"nothing is captured in {directory}: extract first")
        self.facts = self._reader.facts
        self.uuid = self._reader.directory.uuid
        self.boundaries = self.choice.layers or self.facts.boundaries
        self.final = taken_final(self.target, self.facts)
        """The captured final state that is taken: pre, post, or both."""
        self._layers = taken_layers(self.target, self.facts, self.boundaries, self.final)
        self.layer_ids = self.target.ids_of(self.boundaries)
        self.norm = self._norm()
        listing = list_samples(self._reader, self.target, self.choice)
        self._named, self.samples, self.missing = listing.named, listing.samples, listing.missing
        self.lengths = [sample.tokens for sample in self.samples]
        """Tokens of each sample."""

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Fields:
        """What the file of sample ``index`` holds. FormatError when its frames are damaged."""
        return self.target.fields(self.view(index))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}

    @property
    def prenorm(self) -> bool:
        """Whether the final states that are handed out are those before the final norm."""
        return self.final == "pre" or self.norm is not None

    def view(self, index: int) -> View:
        """Sample ``index``, its states in memory of their own. FormatError when its frames are damaged."""
        sample = self.samples[index]
        capture = self._open().by_key(sample.key, self.facts.epoch)
        ids = self._ids(capture, sample)
        states = capture.tensor()
        if self._layers is not None:
            states = states[:, self._layers]
        if self.norm is not None:
            states[:, -1] = self.norm.undo(states[:, -1])
        mask = self.loss_mask(index)
        return View(
            sample.sample_id,
            torch.from_numpy(ids),
            None if mask is None else torch.from_numpy(mask),
            states,
            self.prenorm,
        )

    def token_ids(self, index: int) -> npt.NDArray[np.int64]:
        """The token ids of sample ``index``, int64 ``[T]``. FormatError when its frames are damaged."""
        sample = self.samples[index]
        return self._ids(self._open().by_key(sample.key, self.facts.epoch), sample)

    def loss_mask(self, index: int) -> npt.NDArray[np.int64] | None:
        """The loss mask of sample ``index``, int64 ``[T]`` of 0 and 1; None where it has none."""
        sample = self.samples[index]
        if sample.loss_mask is not None:
            return sample.loss_mask.astype(np.int64)
        return np.ones(sample.tokens, np.int64) if self.choice.loss_on_all else None

    def _ids(self, capture: Capture, sample: Listed) -> npt.NDArray[np.int64]:
        """The capture's own ids, which must be those that the sample's key was made of."""
        ids = capture.token_ids
        if self._named and prompt_key(ids) != sample.key:
            raise FormatError(
                f"the capture of sample {sample.sample_id!r} holds the tokens of another prompt; run hashtap verify"
            )
        return ids

    def _open(self) -> Reader:
        """What it reads from; opened anew in every process that it is sent to."""
        if self._reader is None:
            self._reader = Reader(self.directory, epoch=self.facts.epoch)
        return self._reader

    def _norm(self) -> FinalNorm | None:
        """The norm that is to be undone; None where the final state is handed out as captured."""
        if self.target.final in ("any", self.final):
            return None
        if self.choice.model is None:
            raise UsageError(
                f"{self.target.name} reads the final state before the final norm and applies the norm itself, and "
                "these captures have it after: give --model DIR of the served model, and the norm is undone by its "
                "weight; or capture with --capture-final pre"
            )
        norm = FinalNorm.load(self.choice.model)
        norm.check_width(self.facts.geometry.hidden)
        return norm
