"""Recomputes everything that a capture directory claims, and names what does not hold.

Every frame is read, also those of no record. Damage in one place never hides another: a bad frame is reported with the
rows and samples that it spoils, and the rest is checked as if nothing had happened.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hashtap.capture import Capture
from hashtap.catalog import Entry, Piece
from hashtap.checks import Ranges, odd_rows, ranges, wrong_rows
from hashtap.errors import FormatError, UsageError
from hashtap.frame import StoredFrame
from hashtap.header import salt_sum
from hashtap.identity import TokenIds, prompt_key
from hashtap.reader import Reader
from hashtap.recompute import NotComputed, Recomputer, spread
from hashtap.report import Problem, Report
from hashtap.shard import Shard
from hashtap_kernels.layout import Payload
from hashtap_kernels.proof import add_proofs, prompt_proof

__all__ = ["Problem", "Report", "verify"]

_DETAIL = {
    "row_sum": "the values are not those that the forward wrote",
    "nan": "the values hold NaN",
    "inf": "the values hold infinity",
    "zero_rows": "all values of the layer are zero",
    "constant_rows": "all values of the layer are the same",
}


def verify(
    directory: str | os.PathLike[str],
    samples: Iterable[tuple[str, TokenIds, bytes]] | None = None,
    quick: bool = False,
    epoch: str | None = None,
    recompute: Path | None = None,
    recompute_records: int = 8,
    trust_remote_code: bool = False,
) -> Report:
    """Verify a capture directory.

    Args:
        directory: the capture directory.
        samples: ``(sample id, token ids, salt)`` of what must be there; None asks only whether what is there is right.
        quick: check stored checksums, lengths and keys only; values and proofs are left out.
        epoch: look at captures of these weights only; None wants all to be of the same.
        recompute: the directory of the model that was served: compare captures with what transformers computes by it.
        recompute_records: how many are compared, spread evenly over those that nothing else is wrong with.
        trust_remote_code: run code that comes with this model.

    Raises:
        UsageError: when it is no capture directory, the model cannot be loaded or is another one, or it would be
            compared with captures of several weights.
    """
    started = time.perf_counter()
    reader = Reader(directory, epoch=epoch, strict=False, cache=False)
    wanted, salts, count = _wanted(samples)
    report = Report(str(reader.directory.path), quick, samples=len(reader) if samples is None else count)
    _check_directory(reader, report)
    recomputer = None
    if recompute is not None and len(reader.epochs) > 1:
        raise UsageError(
            f"{report.directory} holds captures of {len(reader.epochs)} weights: choose --epoch to recompute"
        )
    if recompute is not None and reader.shards:
        # Before the checks: what cannot be loaded is known after a moment.
        facts = [shard.facts for shard in reader.shards]
        recomputer = Recomputer(recompute, facts, trust_remote_code=trust_remote_code)
    checker = _Checker(reader, report, wanted, salts)
    bad = {entry.key for entry in reader.entries if not checker.check(entry)}
    if recomputer is not None:
        sound = [entry for entry in reader.entries if entry.key not in bad]
        bad |= checker.recompute(spread(sound, recompute_records), recomputer)
    lost = {incomplete.entry.key for incomplete in reader.incomplete}
    for incomplete in reader.incomplete:
        checker.report(incomplete.entry, "incomplete", incomplete.reason)
    checker.check_rest()
    if samples is None:
        report.verified = sum(entry.key not in bad for entry in reader.entries)
    else:
        report.verified = sum(len(wanted[key]) for key in wanted.keys() & reader.keys() - bad)
        for key in wanted.keys() - reader.keys() - lost:
            report.problems.append(Problem("missing", "it was not captured", key.hex(), tuple(wanted[key])))
    report.seconds = time.perf_counter() - started
    return report


def _wanted(
    samples: Iterable[tuple[str, TokenIds, bytes]] | None,
) -> tuple[dict[bytes, list[str]], dict[bytes, bytes], int]:
    """Sample ids by key, the salts that are not empty by key, and the number of samples."""
    wanted: dict[bytes, list[str]] = defaultdict(list)
    salts: dict[bytes, bytes] = {}
    count = 0
    for sample_id, token_ids, salt in samples or ():
        key = prompt_key(token_ids, salt)
        wanted[key].append(sample_id)
        if salt:
            salts[key] = salt
        count += 1
    return wanted, salts, count


def _check_directory(reader: Reader, report: Report) -> None:
    """Count what there is, and report what concerns whole shards."""
    entries, shards = reader.entries, reader.shards
    report.records, report.duplicates, report.set_aside = len(entries), len(reader.duplicates), len(reader.set_aside)
    report.shards, report.partials = len(shards), len(reader.directory.partials())
    report.tokens = sum(entry.total_tokens for entry in entries)
    report.raw_bytes = sum(entry.total_tokens * entry.shard.facts.geometry.row_bytes for entry in entries)
    report.stored_bytes = sum(shard.file_bytes for shard in shards)
    report.problems += [Problem("bad_shard", str(e), shard=path.name) for path, e in reader.bad_shards.items()]
    if not shards and not reader.bad_shards:
        report.problems.append(Problem("missing", f"there is no sealed shard in {report.directory}"))
    for name in ("epoch", "model", "boundaries", "final_norm", "geometry"):
        first_with: dict[object, str] = {}
        for shard in shards:
            first_with.setdefault(getattr(shard.facts, name), shard.path.name)
        if len(first_with) > 1:
            kinds = ", ".join(f"{value!r} ({path})" for value, path in first_with.items())
            kind = "epoch" if name == "epoch" else "facts"
            report.problems.append(Problem(kind, f"the shards differ in their {name}: {kinds}"))


class _Checker:
    """Goes through records, then through the frames that no record has."""

    def __init__(
        self, reader: Reader, report: Report, wanted: dict[bytes, list[str]], salts: dict[bytes, bytes]
    ) -> None:
        self._reader = reader
        self._report = report
        self._wanted = wanted
        self._salts = salts
        self._seen = {shard.path: np.zeros(len(shard.index), np.bool_) for shard in reader.shards}

    def report(
        self,
        entry: Entry,
        kind: str,
        detail: str,
        rows: Ranges = (),
        layer: str | None = None,
        shard: Path | None = None,
    ) -> None:
        """Add a problem of a record."""
        name = (shard or entry.shard.path).name
        ids = tuple(self._wanted.get(entry.key, ()))
        writer = entry.shard.facts.writer
        self._report.problems.append(
            Problem(kind, detail, entry.key.hex(), ids, rows, layer, name, writer, entry.serial)
        )

    def check(self, entry: Entry) -> bool:
        """Check a record's frames, then the record; reports all that is wrong and returns whether nothing is."""
        before = len(self._report.problems)
        pieces = self._reader.pieces(entry)
        for piece in pieces:
            self._seen[piece.shard.path][piece.row] = True
        try:
            ids = np.zeros(entry.total_tokens, np.int64)
        except MemoryError:
            # It may be no fault of the record, so it is not named: nobody may set it aside.
            detail = f"the {entry.total_tokens} tokens of {entry.key.hex()} do not fit this machine's memory"
            self._report.problems.append(Problem("length", detail, shard=entry.shard.path.name))
            return False
        proof, broken = (0, 0), False
        odd: dict[tuple[str, int | None], list[int]] = defaultdict(list)
        for piece in pieces:
            try:
                frame = self._reader.frame(piece.shard, piece.row)
                ids[piece.start : piece.stop] = frame.token_ids[: piece.stop - piece.start]
                if piece.start >= entry.shared_tokens:
                    self._check_header(entry, piece, frame)
                if not self._report.quick:
                    proof = add_proofs(proof, self._check_proof(entry, piece, frame))
                    self._check_values(piece, frame, odd)
            except FormatError as error:
                broken = True
                self.report(entry, "stored_sum", str(error), ((piece.start, piece.stop),), shard=piece.shard.path)
        for (kind, layer), rows in odd.items():
            name = None if layer is None else entry.shard.facts.layer_name(layer)
            self.report(entry, kind, _DETAIL[kind], ranges(rows), name)
        if not broken:
            self._check_identity(entry, ids, proof)
        return len(self._report.problems) == before

    def recompute(self, entries: list[Entry], recomputer: Recomputer) -> set[bytes]:
        """Compare records with what a model computes; the keys of those with rows that are not its own."""
        bad = set()
        for entry in entries:
            foreign: list[tuple[str, Ranges, str]] = []
            try:
                foreign = recomputer.compare(Capture(self._reader, entry))
                self._report.recomputed_records += 1
            except FormatError as error:
                # Only --quick did not see it before.
                self.report(entry, "stored_sum", str(error))
                bad.add(entry.key)
            except NotComputed as error:
                # No fault of the record, so it is not named: nobody may set it aside.
                self._report.problems.append(Problem("recomputed", str(error)))
            for layer, rows, detail in foreign:
                self.report(entry, "recomputed", detail, rows, layer)
                bad.add(entry.key)
        self._report.recomputed = recomputer.differences()
        return bad

    def check_rest(self) -> None:
        """Check the frames that belong to no record that was checked: tables, waste and duplicates.

        Those of records that are set aside are left alone: what is wrong with them is known.
        """
        for entry in self._reader.set_aside:
            for shard in self._reader.shards:
                if shard.facts.writer == entry.shard.facts.writer:
                    self._seen[shard.path] |= shard.index[:, 3] == np.uint64(entry.serial)
        for shard in self._reader.shards:
            kinds = shard.index[:, 6] & np.uint64(0xFF)
            for row in np.flatnonzero(~self._seen[shard.path]).tolist():
                is_table = kinds[row] == Payload.TABLE
                if not is_table:
                    self._report.waste_frames += 1
                    self._report.waste_bytes += int(shard.index[row, 1])
                self._check_alone(shard, row, is_table)

    def _check_alone(self, shard: Shard, row: int, is_table: bool) -> None:
        try:
            frame = self._reader.frame(shard, row)
            if is_table:
                frame.table()
        except FormatError as error:
            self._report.problems.append(Problem("stored_sum", str(error), shard=shard.path.name))

    def _check_header(self, entry: Entry, piece: Piece, frame: StoredFrame) -> None:
        rows, header = ((piece.start, piece.stop),), frame.header
        if header.key != entry.key:
            detail = f"the frame is of the prompt {header.key.hex()}"
            self.report(entry, "key", detail, rows, shard=piece.shard.path)
        if header.salt_sum != entry.salt_sum:
            detail = f"the frame's key has the salt {header.salt_sum:016x}, the record's {entry.salt_sum:016x}"
            self.report(entry, "key", detail, rows, shard=piece.shard.path)
        if header.total_tokens != entry.total_tokens:
            detail = f"the frame is of a prompt of {header.total_tokens} tokens, the record has {entry.total_tokens}"
            self.report(entry, "length", detail, rows, shard=piece.shard.path)

    def _check_proof(self, entry: Entry, piece: Piece, frame: StoredFrame) -> tuple[int, int]:
        """The proof recomputed from the frame's token ids; a problem when the forward consumed other ones."""
        seed, header = piece.shard.facts.seed, frame.header
        proof = prompt_proof(frame.token_ids, header.first_position, seed)
        if proof != header.proof:
            detail = "the token ids are not those that the forward consumed"
            self.report(entry, "proof", detail, ((piece.start, piece.stop),), shard=piece.shard.path)
        if piece.start >= entry.shared_tokens:
            return proof
        # A donor's frame may count in part only, and its run may have had another seed.
        return prompt_proof(frame.token_ids[: piece.stop - piece.start], piece.start, entry.shard.facts.seed)

    def _check_values(self, piece: Piece, frame: StoredFrame, odd: dict[tuple[str, int | None], list[int]]) -> None:
        table = self._reader.table(piece.shard, frame.header.table) if frame.header.table else None
        for first, values in frame.value_blocks(table):
            start = piece.start + first
            values = values[: max(0, piece.stop - start)]
            wrong = wrong_rows(values, start, frame.row_sums[first : first + len(values)])
            if wrong.any():
                odd["row_sum", None] += (start + np.flatnonzero(wrong)).tolist()
            for kind, where in odd_rows(values, frame.header.geometry.dtype).items():
                for layer in np.flatnonzero(where.any(axis=0)).tolist():
                    odd[kind, layer] += (start + np.flatnonzero(where[:, layer])).tolist()

    def _check_identity(self, entry: Entry, ids: npt.NDArray[np.int64], proof: tuple[int, int]) -> None:
        """The key follows from the ids, the record's proof from its frames'."""
        salt = self._salts.get(entry.key, b"")
        if salt_sum(salt) != entry.salt_sum and not salt:
            self._report.salted += 1
        elif prompt_key(ids, salt) != entry.key:
            self.report(entry, "key", f"its token ids have the key {prompt_key(ids, salt).hex()}")
        if not self._report.quick and proof != entry.proof:
            self.report(entry, "proof", "the record's proof is not that of its token ids")
