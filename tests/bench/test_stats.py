"""Ratios of paired rounds and their intervals."""

import statistics

import numpy as np
import pytest

from hashtap.bench.stats import median_interval, paired_ratio, percentile


def test_ratios_are_of_pairs() -> None:
    """A machine that slows down over the rounds changes no ratio."""
    ratio = paired_ratio([99.0, 49.5, 9.9], [100.0, 50.0, 10.0])
    assert ratio.rounds == pytest.approx((0.99, 0.99, 0.99))
    assert (ratio.median, ratio.low, ratio.high) == pytest.approx((0.99, 0.99, 0.99))
    assert ratio.to_json() == {
        "ratio_median": ratio.median,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "ratio_rounds": ratio.rounds,
    }


def test_rounds_must_come_in_pairs() -> None:
    with pytest.raises(ValueError, match="shorter"):
        paired_ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="no values"):
        median_interval([])


def test_the_interval_holds_the_true_median_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    held = 0
    for _ in range(100):
        low, high = median_interval(random.normal(1.0, 0.02, 11).tolist())
        held += low <= 1.0 <= high
    assert 88 <= held <= 100


def test_the_interval_narrows_with_rounds_and_is_repeatable() -> None:
    values = np.random.default_rng(1).normal(1.0, 0.02, 45).tolist()
    few, many = median_interval(values[:5]), median_interval(values)
    assert many[1] - many[0] < (few[1] - few[0]) / 2
    assert median_interval(values) == many
    assert few[0] <= statistics.median(values[:5]) <= few[1]
    assert median_interval([0.97]) == (0.97, 0.97)


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(value) for value in range(1, 41)]
    assert percentile(values, 99) == 40.0
    assert percentile(values, 50) == 20.0
    assert percentile([3.0], 99) == 3.0
