"""``make bench``: every figure that has a bar, one line each: ``name value bar ok`` or ``… SHORT``.

A quick measurement with a figure that falls just short is made twice more, and the median decides; longer ones have
rounds enough of their own. The exit status is 1 if one is SHORT then. All together they leave a record in
``bench/results``.
``python bench/figures.py NAME …`` measures some of them, and leaves a record where ``--record`` says.
"""

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hashtap.bench.surroundings import surroundings

ROOT = Path(__file__).parents[1]
NOISE = 0.05  # of its bar, or of 1 where that is more: how far off a figure may be for no reason but the machine's
QUICK_S = 30.0  # a measurement that took longer is not made again: all together are to take ten minutes
sys.path.insert(0, str(ROOT))


@dataclass(frozen=True, slots=True)
class Figure:
    """A named value and the bar that it must reach."""

    name: str
    value: float
    bar: float
    at_least: bool  # otherwise at most
    unit: str = ""
    interval_end: float | None = None  # the better end of its 95 % interval: a value that may reach the bar does

    @property
    def ok(self) -> bool:
        return self._missing <= 0

    @property
    def doubtful(self) -> bool:
        """Whether noise may be why it falls short."""
        return 0 < self._missing <= NOISE * max(1.0, self.bar)

    @property
    def _missing(self) -> float:
        best = self.value if self.interval_end is None else self.interval_end
        return self.bar - best if self.at_least else best - self.bar

    def line(self) -> str:
        sign = ">=" if self.at_least else "<="
        unit = f" {self.unit}" if self.unit else ""
        end = f" (to {self.interval_end:.4g})" if self.interval_end is not None else ""
        return f"{self.name} {self.value:.4g}{unit}{end} {sign} {self.bar:g} {'ok' if self.ok else 'SHORT'}"


@dataclass(slots=True)
class Measured:
    """One run of a measurement: its figures, what else is to be told, and everything that is worth keeping."""

    figures: list[Figure]
    details: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def measurements() -> dict[str, Callable[[], Measured]]:
    """All measurements by name."""
    from bench import capture_cost, hot_path, memory, opening, plan, reading, step_time, writing

    modules = (hot_path, writing, reading, opening, memory, step_time, plan, capture_cost)
    return {module.__name__.removeprefix("bench."): module.measure for module in modules}


def measure(run: Callable[[], Measured], *, once: bool = False) -> tuple[list[Figure], list[Measured]]:
    """Measure, and after a quick run that falls just short twice more: the median of each figure, and all runs."""
    began = time.monotonic()
    runs = [run()]
    quick = time.monotonic() - began < QUICK_S
    if quick and not once and any(figure.doubtful for figure in runs[0].figures):
        runs += [run(), run()]
    columns = zip(*(measured.figures for measured in runs), strict=True)
    return [_median(column) for column in columns], runs


def _median(runs: tuple[Figure, ...]) -> Figure:
    ends = [figure.interval_end for figure in runs if figure.interval_end is not None]
    value = statistics.median(figure.value for figure in runs)
    return replace(runs[0], value=value, interval_end=statistics.median(ends) if ends else None)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped
    known = measurements()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which measurements [all: {', '.join(known)}]")
    parser.add_argument("--record", type=Path, help="where to write the record [of all: bench/results/figures.json]")
    parser.add_argument("--once", action="store_true", help="do not measure again what falls short")
    options = parser.parse_args()
    unknown = set(options.names) - set(known)
    if unknown:
        parser.error(f"no measurement is called {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    lines: list[str] = []
    good = True
    record: dict[str, Any] = surroundings(["python", "bench/figures.py", *sys.argv[1:]])
    for name in options.names or known:
        found, runs = measure(known[name], once=options.once)
        good &= all(figure.ok for figure in found)
        notes = runs[-1].notes
        record[name] = {"figures": [f.line() for f in found], "notes": notes, "runs": [run.details for run in runs]}
        lines += [*record[name]["figures"], *(f"  {note}" for note in notes)]
    path = options.record or (None if options.names else ROOT / "bench" / "results" / "figures.json")
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
    print("", *lines, sep="\n")
    sys.exit(not good)


if __name__ == "__main__":
    main()
