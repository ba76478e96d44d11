"""What is written beside an export: how to read it, and which sample is where."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hashtap import __version__
from hashtap.facts import DTYPE_NAME
from hashtap.trainers.source import TrainerSource

__all__ = ["NOTES_NAME", "SAMPLES_NAME", "notes_of", "sample_lines"]

NOTES_NAME = "hashtap-export.json"
SAMPLES_NAME = "hashtap-samples.jsonl"
_MEANING = {
    "output": "id i is the output of decoder layer i, counted from 0: boundary i + 1",
    "boundary": "id b is the boundary b: the residual stream after b decoder layers",
}


def notes_of(source: TrainerSource, samples_hash: str, states: bool) -> dict[str, Any]:
    """The notes of an export. Two exports with the same notes have the same files."""
    target, facts = source.target, source.facts
    ids = " ".join(map(str, source.layer_ids))
    notes: dict[str, Any] = {
        "hashtap": __version__,
        "target": target.name,
        "read and tested with": target.release,
        "directory": source.uuid,
        "model": facts.model,
        "weights": facts.epoch,
        "boundaries": list(source.boundaries),
        "layer ids": source.layer_ids,
        "layer id means": _MEANING[target.layer_ids],
        "tell the trainer": target.advice.format(ids=ids),
        "final state": {
            "captured": _norm_words(facts.final_norm),
            "written": _norm_words("pre" if source.prenorm else "post"),
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
        "hash of the samples": samples_hash,
    }
    if target.name == "speculators" and source.norm is not None and source.norm.one_plus:
        notes["warning"] = (
            "speculators 0.9.0 gives the EAGLE-3 draft a norm that multiplies by w; this model's multiplies by 1 + w"
        )
    return notes


def sample_lines(source: TrainerSource) -> Iterator[bytes]:
    """A JSON line for each sample: its file, name, key and length."""
    for index, sample in enumerate(source.samples):
        line = {
            "file": str(Path(source.target.file(index))),
            "sample_id": sample.sample_id,
            "key": sample.key.hex(),
            "tokens": sample.tokens,
        }
        yield json.dumps(line).encode() + b"\n"


def _norm_words(norm: str) -> str:
    return "before the final norm" if norm == "pre" else "after the final norm"
