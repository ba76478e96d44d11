"""docs/benchmarks.md, written from the records in bench/results: ``python bench/report.py``.

Five kinds of record are known: those of bench/figures.py, of bench/growth.py, of ``hashtap bench server --json``, of
bench/device/all.py, and of bench/micro, which pytest-benchmark makes. Whatever is there is reported, each with command,
commit, machine and versions; nothing is typed in.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.figures import Figure

from hashtap.bench.table import incomplete, ratio_rows, side_rows

__all__ = ["growth_rows", "main", "report"]

ROOT = Path(__file__).parents[1]
Record = dict[str, Any]
# What hashtap must reach beside another side, by metric; a ratio below or above it by the end of its interval.
SERVER_BARS = (
    ("plain", "tokens_per_s", 0.98, True),
    ("aux", "tokens_per_s", 0.98, True),
    ("http", "tokens_per_s", 2.0, True),
    ("dump", "tokens_per_s", 1.0, True),
    ("plain", "ttft_p50_s", 1.05, False),
    ("plain", "step_s", 1.02, False),
)
DUMP_BYTES_BAR = 1.4
"""How many times hashtap's bytes a dump that does not compress must take."""
HEAD = """# Benchmarks

Written by `python bench/report.py` from the records in `bench/results`; do not edit it by hand. Every figure stands
behind a check, in the same run, that what was captured is right. Ratios are of runs that took turns in one session; the
interval is the 95 % bootstrap interval of their median. Where a bar is met "to" a value, that is the better end of the
interval, which decides.
"""


def report(records: Iterable[Path]) -> str:
    """The page, of these records.

    Raises:
        SystemExit: for a file that is no record.
    """
    parts = [HEAD]
    for path in records:
        parts += ["", *_section(path, json.loads(path.read_text()))]
    if len(parts) == 1:
        parts += ["No records yet."]
    return "\n".join(parts).rstrip() + "\n"


def _section(path: Path, record: Record) -> list[str]:
    for knows, title, rows in KINDS:
        if knows(record):
            plot = path.with_suffix(".svg")
            shown = [f"![{path.stem}](../bench/results/{plot.name})", ""] if plot.exists() else []
            return [f"## {title(path, record)}", "", *_where(path, record), "", *shown, *rows(record)]
    raise SystemExit(f"{path} is no record that bench/report.py knows")


def _where(path: Path, record: Record) -> list[str]:
    """Command, commit, machine and versions: ``hashtap.bench.surroundings``, which is every record's head."""
    commit, machine, versions = record["commit"], record["machine"], record["versions"] | {"Python": record["python"]}
    gpus = "".join(f", {gpu}" for gpu in machine.get("gpus", ()))
    return [
        f"- command: `{record['command']}`",
        f"- commit: `{commit or 'not from a checkout'}`, record `bench/results/{path.name}`, {record['date']}",
        f"- machine: {machine['model']}, {machine['cpus']} CPUs{gpus}, Linux {machine['system']}",
        f"- versions: {', '.join(f'{name} {version}' for name, version in versions.items())}",
    ]


def _server_rows(record: Record) -> Iterator[str]:
    yield (
        f"{record['rounds']} rounds of {record['prompts_a_round']} prompts, {record['in_flight']} in flight; "
        f"{record['verified']['prompts']:,} captured prompts verified; flags `{' '.join(record['flags'])}`."
    )
    yield ""
    yield from (f"- {name}: {side['title']}" for name, side in record["sides"].items())
    yield ""
    yield from _table(side_rows(record))
    yield ""
    yield from _table(ratio_rows(record))
    yield ""
    yield from _bar_table(figure.line() for figure in _server_figures(record))
    yield ""
    yield from (f"{line}." for line in incomplete(record))
    rounds = record["tokens_per_s"]["ratio_rounds"]
    yield f"hashtap ÷ plain in prompt tokens/s, round by round: {', '.join(f'{ratio:.3f}' for ratio in rounds)}."


def _server_figures(record: Record) -> Iterator[Figure]:
    """What of a server's ratios has a bar."""
    against = record["against"]
    for side, metric, bar, at_least in SERVER_BARS:
        if side in against and metric in against[side]:
            ratio = against[side][metric]
            end = ratio["ratio_high" if at_least else "ratio_low"]
            yield Figure(f"{metric}.over_{side}", ratio["ratio_median"], bar, at_least, interval_end=end)
    if "dump" in against:
        dump, hashtap = (record["sides"][name]["bytes"] for name in ("dump", "hashtap"))
        yield Figure("bytes.of_dump_over_hashtap", dump / hashtap, DUMP_BYTES_BAR, at_least=True)


def _figure_rows(record: Record) -> Iterator[str]:
    parts = [part for part in record.values() if isinstance(part, dict)]
    yield from _bar_table(line for part in parts for line in part.get("figures", ()))
    notes = [note for part in parts for note in part.get("notes", ())]
    yield from ["", *(f"- {note}" for note in notes)] if notes else []


def _bar_table(lines: Iterable[str]) -> Iterator[str]:
    """Lines as :meth:`bench.figures.Figure.line` makes them, as a table."""
    rows = [["figure", "value", "bar", ""]]
    for name, *value, sign, bar, verdict in map(str.split, lines):  # ``name value [unit] sign bar verdict``
        rows.append([name, " ".join(value), f"{sign} {bar}", verdict])
    yield from _table(rows)


def _device_rows(record: Record) -> Iterator[str]:
    rows = [["figure", "value", "bar", ""]]
    for bar in record["bars"]:
        least, most = bar["least"], bar["most"]
        wanted = "exact" if least is True else f">= {least}" if most is None else f"<= {most}"
        verdict = {None: "open", True: "ok", False: "SHORT"}[bar["ok"]]
        rows.append([bar["figure"], _cell(bar["value"]), wanted, verdict])
    yield from _table(rows)


def _pytest_rows(record: Record) -> Iterator[str]:
    extra = sorted({name for bench in record["benchmarks"] for name in bench["extra_info"]})
    rows = [["benchmark", "median ms", "rounds", *extra]]
    for bench in record["benchmarks"]:
        stats = bench["stats"]
        cells = (_cell(bench["extra_info"].get(name, "")) for name in extra)
        rows.append([bench["name"], f"{stats['median'] * 1e3:,.4g}", str(stats["rounds"]), *cells])
    yield from _table(rows)


def growth_rows(record: Record) -> Iterator[str]:
    """The table of a record of bench/growth.py."""
    rows = [["axis", "cost", "from", "to", "slope", "flat from", "why"]]
    for curve in record["growth"]:
        first, *_, last = map(int, curve["medians"])
        ends = [f"{_cell(curve['medians'][str(point)])} at {point:,}" for point in (first, last)]
        flat = {first: "everywhere", last: "nowhere"}.get(curve["flat_from"], f"{curve['flat_from']:,}")
        rows.append([curve["axis"], curve["cost"], *ends, f"{curve['slope']:.2f}", flat, curve["why"]])
    yield from _table(rows)


def _cell(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def _table(rows: Iterable[list[str]]) -> Iterator[str]:
    head, *body = rows
    for row in (head, ["---"] * len(head), *body):
        yield f"| {' | '.join(row)} |"


# How a record is known, what its section is called, and what stands in it.
KINDS: tuple[tuple[Callable[[Record], bool], Callable[[Path, Record], str], Callable[[Record], Iterator[str]]], ...] = (
    (
        lambda record: record.get("benchmark") == "server",
        lambda path, record: f"What capture costs a server: {record['model']}",
        _server_rows,
    ),
    (lambda record: record.get("script") == "all", lambda path, record: "On a GPU", _device_rows),
    (lambda record: "growth" in record, lambda path, record: "How the cost grows", growth_rows),
    (lambda record: "benchmarks" in record, lambda path, record: f"Parts: {path.stem}", _pytest_rows),
    (
        lambda record: any(isinstance(part, dict) and "figures" in part for part in record.values()),
        lambda path, record: f"Figures with a bar: {path.stem}",
        _figure_rows,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks.md")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(report(sorted(options.results.glob("*.json"))))
    print(options.out)


if __name__ == "__main__":
    main()
