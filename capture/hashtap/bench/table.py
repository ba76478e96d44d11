"""A benchmark's record as tables for people: rows of cells, and how they are printed."""

from typing import Any

from rich.console import Console
from rich.table import Table

from hashtap.bench.outcome import METRICS
from hashtap.bench.stats import paired_ratio

__all__ = ["incomplete", "ratio_rows", "ratio_text", "show", "side_rows"]

Rows = list[list[str]]


def show(record: dict[str, Any], console: Console) -> None:
    """Print what each side did, and hashtap's ratios to each."""
    for name, side in record["sides"].items():
        console.print(f"{name}: {side['title']}", markup=False, highlight=False)
    for title, rows in (
        (f"{record['model']}: medians of {record['rounds']} rounds", side_rows(record)),
        ("ratios: median of the rounds [95 % interval]", ratio_rows(record)),
    ):
        table = Table(title=title, title_justify="left")
        for number, heading in enumerate(rows[0]):
            table.add_column(heading, justify="right" if number else "left")
        for row in rows[1:]:
            table.add_row(*row)
        console.print(table)
    for line in incomplete(record):
        console.print(line, markup=False, highlight=False)


def side_rows(record: dict[str, Any]) -> Rows:
    """A heading, then a row for each metric, with a cell for each side."""
    sides = record["sides"].values()
    rows = [["", *record["sides"]]]
    for metric in METRICS:
        cells = [_number(side[metric.name]["median"] * metric.scale) if metric.name in side else "" for side in sides]
        rows.append([f"{metric.label} {metric.unit}".strip(), *cells])
    gave = {True: "all", False: "INCOMPLETE", None: ""}
    rows.append(["states MB/s", *(_number(side.get("raw_bytes_per_s"), 1e-6) for side in sides)])
    rows.append(["bytes a token", *(_number(side.get("bytes_per_asked_token")) for side in sides)])
    rows.append(["raw ÷ bytes", *(_number(side.get("raw_over_bytes")) for side in sides)])
    rows.append(["gave", *(gave[side["complete"]] for side in sides)])
    return rows


def ratio_rows(record: dict[str, Any]) -> Rows:
    """A heading, then a row for each metric, with hashtap's ratio to each other side, and what the first could be."""
    against = record["against"]
    rows = [["", *(f"hashtap ÷ {name}" for name in against)]]
    for metric in METRICS:
        cells = [ratio_text(ratios[metric.name]) if metric.name in ratios else "" for ratios in against.values()]
        rows.append([metric.label, *cells])
    # What captures nothing is the quickest capture that there could be.
    speeds = {name: record["sides"][name]["tokens_per_s"]["rounds"] for name in against}
    most = (paired_ratio(speeds["plain"], speed).to_json() for speed in speeds.values())
    rows.append(["prompt tokens/s at most: plain ÷ it", *map(ratio_text, most)])
    return rows


def incomplete(record: dict[str, Any]) -> list[str]:
    """A line for each side that gave less than was asked."""
    asked = record["asked"]
    return [
        f"{name} is incomplete: it gave {side['rows']:,} of {asked['rows']:,} rows, {side['layers']:g} of "
        f"{asked['layers']} layers"
        for name, side in record["sides"].items()
        if side["complete"] is False
    ]


def ratio_text(ratio: dict[str, Any]) -> str:
    """A ratio and its interval.

    >>> ratio_text({"ratio_median": 0.9912, "ratio_low": 0.98, "ratio_high": 1.0})
    '0.991 [0.980, 1.000]'
    """
    return f"{ratio['ratio_median']:.3f} [{ratio['ratio_low']:.3f}, {ratio['ratio_high']:.3f}]"


def _number(value: float | None, scale: float = 1) -> str:
    if value is None:
        return ""
    return f"{value * scale:,.0f}" if value * scale >= 1000 else f"{value * scale:.4g}"
