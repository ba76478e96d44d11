"""When a measurement is made again, and what its figures are then."""

import pytest
from bench.figures import Figure, Measured, measure


def made(values: list[float], *, once: bool = False) -> tuple[Figure, int]:
    """The figure of a measurement that gives these values in turn, against a bar of 1; and how often it was made."""
    left = iter(values)
    (figure,), runs = measure(lambda: Measured([Figure("f", next(left), 1.0, at_least=True)]), once=once)
    return figure, len(runs)


@pytest.mark.parametrize(
    ("values", "value", "runs", "ok"),
    [
        ([1.01], 1.01, 1, True),
        ([0.95, 1.02, 1.01], 1.01, 3, True),
        ([0.95, 0.96, 1.2], 0.96, 3, False),
        ([0.5], 0.5, 1, False),
    ],
    ids=["reached", "noise", "just short", "out of reach"],
)
def test_what_falls_just_short_is_measured_again(values: list[float], value: float, runs: int, ok: bool) -> None:
    figure, made_times = made(values)
    assert (figure.value, made_times, figure.ok) == (value, runs, ok)


def test_once() -> None:
    figure, runs = made([0.95], once=True)
    assert (figure.ok, runs) == (False, 1)
