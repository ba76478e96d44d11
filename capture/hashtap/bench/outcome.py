"""From turns to a record: each side's figures, and hashtap's ratios to every other side, round by round."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hashtap.bench.counted import Got
from hashtap.bench.rounds import Turn
from hashtap.bench.sides import Side
from hashtap.bench.stats import paired_ratio

__all__ = ["METRICS", "Asked", "Metric", "outcome"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a turn. ``scale`` takes it to ``unit``, in which it is shown."""

    name: str
    label: str
    unit: str
    scale: float
    of: Callable[[Turn], float | None]


METRICS = (
    Metric("tokens_per_s", "prompt tokens/s", "", 1, lambda turn: turn.tokens_per_s),
    Metric("ttft_p50_s", "first token p50", "ms", 1e3, lambda turn: turn.ttft_p50_s),
    Metric("ttft_p99_s", "first token p99", "ms", 1e3, lambda turn: turn.ttft_p99_s),
    Metric("step_s", "decode step", "ms", 1e3, lambda turn: turn.step_s),
    Metric("cpu_ms_per_token", "host CPU a token", "ms", 1, lambda turn: turn.cpu_ms_per_token),
    Metric("memory_bytes", "host memory", "MB", 1e-6, lambda turn: turn.memory_bytes),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """What every side that gives states had to give: ``rows`` of ``layers`` x ``hidden`` elements."""

    rows: int
    layers: int
    hidden: int
    element_bytes: int

    @property
    def raw_bytes(self) -> int:
        """Of all of it."""
        return self.rows * self.layers * self.hidden * self.element_bytes


def outcome(
    sides: Sequence[Side], turns: Mapping[str, Sequence[Turn]], got: Mapping[str, Got], asked: Asked
) -> dict[str, Any]:
    """The record's figures, as JSON takes them.

    ``sides`` has each side's medians and rounds, and what it gave of what was asked; a side that gave less is not
    ``complete``. ``against`` has hashtap's ratio to each other side by metric; the ratios to the plain server also
    stand at the top, so that ``tokens_per_s.ratio_median`` is the one figure to look for.
    """
    values = {name: _by_metric(done) for name, done in turns.items()}
    mine = values["hashtap"]
    against = {
        name: {metric: paired_ratio(mine[metric], theirs[metric]).to_json() for metric in mine if metric in theirs}
        for name, theirs in values.items()
        if name != "hashtap"
    }
    return {
        **against["plain"],
        "against": against,
        "asked": {"rows": asked.rows, "layers": asked.layers, "hidden": asked.hidden, "raw_bytes": asked.raw_bytes},
        "sides": {
            side.name: {"title": side.title}
            | {name: {"median": median(rounds), "rounds": rounds} for name, rounds in values[side.name].items()}
            | (_given(got[side.name], asked, turns[side.name]) if side.gives_states else {"complete": None})
            for side in sides
        },
    }


def _by_metric(turns: Sequence[Turn]) -> dict[str, list[float]]:
    """The rounds of each metric; one that a side was not timed for is left out."""
    columns = {metric.name: [metric.of(turn) for turn in turns] for metric in METRICS}
    return {name: [value for value in column if value is not None] for name, column in columns.items() if any(column)}


def _given(got: Got, asked: Asked, turns: Sequence[Turn]) -> dict[str, Any]:
    """What came back, beside what was asked. ``raw_bytes_per_s`` is of the states themselves, whatever they came as."""
    raw_bytes = got.rows * got.width * asked.element_bytes
    return {
        "complete": got.rows == asked.rows and got.width == asked.layers * asked.hidden,
        "rows": got.rows,
        "layers": got.width / asked.hidden,
        "bytes": got.bytes,
        "bytes_per_asked_token": got.bytes / asked.rows,
        "raw_over_bytes": raw_bytes / got.bytes if got.bytes else None,
        "raw_bytes_per_s": raw_bytes / sum(turn.seconds for turn in turns),
    }
