"""Which captures are asked for, under which names and with which loss masks."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hashtap.errors import MismatchError, UsageError
from hashtap.reader import Reader
from hashtap.trainers.targets import Target

__all__ = ["Choice", "Listed", "Listing", "list_samples"]

_PATHS = ("model", "samples", "chat_template")


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
        tokenizer: makes ids of chats and texts in ``samples``, a directory or a name; None for the served model's.
        chat_template: a file with a template to use instead of the tokenizer's own.
        trust_remote_code: whether code that comes with the tokenizer may run. Notes do not keep it: to read them must
            run nobody's code.
    """

    model: Path | None = None
    samples: Path | None = None
    epoch: str | None = None
    layers: tuple[int, ...] | None = None
    loss_on_all: bool = False
    skip_missing: bool = False
    tokenizer: str | None = None
    chat_template: Path | None = None
    trust_remote_code: bool = False

    def to_json(self) -> dict[str, Any]:
        """As plain values, paths made absolute."""
        paths = {name: str(path.resolve()) for name in _PATHS if (path := getattr(self, name))}
        if self.tokenizer and Path(self.tokenizer).is_dir():
            paths["tokenizer"] = str(Path(self.tokenizer).resolve())
        plain = {**asdict(self), "layers": None if self.layers is None else list(self.layers), **paths}
        del plain["trust_remote_code"]
        return plain

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Choice":
        """What :meth:`to_json` gave. TypeError when it is something else."""
        paths = {name: Path(values[name]) for name in _PATHS if values.get(name)}
        layers = tuple(values["layers"]) if values.get("layers") else None
        return cls(**{**values, **paths, "layers": layers, "trust_remote_code": False})


@dataclass(frozen=True, slots=True)
class Listed:
    """One sample: its name, its prompt's key (16 bytes), its length in tokens, and uint8 ``[T]`` or None."""

    sample_id: str
    key: bytes
    tokens: int
    loss_mask: npt.NDArray[np.uint8] | None


@dataclass(frozen=True, slots=True)
class Listing:
    """The samples that are captured, in order, and the names of those that are not.

    ``named`` says whether they have names of their own; without manifest and sample file they are called by their keys.
    """

    named: bool
    samples: list[Listed]
    missing: list[str]


def list_samples(reader: Reader, target: Target, choice: Choice) -> Listing:
    """The samples of ``choice.samples``, or of the manifest, or else all captures.

    Raises:
        UsageError: when samples are missing or unusable and that is not allowed, or masks that the target needs.
        MismatchError: when a mask is not as long as its capture.
    """
    tokens = {entry.key: entry.total_tokens for entry in reader.entries}
    named, wanted = _wanted(reader, choice, tokens)
    found: list[Listed] = []
    missing: list[str] = []
    for sample in wanted:
        if sample.key not in tokens:
            missing.append(sample.sample_id)
            continue
        if sample.loss_mask is None and target.needs_mask and not choice.loss_on_all:
            raise UsageError(
                f"sample {sample.sample_id!r} has no loss mask, which {target.name} needs: give masks with --samples "
                "FILE, or count all tokens with --loss-on-all"
            )
        if sample.loss_mask is not None and len(sample.loss_mask) != tokens[sample.key]:
            raise MismatchError(
                f"the loss mask of sample {sample.sample_id!r} has {len(sample.loss_mask)} elements and its capture "
                f"{tokens[sample.key]} tokens: extract the sample again"
            )
        found.append(sample)
    if missing and not choice.skip_missing:
        raise UsageError(
            f"{len(missing):,} of {len(missing) + len(found):,} samples are not captured, the first is "
            f"{missing[0]!r}: extract them, or leave them out with --skip-missing"
        )
    if not found:
        raise UsageError(f"none of the {len(missing):,} samples is captured in {reader.directory.path}")
    return Listing(named, found, missing)


def _wanted(reader: Reader, choice: Choice, tokens: dict[bytes, int]) -> tuple[bool, Iterator[Listed]]:
    """Whether they have names, and the samples."""
    if choice.samples is not None:
        from hashtap.chat import ChatTokenizer
        from hashtap.samples import load_samples

        tokenizer = ChatTokenizer(
            choice.tokenizer, chat_template=choice.chat_template, trust_remote_code=choice.trust_remote_code
        )
        file = load_samples(choice.samples, tokenizer=tokenizer.for_model(reader.facts.model))
        if file.bad and not choice.skip_missing:
            bad = file.bad[0]
            raise UsageError(
                f"{len(file.bad):,} lines of {choice.samples} cannot be used, the first is line {bad.line} "
                f"({bad.reason}: {bad.detail}): mend them, or leave them out with --skip-missing"
            )
        return True, (Listed(s.id, s.key, s.tokens, s.loss_mask) for s in file.samples)
    directory = reader.directory.path
    if not (directory / "manifest.parquet").exists():  # pyarrow is needed only where there is one
        return False, (Listed(key.hex(), key, count, None) for key, count in tokens.items())
    from hashtap.manifest import Manifest

    manifest = Manifest.load(directory)
    return True, (Listed(r.sample_id, r.key, r.tokens, manifest.loss_mask_of(r.sample_id)) for r in manifest)
