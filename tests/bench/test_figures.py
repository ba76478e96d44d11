"""When a measurement is made again, and what its figures are then."""

import time

import pytest
from bench.figures import QUICK_S, Figure, Measured, measure


def made(values: list[float], *, once: bool = False) -> tuple[Figure, int]:
    """The figure of a measurement that gives these values in turn, against a bar of 1; and how often it was made."""
    left = iter(values)
    (figure,), runs = measure(lambda: Measured([Figure("f", next(left), 1.0, at_least=True)]), once=once)
    return figure, len(runs)


@pytest.mark.parametrize(
    ("values", "value", "runs", "ok"),
    [
        ([1.01], 1.01, 1, True),
        ([0.96, 1.02, 1.01], 1.01, 3, True),
        ([0.96, 0.97, 1.2], 0.97, 3, False),
        ([0.94], 0.94, 1, False),
    ],
    ids=["reached", "noise", "just short", "far off"],
)
def test_what_falls_just_short_is_measured_again(values: list[float], value: float, runs: int, ok: bool) -> None:
    figure, made_times = made(values)
    assert (figure.value, made_times, figure.ok) == (value, runs, ok)


def test_what_takes_long_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, QUICK_S])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    assert made([0.96])[1] == 1


@pytest.mark.parametrize(
    ("value", "bar", "at_least", "end", "ok", "doubtful"),
    [
        (0.17, 0.15, False, None, False, True),
        (0.21, 0.15, False, None, False, False),
        (310.0, 300.0, False, None, False, True),
        (320.0, 300.0, False, None, False, False),
        (0.7, 0.98, True, 0.97, False, True),
        (0.7, 0.98, True, 0.99, True, False),
        (1.5, 1.05, False, 1.04, True, False),
    ],
)
def test_what_is_just_short(
    value: float, bar: float, at_least: bool, end: float | None, ok: bool, doubtful: bool
) -> None:
    """Of the end of the interval that decides, where there is one."""
    figure = Figure("f", value, bar, at_least, interval_end=end)
    assert (figure.ok, figure.doubtful) == (ok, doubtful)


def test_once() -> None:
    figure, runs = made([0.95], once=True)
    assert (figure.ok, runs) == (False, 1)
