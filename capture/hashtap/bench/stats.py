"""Ratios of paired rounds: their median, how sure it is, and when there are enough of them."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

__all__ = ["Ratio", "median_interval", "paired_ratio", "percentile"]

CONFIDENCE = 0.95
RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Ratio:
    """One side over another, round by round. ``low`` and ``high`` are the 95 % interval of the median."""

    median: float
    low: float
    high: float
    rounds: tuple[float, ...]

    @property
    def half_width(self) -> float:
        """Half of the interval."""
        return (self.high - self.low) / 2

    def to_json(self) -> dict[str, Any]:
        """``ratio_median``, ``ratio_low``, ``ratio_high`` and ``ratio_rounds``."""
        return {f"ratio_{name}": value for name, value in asdict(self).items()}


def paired_ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """``over[i] / under[i]`` of every round i; both sides did the same work in it, one right after the other.

    Raises:
        ValueError: when the two have different numbers of rounds, or none.
    """
    ratios = tuple(a / b for a, b in zip(over, under, strict=True))
    low, high = median_interval(ratios)
    return Ratio(statistics.median(ratios), low, high, ratios)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median by the percentile bootstrap; the same for the same values.

    Raises:
        ValueError: without values.
    """
    if not values:
        raise ValueError("no interval of no values")
    random = np.random.default_rng(0)
    draws = random.choice(np.asarray(values, np.float64), (RESAMPLES, len(values)))
    low, high = np.quantile(np.median(draws, axis=1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that ``percent`` of all do not exceed (nearest rank), so that it was measured."""
    return float(np.percentile(np.asarray(values), percent, method="inverted_cdf"))
