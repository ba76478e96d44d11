"""``hashtap plan`` against small runs. How far its seconds are off is for ``make bench``, on a quiet machine."""

import pytest
from bench import plan

pytestmark = [pytest.mark.slow]


def test_the_plans_bytes_are_within_15_percent_of_small_runs() -> None:
    figures = [figure for figure in plan.measure().figures if "bytes" in figure.name]
    assert len(figures) == 2
    assert [figure.line() for figure in figures if not figure.ok] == []
