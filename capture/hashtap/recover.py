"""Takes out of a dead writer's ``.partial`` what is whole, and seals it.

Frames are self-contained: header, token ids, proofs and checksums tell which of them are whole and which prompts they
complete. The sealed shard is written beside the partial file, which goes last: to be killed in between costs nothing.
"""

import fcntl
import logging
import mmap
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from hashtap.catalog import Catalog
from hashtap.directory import (
    PARTIAL_SUFFIX,
    CaptureDirectory,
    drop_drafts,
    host_name,
    place_first,
    sync_directory,
    whole_file,
)
from hashtap.errors import FormatError
from hashtap.facts import ShardFacts
from hashtap.logs import log
from hashtap.salvage import Whole, whole_frames, whole_records
from hashtap.shard import index_row, read_shard, sealed_header, trailer_words, unsealed_facts

__all__ = ["TORN_SUFFIX", "Recovery", "describe", "recover"]

TORN_SUFFIX = ".torn"
_NEWBORN_S = 60.0  # how long an empty file may be one whose writer has not locked it yet


@dataclass(frozen=True, slots=True)
class Recovery:
    """What became of one ``.partial``.

    Attributes:
        partial: its name.
        state: ``recovered``; ``set aside``: nothing in it is whole; ``live``: its writer may live, it was not touched;
            ``failed``: it could not be read, or what is whole in it not be written, and it was left as it is.
        detail: why, where that is not plain.
        shard: name of the sealed shard; empty when there is none.
        records: whole prompts in it, those left out that readers have from another shard already.
        rows: token rows in it.
        torn_bytes: what was no whole frame. It lies beside the shard, in a file whose name ends in ``.torn``.
    """

    partial: str
    state: str
    detail: str = ""
    shard: str = ""
    records: int = 0
    rows: int = 0
    torn_bytes: int = 0


def recover(
    directory: CaptureDirectory, *, like: ShardFacts | None = None, other_hosts: bool = False
) -> list[Recovery]:
    """Recover every ``.partial`` whose writer is dead.

    Args:
        directory: the capture directory.
        like: only those of the same weights, layers and geometry; the others are not mentioned.
        other_hosts: also those of other hosts, where a lock may not show that a writer lives. It must be known.

    Raises:
        UsageError: when the directory cannot be listed.
    """
    catalogs = cache(lambda epoch: Catalog(directory, epoch, cache=False))  # thousands of shards take seconds to read
    found = []
    for partial in directory.partials():
        try:
            descriptor = os.open(partial, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if partial.exists():  # otherwise its writer has sealed it by now
                found.append(Recovery(partial.name, "failed", str(error)))
            continue
        try:
            if why := _may_live(partial, descriptor, other_hosts):
                found.append(Recovery(partial.name, "live", why))
            elif partial.exists() and (done := _recover(directory, partial, descriptor, like, catalogs)):
                found.append(done)
        except (OSError, FormatError) as error:  # FormatError: nobody can tell which records are set aside
            found.append(Recovery(partial.name, "failed", str(error)))
        finally:
            os.close(descriptor)
    for recovery in found:
        level = logging.INFO if recovery.state == "live" else logging.WARNING
        log.log(level, "found %s: %s", directory.path / recovery.partial, describe(recovery))
    return found


def describe(recovery: Recovery) -> str:
    """A recovery in words."""
    if recovery.state == "recovered":
        text = f"its writer died; {recovery.records} records, {recovery.rows} rows of it are sealed now"
    else:
        text = {"live": "left alone", "failed": "left as it is", "set aside": "set aside, nothing in it is whole"}[
            recovery.state
        ]
    if recovery.torn_bytes:
        text += f", {recovery.torn_bytes} torn bytes were set aside"
    return f"{text} ({recovery.detail})" if recovery.detail else text


def _may_live(partial: Path, descriptor: int, other_hosts: bool) -> str:
    """Why the writer of a file may be alive; empty, and the file is locked, when it is dead."""
    host, pid = _writer_of(partial)
    here = host == host_name()
    state = os.fstat(descriptor)
    if not here and not other_hosts:
        return f"its writer ran on the host {host or 'unknown'}"
    if state.st_size == 0 and time.time() - state.st_mtime < _NEWBORN_S:
        return "its writer has only just made it"
    if not _lock(descriptor):
        return "its writer holds the lock on it"
    if here and not _locks_work(partial) and _lives(pid):
        return f"locks do not work in this directory, and there is a process {pid}"
    return ""


def _writer_of(partial: Path) -> tuple[str, int]:
    match = re.fullmatch(r"hashtap-(.*)-(\d+)-r\d+-[0-9a-f]{8}-\d+\.safetensors\.partial", partial.name)
    return (match[1], int(match[2])) if match else ("", 0)


def _lock(descriptor: int) -> bool:
    """Whether nobody else holds the lock; True as well where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _locks_work(locked: Path) -> bool:
    """Whether a second lock on a file that is locked is refused."""
    descriptor = os.open(locked, os.O_RDWR | os.O_CLOEXEC)
    try:
        return not _lock(descriptor)
    finally:
        os.close(descriptor)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # OverflowError: no process has such a number
        return False
    except OSError:
        return True
    return True


def _recover(
    directory: CaptureDirectory,
    partial: Path,
    descriptor: int,
    like: ShardFacts | None,
    catalogs: Callable[[str], Catalog],
) -> Recovery | None:
    target = partial.with_name(partial.name.removesuffix(PARTIAL_SUFFIX))
    size = os.fstat(descriptor).st_size
    try:
        if not size:
            raise FormatError("it is empty")
        data = np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), np.uint8)
        facts, frames_at = unsealed_facts(data)
    except FormatError as error:
        if like is not None:
            return None  # whose it was cannot be told
        partial.rename(target.with_name(target.name + TORN_SUFFIX))
        return Recovery(partial.name, "set aside", str(error), torn_bytes=size)
    if like is not None and _kind(like) != _kind(facts):
        return None
    frames, torn = whole_frames(data[frames_at:], facts)
    records: list[tuple[int, ...]] = []
    if os.path.lexists(target):  # a recovery was killed before its end; nothing else may stand for what is in here
        read_shard(target)
    else:
        records = whole_records(frames, facts, _sealed(catalogs(facts.epoch)))
        # Frames without a record are of use to one that goes on in a later file of the same writer.
        goes_on = any(_run_of(later) == _run_of(partial) for later in directory.partials() if later > partial)
        if frames and (records or goes_on):
            _write_shard(target, facts, frames, records)
        elif not target.exists():  # where locks do not work another may have been faster
            partial.rename(target.with_name(target.name + TORN_SUFFIX))
            return Recovery(partial.name, "set aside", "no prompt is whole in it", torn_bytes=size)
    if torn:
        with whole_file(target.with_name(target.name + TORN_SUFFIX)) as file:
            for piece in torn:
                file.write(piece.data)
    drop_drafts(directory.path, target.name)
    partial.unlink(missing_ok=True)
    return Recovery(
        partial.name,
        "recovered",
        shard=target.name,
        records=len(records),
        rows=sum(frame.header.tokens for frame in frames),
        torn_bytes=sum(map(len, torn)),
    )


def _kind(facts: ShardFacts) -> tuple[object, ...]:
    return facts.epoch, facts.boundaries, facts.final_norm, facts.geometry


def _run_of(partial: Path) -> str:
    return partial.name.rpartition("-")[0]


def _sealed(catalog: Catalog) -> Catalog:
    """The catalog as it is now."""
    catalog.refresh()
    return catalog


def _write_shard(path: Path, facts: ShardFacts, frames: Sequence[Whole], records: Sequence[tuple[int, ...]]) -> None:
    """Write a sealed shard of these frames.

    Where locks do not work others may be at it too. The first one wins: to the others its records are duplicates.
    """
    rows, offset = [], 0
    for frame in frames:
        rows.append(index_row(frame.header, offset))
        offset += frame.header.stored_bytes
    index, table = (np.array(words, "<u8").tobytes() for words in (rows, records))
    head = sealed_header(facts, offset, len(frames), len(records))
    with whole_file(path, place=place_first) as file:
        file.write(head)
        for frame in frames:
            file.write(frame.stored.data)
        file.write(index + table + trailer_words(head, index, table))
    sync_directory(path.parent)
