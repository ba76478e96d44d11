"""Writes captures as the files that a trainer reads: resumable, a few samples in memory at a time.

A sample's file appears under its name only when it is whole. Beside the samples lie ``hashtap-export.json``, the notes
(layer ids, norm, fields, where all of it comes from), and ``hashtap-samples.jsonl``, which sample is in which file.
"""

import fcntl
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from safetensors.torch import save

from hashtap.directory import PARTIAL_SUFFIX, drop_drafts, whole_file
from hashtap.errors import MismatchError, UsageError
from hashtap.trainers.arrow import write_arrow
from hashtap.trainers.notes import NOTES_NAME, SAMPLES_NAME, differences, notes_of, sample_lines
from hashtap.trainers.source import TrainerSource
from hashtap.trainers.targets import Fields

__all__ = ["Exported", "export"]

Ids = npt.NDArray[np.int64]
Progress = Callable[[int, int, int, float], None]
"""Is told the samples written, those to write, the tokens written, and the seconds it took."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export did. ``written`` and ``skipped`` are samples; ``missing`` were not captured."""

    samples: int
    written: int
    skipped: int
    missing: int
    tokens: int
    layer_ids: list[int]
    notes: str


def export(
    source: TrainerSource, out: Path, *, threads: int = 2, states: bool = True, progress: Progress | None = None
) -> Exported:
    """Write every sample of ``source`` into ``out``, but for those that an earlier call has finished.

    Args:
        threads: how many samples are read and written at a time; each takes about three times its states in memory.
        states: whether states are written; without them only what the trainer needs besides (speculators' Arrow files).
        progress: is told how far it is.

    Raises:
        UsageError: when ``out`` cannot be written to, holds something else, or another export is writing to it.
        MismatchError: when ``out`` holds another export.
        FormatError: when a capture is damaged; what was written stays.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _alone(out):
            return _export(source, out, threads, states, progress)
    except OSError as error:
        raise UsageError(f"cannot write to {error.filename or out}: {error.strerror or error}") from None


def _export(source: TrainerSource, out: Path, threads: int, states: bool, progress: Progress | None) -> Exported:
    notes = notes_of(source, states)
    _begin(out, notes, sample_lines(source))
    finished = [not states or (out / source.target.file(index)).exists() for index in range(len(source))]
    todo = [index for index, there in enumerate(finished) if not there]
    for folder in {out, *((out / source.target.file(index)).parent for index in todo)}:
        drop_drafts(folder)
    started, tokens = time.monotonic(), 0
    for done, index in enumerate(_at_once(todo, threads, lambda index: _write_sample(source, index, out)), 1):
        tokens += source.lengths[index]
        if progress is not None:
            progress(done, len(todo), tokens, time.monotonic() - started)
    if source.target.name == "speculators":
        write_arrow(_ids_and_masks(source, out, states), out, notes["hash of the samples"][:16])
    skipped = len(source) - len(todo) if states else 0
    tokens = sum(source.lengths)
    return Exported(
        len(source), len(todo), skipped, len(source.missing), tokens, source.layer_ids, str(out / NOTES_NAME)
    )


def _begin(out: Path, notes: dict[str, Any], lines: bytes) -> None:
    """Make ``out`` this export's own, or see that it is."""
    path, as_bytes = out / NOTES_NAME, json.dumps(notes, indent=1).encode() + b"\n"
    if path.exists():
        if differ := differences(notes, json.loads(path.read_bytes())):
            raise MismatchError(
                f"{out} holds another export: it differs in {', '.join(differ)} ({path}). Give an empty folder, or "
                "remove that one"
            )
        with whole_file(path) as file:
            file.write(as_bytes)
        return
    strange = {entry.name for entry in out.iterdir() if not entry.name.endswith(PARTIAL_SUFFIX)} - {SAMPLES_NAME}
    if strange:
        raise UsageError(f"{out} is not empty, {min(strange)} is in it: give an empty folder")
    with whole_file(out / SAMPLES_NAME) as file:
        file.write(lines)
    with whole_file(path) as file:
        file.write(as_bytes)


def _write_sample(source: TrainerSource, index: int, out: Path) -> None:
    fields = source[index]
    path = out / source.target.file(index)
    path.parent.mkdir(exist_ok=True)
    with whole_file(path) as file:
        if path.suffix == ".safetensors":
            file.write(_safetensors(fields))
        else:
            torch.save(fields, file)


def _ids_and_masks(source: TrainerSource, out: Path, states: bool) -> Iterator[tuple[Ids, Ids]]:
    """Of each sample, from its file where that was written: far less to read than the capture."""
    for index in range(len(source)):
        mask = source.loss_mask(index)
        assert mask is not None, "refused by the source"
        if states:
            with safe_open(out / source.target.file(index), framework="np") as file:
                yield file.get_tensor("token_ids"), mask
        else:
            yield source.token_ids(index), mask


def _safetensors(fields: Fields) -> bytes:
    return save({name: value for name, value in fields.items() if isinstance(value, torch.Tensor)})


def _at_once(indices: list[int], threads: int, work: Callable[[int], None]) -> Iterator[int]:
    """The indices in order, each after ``work`` was done for it, ``threads`` of them at a time."""
    ahead: deque[tuple[int, Future[None]]] = deque()
    with ThreadPoolExecutor(threads, "hashtap-export") as pool:
        try:
            for index in indices:
                ahead.append((index, pool.submit(work, index)))
                if len(ahead) > threads:
                    done, future = ahead.popleft()
                    future.result()
                    yield done
            while ahead:
                done, future = ahead.popleft()
                future.result()
                yield done
        finally:
            for _, future in ahead:
                future.cancel()


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Two exports into one folder would write the same partial files."""
    descriptor = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
        os.fsync(descriptor)
    except BlockingIOError:
        raise UsageError(f"another export is writing to {out}: wait for it, or give another folder") from None
    finally:
        os.close(descriptor)
