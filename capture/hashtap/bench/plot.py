"""A benchmark's record as a plot: tokens/s of every side over the plain server's, a dot a round."""

from pathlib import Path
from typing import Any

from hashtap.bench.stats import paired_ratio
from hashtap.errors import UsageError

__all__ = ["draw"]


def draw(record: dict[str, Any], target: Path) -> list[Path]:
    """Write ``target`` with the suffixes ``.png`` and ``.svg``; the paths.

    Raises:
        UsageError: when matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise UsageError("--plot needs matplotlib: pip install 'hashtap[bench]'") from None
    sides = {name: side for name, side in record["sides"].items() if name != "plain"}
    plain = record["sides"]["plain"]["tokens_per_s"]["rounds"]
    with mpl.rc_context({"svg.hashsalt": "hashtap", "svg.fonttype": "none"}):
        figure = Figure(figsize=(7, 1.2 + 0.55 * len(sides)), layout="constrained")
        axes = figure.add_subplot()
        for row, side in enumerate(sides.values()):
            ratio = paired_ratio(side["tokens_per_s"]["rounds"], plain)
            color = "tab:gray" if side["complete"] is False else "tab:blue"
            axes.plot(ratio.rounds, [row] * len(plain), "o", color=color, alpha=0.4)
            axes.plot([ratio.low, ratio.high], [row, row], "-", color=color, linewidth=3)
            axes.plot(ratio.median, row, "|", color="black", markersize=18)
        axes.axvline(1.0, color="black", linewidth=0.8)
        names = [name + (" (incomplete)" if side["complete"] is False else "") for name, side in sides.items()]
        axes.set_yticks(range(len(sides)), names)
        axes.set_ylim(len(sides) - 0.5, -0.5)
        axes.set_xlabel("prompt tokens/s ÷ plain server; a dot a round, bar: 95 % interval of the median")
        axes.set_title(record["model"], loc="left")
        paths = [target.with_suffix(suffix) for suffix in (".png", ".svg")]
        figure.savefig(paths[0], dpi=150)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths
