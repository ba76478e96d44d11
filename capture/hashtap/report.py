"""What verify found."""

from dataclasses import asdict, dataclass, field
from typing import Any

from hashtap.checks import Ranges

__all__ = ["Difference", "Problem", "Report"]

_SHOWN = 8
"""So many sample ids or row ranges are printed of one problem."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        kind: missing, incomplete, bad_shard, facts, epoch, stored_sum, row_sum, key, proof, length, nan, inf,
            zero_rows, constant_rows or recomputed.
        detail: a sentence about it.
        key: of the record, 32 hex digits; None when it is no record's.
        sample_ids: the samples that need this record.
        rows: half-open ranges of positions in the prompt; empty when it is the whole record.
        layer: the layer's name; None when it is all of them.
        shard: the file's name.
        writer, serial: the writing run and the pass of the record; None when it is no record's.
    """

    kind: str
    detail: str
    key: str | None = None
    sample_ids: tuple[str, ...] = ()
    rows: Ranges = ()
    layer: str | None = None
    shard: str | None = None
    writer: str | None = None
    serial: int | None = None

    def __str__(self) -> str:
        where = []
        if self.sample_ids:
            where.append(f"sample {_some(self.sample_ids)}")
        if self.key is not None:
            where.append(f"key {self.key}")
        if self.rows:
            where.append(f"rows {_some([_rows(start, stop) for start, stop in self.rows])}")
        if self.layer is not None:
            where.append(self.layer)
        if self.shard is not None:
            where.append(self.shard)
        return f"{self.kind}: {', '.join(where)}: {self.detail}" if where else f"{self.kind}: {self.detail}"


@dataclass(frozen=True, slots=True)
class Difference:
    """How far the captured rows of a layer are from those computed once more: ‖captured - computed‖ / ‖computed‖.

    Attributes:
        layer: its name.
        rows: how many were compared.
        mean, median, p99, max: of the rows' differences.
        bound: what rounding explains of ``p99``.
    """

    layer: str
    rows: int
    mean: float
    median: float
    p99: float
    max: float
    bound: float

    def __str__(self) -> str:
        figures = f"median {self.median:.3g}, 99 % {self.p99:.3g}, max {self.max:.3g}, mean {self.mean:.3g}"
        return f"{self.layer}: {self.rows} rows, relative difference {figures}"


@dataclass(slots=True)
class Report:
    """The outcome of a verification.

    Attributes:
        directory: what was verified.
        quick: whether values and proofs were left out.
        samples: how many had to be there; the number of records when no samples were given.
        verified: how many of them are there with nothing wrong.
        records: whole records, duplicates left out.
        duplicates: records that repeat another.
        set_aside: records that were found wrong before and are not in use.
        salted: records whose key could not be recomputed, because no sample gave their salt.
        shards: valid ones.
        partials: shards that are still open, or were left behind.
        tokens, raw_bytes: of the records.
        stored_bytes: of the valid shards.
        waste_frames, waste_bytes: frames that belong to no record, or to a duplicate.
        recomputed_records: records that were computed once more.
        recomputed: how far their layers are from what was captured.
        seconds: how long it took.
        problems: all that is wrong; empty when all is well.
    """

    directory: str
    quick: bool
    samples: int = 0
    verified: int = 0
    records: int = 0
    duplicates: int = 0
    set_aside: int = 0
    salted: int = 0
    shards: int = 0
    partials: int = 0
    tokens: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    waste_frames: int = 0
    waste_bytes: int = 0
    recomputed_records: int = 0
    recomputed: list[Difference] = field(default_factory=list)
    seconds: float = 0.0
    problems: list[Problem] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @property
    def warnings(self) -> list[str]:
        """What is no problem, but should be looked at."""
        return [
            f"{each.layer}: 99 % of the rows differ by up to {each.p99:.3g}, and rounding explains {each.bound:.3g}: "
            "chunks, batches or kernels gave other states than one shot, or the model is not quite the one served"
            for each in self.recomputed
            if each.p99 > each.bound
        ]

    @property
    def ratio(self) -> float:
        """Raw over stored bytes; 0 when nothing is stored."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else 0.0

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON takes it."""
        return {"ok": self.ok, "ratio": self.ratio, "warnings": self.warnings, **asdict(self)}

    def summary(self) -> str:
        """One line: ``300/300 verified`` and figures."""
        quickly = " (quick: checksums, lengths and keys)" if self.quick else ""
        parts = [
            f"{self.verified}/{self.samples} verified{quickly}",
            f"{self.records} records of {self.tokens} tokens in {self.shards} shards",
            f"{self.raw_bytes / 1e6:.1f} MB as {self.stored_bytes / 1e6:.1f} MB, ratio {self.ratio:.3f}",
        ]
        if self.duplicates:
            parts.append(f"{self.duplicates} duplicates")
        if self.set_aside:
            parts.append(f"{self.set_aside} set aside")
        if self.waste_frames:
            parts.append(f"{self.waste_frames} frames of no record ({self.waste_bytes / 1e6:.1f} MB)")
        if self.salted:
            parts.append(f"{self.salted} salted keys not recomputed")
        if self.recomputed_records:
            parts.append(f"{self.recomputed_records} records recomputed")
        if self.partials:
            parts.append(f"{self.partials} shards not sealed")
        parts.append(f"{self.raw_bytes / 1e9 / max(self.seconds, 1e-9):.2f} GB/s")
        if self.problems:
            parts.append(f"{len(self.problems)} problem{'s' * (len(self.problems) != 1)}")
        return "; ".join(parts)


def _rows(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"


def _some(texts: tuple[str, ...] | list[str]) -> str:
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more
