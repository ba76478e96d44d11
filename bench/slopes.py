"""One cost along one axis: its slope, from where on it is flat, what explains the rest; and all of them as a plot."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

__all__ = ["Curve", "Reason", "draw"]

FLAT = 1.25  # so much more or less than at the axis's end is as good as the same


class Reason(NamedTuple):
    """Why a cost is not flat, and the steepest slope that this explains."""

    slope_up_to: float
    text: str


@dataclass(frozen=True, slots=True)
class Curve:
    """A cost at rising points of an axis, once a round.

    Attributes:
        axis: what is varied, with its unit.
        cost: what it costs, with its unit.
        points: the costs of all rounds, by point.
    """

    axis: str
    cost: str
    points: Mapping[int, Sequence[float]]

    @property
    def medians(self) -> dict[int, float]:
        """The cost at each point: of the rounds, each measured by its own mean, since the machine's speed wanders."""
        costs = np.array(list(self.points.values()))  # [points, rounds]
        rounds = np.exp(np.log(costs).mean(axis=0))
        return dict(zip(self.points, (np.median(costs / rounds, axis=1) * np.median(rounds)).tolist(), strict=True))

    @property
    def slope(self) -> float:
        """Of the fitted line in log-log: 0 is flat, 1 means that twice the size costs twice as much."""
        points, costs = np.log(list(self.medians)), np.log(list(self.medians.values()))
        return float(np.polyfit(points, costs, 1)[0])

    @property
    def flat_from(self) -> int:
        """The first point from which on all cost as much as the last one, give or take ``FLAT``."""
        *before, (first, last_cost) = self.medians.items()
        for point, cost in reversed(before):
            if not last_cost / FLAT <= cost <= last_cost * FLAT:
                break
            first = point
        return first

    def why(self, reason: Reason | None) -> str:
        """``flat``, the reason where that covers the slope, or ``NOT EXPLAINED``."""
        if self.flat_from == next(iter(self.points)):
            return "flat"
        return reason.text if reason and self.slope <= reason.slope_up_to else "NOT EXPLAINED"

    def record(self, reason: Reason | None) -> dict[str, Any]:
        """For JSON."""
        points = {str(point): [float(f"{cost:.5g}") for cost in costs] for point, costs in self.points.items()}
        return {
            "axis": self.axis,
            "cost": self.cost,
            "points": points,
            "medians": {str(point): cost for point, cost in self.medians.items()},
            "slope": self.slope,
            "flat_from": self.flat_from,
            "why": self.why(reason),
        }


def draw(curves: Iterable[Curve], target: Path) -> None:
    """Write ``target`` with the suffixes ``.svg`` and ``.png``: a panel an axis, each cost over that at its end."""
    panels: dict[str, list[Curve]] = {}
    for curve in curves:
        panels.setdefault(curve.axis, []).append(curve)
    with mpl.rc_context({"svg.hashsalt": "hashtap", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(figsize=(10, 3 * -(-len(panels) // 3)), layout="constrained")
        grid = figure.subplots(-(-len(panels) // 3), 3, squeeze=False).flat
        for (axis, of_axis), axes in zip(panels.items(), grid, strict=False):
            _panel(axes, axis, of_axis)
        for axes in grid:
            axes.set_axis_off()
        figure.supylabel("cost ÷ cost at the last point")
        figure.savefig(target.with_suffix(".png"), dpi=150)
        figure.savefig(target.with_suffix(".svg"), metadata={"Date": None})


def _panel(axes: Any, axis: str, curves: Sequence[Curve]) -> None:
    axes.axhspan(1 / FLAT, FLAT, color="0.92")
    for curve in curves:
        *_, last = curve.medians.values()
        heights = [cost / last for cost in curve.medians.values()]
        axes.plot(list(curve.medians), heights, "o-", markersize=3, label=f"{curve.cost}: {last:,.4g} at the end")
    points = list(curves[0].points)
    axes.set(xscale="log", yscale="log", xlabel=axis)
    axes.set_xticks(points, [f"{point:,}" for point in points], rotation=30)
    axes.minorticks_off()
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, 0.5), max(high, 2))
    axes.set_yticks(list(_ticks(*axes.get_ylim())), labels=[f"{tick:g}" for tick in _ticks(*axes.get_ylim())])
    axes.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)


def _ticks(low: float, high: float) -> Iterator[float]:
    """Powers of two, or of ten where those would be many."""
    base = 2.0 if high / low < 100 else 10.0
    first = int(np.ceil(np.log(low) / np.log(base)))
    return (base**power for power in range(first, int(np.floor(np.log(high) / np.log(base))) + 1))
