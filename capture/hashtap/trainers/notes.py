"""What is written beside an export: how to read it, and which sample is where."""

import json
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest, xxh3_128_hexdigest

from hashtap import __version__
from hashtap.errors import MismatchError, UsageError
from hashtap.facts import DTYPE_NAME
from hashtap.trainers.source import Choice, TrainerSource

__all__ = ["NOTES_NAME", "SAMPLES_NAME", "differences", "notes_of", "sample_lines", "source_of"]

NOTES_NAME = "hashtap-export.json"
SAMPLES_NAME = "hashtap-samples.jsonl"
_PLACES = {"hashtap", "captures", "choice", "states"}
"""Notes that may differ although the samples are the same."""
_MEANING = {
    "output": "id i is the output of decoder layer i, counted from 0: boundary i + 1",
    "boundary": "id b is the boundary b: the residual stream after b decoder layers",
}
_NORM = {
    "pre": "before the final norm",
    "post": "after the final norm",
    "both": "before the final norm, then after it",
}


def notes_of(source: TrainerSource, states: bool) -> dict[str, Any]:
    """The notes of an export. Two exports with the same notes have the same files."""
    target, facts = source.target, source.facts
    ids = " ".join(map(str, source.layer_ids))
    notes: dict[str, Any] = {
        "hashtap": __version__,
        "target": target.name,
        "read and tested with": target.release,
        "captures": str(source.directory.resolve()),
        "directory": source.uuid,
        "choice": source.choice.to_json(),
        "model": facts.model,
        "weights": facts.epoch,
        "boundaries": list(source.boundaries),
        "layer ids": source.layer_ids,
        "layer id means": _MEANING[target.layer_ids],
        "tell the trainer": target.advice.format(ids=ids),
        "final state": {
            "captured": _NORM[facts.final_norm],
            "written": _NORM["pre" if source.prenorm else source.final],
            "done": "copied bit by bit" if source.norm is None else f"divided by {source.norm.origin}, in float32",
        },
        "states": "written" if states else "not written: they are read from the capture directory",
        "shift": "none: row t is the state after token t, and the trainer shifts",
        "dtype": DTYPE_NAME[facts.geometry.dtype],
        "hidden": facts.geometry.hidden,
        "fields": target.shapes,
        "loss masks": "all ones where a sample had none" if source.choice.loss_on_all else "the samples' own",
        "samples": len(source),
        "tokens": sum(source.lengths),
        "left out": len(source.missing),
        "hash of the samples": xxh3_128_hexdigest(sample_lines(source)),
    }
    if target.name == "speculators" and source.norm is not None and source.norm.one_plus:
        notes["warning"] = (
            "speculators 0.9.0 gives the EAGLE-3 draft a norm that multiplies by w; this model's multiplies by 1 + w"
        )
    return notes


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Names of the notes in which two exports differ that are not of the same samples in the same form."""
    return [name for name in ours if name not in _PLACES and ours[name] != theirs.get(name)]


def sample_lines(source: TrainerSource) -> bytes:
    """A JSON line for each sample: its file, name, key, length and a hash of its loss mask."""
    return b"".join(
        json.dumps(
            {
                "file": source.target.file(index),
                "sample_id": sample.sample_id,
                "key": sample.key.hex(),
                "tokens": sample.tokens,
                "loss_mask": None if sample.loss_mask is None else xxh3_64_hexdigest(sample.loss_mask.tobytes()),
            }
        ).encode()
        + b"\n"
        for index, sample in enumerate(source.samples)
    )


def source_of(out: Path, captures: Path | None = None) -> TrainerSource:
    """The source that ``out`` was exported from, read anew; from ``captures`` where the directory was moved.

    Raises:
        UsageError: when ``out`` is no export, or its captures are not there any more.
        MismatchError: when they are not what was exported: other samples, weights, layers or masks.
    """
    try:
        notes = json.loads((out / NOTES_NAME).read_text())
        choice, target = Choice.from_json(notes["choice"]), notes["target"]
        where = captures or Path(notes["captures"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{out} is no export of hashtap ({error}): make it with hashtap export --no-states") from None
    source = TrainerSource(where, target, choice)
    ours = notes_of(source, states=True)
    if differ := differences(ours, notes):
        raise MismatchError(
            f"the captures in {where} are not those that {out} was made of: they differ in {', '.join(differ)}. Export "
            "again into an empty folder"
        )
    return source
