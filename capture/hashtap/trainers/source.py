"""The captures of a directory as one trainer's samples, after it was checked that they can be.

What a trainer would take silently and learn nothing from is refused: another norm, layers missing or in another order,
no loss mask.
"""

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from hashtap.errors import FormatError, MismatchError, UsageError
from hashtap.facts import ShardFacts
from hashtap.identity import prompt_key
from hashtap.reader import Capture, Reader
from hashtap.trainers.final_norm import FinalNorm
from hashtap.trainers.targets import Fields, Target, View, target_named
from hashtap_kernels.layout import Dtype

__all__ = ["Choice", "Listed", "TrainerSource"]


@dataclass(frozen=True, slots=True)
class Choice:
    """Which captures, and what to do where they are not as the trainer wants them.

    Attributes:
        model: directory of the served model, whose final norm is undone for a trainer that applies it again.
        samples: a sample file that names samples and masks in place of the manifest.
        epoch: captures of these weights only.
        layers: only these boundaries of those captured.
        loss_on_all: count every token of a sample without a loss mask.
        skip_missing: leave out samples that are not captured.
    """

    model: Path | None = None
    samples: Path | None = None
    epoch: str | None = None
    layers: tuple[int, ...] | None = None
    loss_on_all: bool = False
    skip_missing: bool = False

    def to_json(self) -> dict[str, Any]:
        """As plain values, paths made absolute."""
        paths = {name: str(path.resolve()) for name in ("model", "samples") if (path := getattr(self, name))}
        return {**asdict(self), "layers": None if self.layers is None else list(self.layers), **paths}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Choice":
        """What :meth:`to_json` gave. TypeError when it is something else."""
        paths = {name: Path(values[name]) for name in ("model", "samples") if values.get(name)}
        return cls(**{**values, "layers": tuple(values["layers"]) if values.get("layers") else None, **paths})


@dataclass(frozen=True, slots=True)
class Listed:
    """One sample: its name, its prompt's key (16 bytes), its length in tokens, and uint8 ``[T]`` or None."""

    sample_id: str
    key: bytes
    tokens: int
    loss_mask: npt.NDArray[np.uint8] | None


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
        self.final = _final(self.target, self.facts)
        """The captured final state that is taken: pre, post, or both."""
        self._layers = _layers(self.target, self.facts, self.boundaries, self.final)
        self.layer_ids = self.target.ids_of(self.boundaries)
        self.norm = self._norm()
        self.named, self.samples, self.missing = self._listed()
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
        capture = self._open().by_key(sample.key)
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
        return self._ids(self._open().by_key(sample.key), sample)

    def loss_mask(self, index: int) -> npt.NDArray[np.int64] | None:
        """The loss mask of sample ``index``, int64 ``[T]`` of 0 and 1; None where it has none."""
        sample = self.samples[index]
        if sample.loss_mask is not None:
            return sample.loss_mask.astype(np.int64)
        return np.ones(sample.tokens, np.int64) if self.choice.loss_on_all else None

    def _ids(self, capture: Capture, sample: Listed) -> npt.NDArray[np.int64]:
        """The capture's own ids, which must be those that the sample's key was made of."""
        ids = capture.token_ids
        if self.named and prompt_key(ids) != sample.key:
            raise FormatError(
                f"the capture of sample {sample.sample_id!r} holds the tokens of another prompt; run hashtap verify"
            )
        return ids

    def _open(self) -> Reader:
        """What it reads from; opened anew in every process that it is sent to."""
        if self._reader is None:
            self._reader = Reader(self.directory, epoch=self.choice.epoch)
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

    def _listed(self) -> tuple[bool, list[Listed], list[str]]:
        """Whether samples have names, those that are captured, and the names of those that are not."""
        reader = self._open()
        tokens = {entry.key: entry.total_tokens for entry in reader.entries}
        named, listed = self._wanted(tokens)
        found: list[Listed] = []
        missing: list[str] = []
        for sample in listed:
            if sample.key not in tokens:
                missing.append(sample.sample_id)
                continue
            if sample.loss_mask is None:
                if self.target.needs_mask and not self.choice.loss_on_all:
                    raise UsageError(
                        f"sample {sample.sample_id!r} has no loss mask, which {self.target.name} needs: give masks "
                        "with --samples FILE, or count all tokens with --loss-on-all"
                    )
            elif len(sample.loss_mask) != tokens[sample.key]:
                raise MismatchError(
                    f"the loss mask of sample {sample.sample_id!r} has {len(sample.loss_mask)} elements and its "
                    f"capture {tokens[sample.key]} tokens: extract the sample again"
                )
            found.append(sample)
        if missing and not self.choice.skip_missing:
            raise UsageError(
                f"{len(missing):,} of {len(missing) + len(found):,} samples are not captured, the first is "
                f"{missing[0]!r}: extract them, or leave them out with --skip-missing"
            )
        if not found:
            raise UsageError(f"none of the {len(missing):,} samples is captured in {self.directory}")
        return named, found, missing

    def _wanted(self, tokens: dict[bytes, int]) -> tuple[bool, Iterator[Listed]]:
        from hashtap.manifest import MANIFEST_NAME, Manifest

        if self.choice.samples is not None:
            from hashtap.samples import load_samples

            file = load_samples(self.choice.samples)
            if file.bad and not self.choice.skip_missing:
                bad = file.bad[0]
                raise UsageError(
                    f"{len(file.bad):,} lines of {self.choice.samples} cannot be used, the first is line {bad.line} "
                    f"({bad.reason}: {bad.detail}): mend them, or leave them out with --skip-missing"
                )
            return True, (Listed(s.id, s.key, s.tokens, s.loss_mask) for s in file.samples)
        if (self.directory / MANIFEST_NAME).exists():
            manifest = Manifest.load(self.directory)
            rows = iter(manifest)
            return True, (Listed(r.sample_id, r.key, r.tokens, manifest.loss_mask_of(r.sample_id)) for r in rows)
        return False, (Listed(key.hex(), key, count, None) for key, count in tokens.items())


def _final(target: Target, facts: ShardFacts) -> str:
    """The captured final state that is nearest to what the target reads."""
    if target.aux_layers is None or len(facts.finals) == 1:
        final: str = facts.final_norm
    else:
        final = "pre" if target.final == "pre" else "post"
    if (target.final, final) == ("post", "pre"):
        raise UsageError(
            f"{target.name} reads the final state after the final norm, and these captures have it before: capture "
            "with --capture-final post"
        )
    return final


def _layers(target: Target, facts: ShardFacts, boundaries: tuple[int, ...], final: str) -> list[int] | None:
    """Which places of the layer axis are taken, the final state's last; None for all as they are."""
    captured = list(facts.boundaries)
    if strange := [boundary for boundary in boundaries if boundary not in captured]:
        raise UsageError(f"boundary {strange[0]} is not captured; the captures have {captured}")
    if list(boundaries) != sorted(set(boundaries)):
        raise UsageError(
            f"layers {list(boundaries)} are not in rising order, which is how every trainer reads them: give them with "
            f"--layers {','.join(map(str, sorted(set(boundaries))))}"
        )
    if target.aux_layers is not None and len(boundaries) != target.aux_layers:
        raise UsageError(
            f"{target.name} reads {target.aux_layers} auxiliary layers, and these are {len(boundaries)}: choose "
            f"{target.aux_layers} of {captured} with --layers, or capture others with --capture-layers"
        )
    if target.name != "safetensors" and facts.geometry.dtype is Dtype.FP8_E4M3:
        raise UsageError(f"{target.name} reads no float8 states: capture bfloat16, or export --to safetensors")
    taken = [captured.index(boundary) for boundary in boundaries]
    taken += [len(captured) + place for place, state in enumerate(facts.finals) if final in (state, "both")]
    return None if taken == list(range(facts.geometry.layers)) else taken
