"""A benchmark's record as tables for people."""

from typing import Any

from rich.console import Console
from rich.table import Table

from hashtap.bench.outcome import METRICS

__all__ = ["given", "ratio_text", "show"]


def show(record: dict[str, Any], console: Console) -> None:
    """Print what each side did, and hashtap's ratios to each."""
    console.print(_sides(record))
    console.print(_ratios(record))
    for name, side in record["sides"].items():
        if side["complete"] is False:
            console.print(f"{name} is incomplete: it gave {given(side, record['asked'])}; its speed is no comparison")


def _sides(record: dict[str, Any]) -> Table:
    table = Table(title=f"{record['model']}: medians of {record['rounds']} rounds", title_justify="left")
    table.add_column("side")
    for metric in METRICS:
        table.add_column(" ".join([metric.label, metric.unit]).strip(), justify="right")
    for heading in ("states MB/s", "bytes a token", "gave"):
        table.add_column(heading, justify="right")
    for name, side in record["sides"].items():
        cells = [f"{side[m.name]['median'] * m.scale:,.4g}" if m.name in side else "" for m in METRICS]
        if side["complete"] is not None:
            cells += [f"{side['raw_bytes_per_s'] / 1e6:,.1f}", f"{side['bytes_per_asked_token']:,.0f}"]
            cells.append("all" if side["complete"] else "INCOMPLETE")
        table.add_row(name, *cells)
    return table


def _ratios(record: dict[str, Any]) -> Table:
    table = Table(title="hashtap ÷ each, median of the rounds' ratios [95 % interval]", title_justify="left")
    table.add_column("hashtap ÷")
    for metric in METRICS:
        table.add_column(metric.label, justify="right")
    for name, ratios in record["against"].items():
        table.add_row(name, *(ratio_text(ratios[m.name]) if m.name in ratios else "" for m in METRICS))
    return table


def ratio_text(ratio: dict[str, Any]) -> str:
    """A ratio and its interval.

    >>> ratio_text({"ratio_median": 0.9912, "ratio_low": 0.98, "ratio_high": 1.0})
    '0.991 [0.980, 1.000]'
    """
    return f"{ratio['ratio_median']:.3f} [{ratio['ratio_low']:.3f}, {ratio['ratio_high']:.3f}]"


def given(side: dict[str, Any], asked: dict[str, Any]) -> str:
    """What a side gave of what was asked, in words."""
    return f"{side['rows']:,} of {asked['rows']:,} rows, {side['layers']:g} of {asked['layers']} layers"
