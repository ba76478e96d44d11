"""The ways to serve one model that are compared, as data: what to start, ask for and count."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hashtap.bench.counted import Got, count_captures, count_dump, count_json, count_reply
from hashtap.bench.servers import sglang_command
from hashtap.errors import UsageError

__all__ = ["BASE", "PEERS", "RID_PREFIX", "Case", "Got", "Side", "make_sides", "split_flags"]

BASE = ("plain", "aux", "hashtap")
"""Always measured."""
PEERS = ("http", "dump", "transformers")
"""Measured when asked for."""
RID_PREFIX = "hashtap-bench-"
"""Begins the request ids of prompts whose states a side must give."""
# Rows that a cache serves are never computed, so a captured prompt could not be compared with a cached one.
_SGLANG_FLAGS = ("--disable-radix-cache", "--random-seed", "0")


@dataclass(frozen=True, slots=True)
class Case:
    """What all sides have in common.

    Attributes:
        model: its directory, or its name on a hub.
        work: a folder for what the sides write.
        flags: SGLang's, for every server.
        capture_flags: those of the capturing one alone.
        layers: boundaries to capture; None for hashtap's default, which is SGLang's too.
    """

    model: str
    work: Path
    flags: tuple[str, ...] = ()
    capture_flags: tuple[str, ...] = ()
    layers: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Side:
    """One way to serve the model.

    Attributes:
        name: its short name, by which ``--against`` knows it.
        title: what it is, for people.
        command: what starts it.
        request: added to the body of every request.
        decodes: whether it generates like a server, so that its decode steps can be timed.
        counts_answer: makes arrays of the states in the body of an answer, where they come back that way; their size.
        counts_folder: what it has written to ``folder`` of these prompts, where they come to lie there.
    """

    name: str
    title: str
    command: tuple[str, ...]
    request: Mapping[str, Any] = field(default_factory=dict)
    decodes: bool = True
    folder: Path | None = None
    counts_answer: Callable[[bytes], Got] | None = None
    counts_folder: Callable[[Path, list[list[int]]], Got] | None = None

    @property
    def gives_states(self) -> bool:
        """Whether states come back from it at all."""
        return self.counts_answer is not None or self.counts_folder is not None


def make_sides(case: Case, against: tuple[str, ...] = ()) -> list[Side]:
    """The three sides that are always compared, and those of ``against``, in a fixed order.

    Raises:
        UsageError: for a peer that does not exist, or layers that a side cannot be asked for.
    """
    unknown = set(against) - set(PEERS)
    if unknown:
        raise UsageError(f"--against {', '.join(sorted(unknown))}: choose from {', '.join(PEERS)}")
    if case.layers and min(case.layers) < 1:
        raise UsageError("--layers 0: SGLang's own flag has no id for the state before the first layer; give 1 or more")
    layers = [str(boundary) for boundary in case.layers or ()]
    ids = [str(boundary - 1) for boundary in case.layers or ()]  # of decoder layers, by their output
    aux = ["--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3"]
    aux += ["--return-aux-hidden-state-layer-ids", *ids] if ids else []
    captures, dump, files = case.work / "captures", case.work / "dump", case.work / "transformers"
    hook = {
        "name": "hashtap-bench-dump",
        "target_modules": ["logits_processor"],
        "hook_factory": "hashtap.bench.dump:make_hook",
        "config": {"folder": str(dump)},
    }

    def sglang(*flags: object) -> tuple[str, ...]:
        return tuple(sglang_command(case.model, *_SGLANG_FLAGS, *case.flags, *flags))

    capture_layers = ["--capture-layers", *layers] if layers else []
    peer = [sys.executable, "-m", "hashtap.bench.transformers_server", "--model-path", case.model, "--out", str(files)]
    sides = [
        Side("plain", "the same server without anything", sglang()),
        Side("aux", "SGLang's own auxiliary layers on, not asked for", sglang(*aux)),
        Side(
            "hashtap",
            "with capture",
            sglang("--capture-dir", captures, *capture_layers, *case.capture_flags),
            folder=captures,
            counts_folder=count_captures,
        ),
        Side(
            "http",
            "SGLang's return_hidden_states, JSON over HTTP, made arrays",
            sglang(*aux),
            request={"return_hidden_states": True},
            decodes=False,
            counts_answer=count_json,
        ),
        Side(
            "dump",
            "a hook with .cpu() and torch.save, per layer and request",
            sglang(*aux, "--forward-hooks", json.dumps([hook])),
            folder=dump,
            counts_folder=count_dump,
        ),
        Side(
            "transformers",
            "transformers with output_hidden_states and torch.save, a prompt at a time",
            (*peer, *(["--layers", *layers] if layers else [])),
            decodes=False,
            counts_answer=count_reply,
        ),
    ]
    return [side for side in sides if side.name in (*BASE, *against)]


def split_flags(flags: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Flags for every server, and those that begin with ``--capture-``, which only the capturing one knows.

    >>> split_flags(("--device", "cpu", "--capture-ring-gib", "0.5", "--tp=2"))
    (('--device', 'cpu', '--tp=2'), ('--capture-ring-gib', '0.5'))
    """
    common: list[str] = []
    capture: list[str] = []
    into = common
    for part in flags:
        if part.startswith("--"):
            into = capture if part.startswith("--capture-") else common
        into.append(part)
    return tuple(common), tuple(capture)
