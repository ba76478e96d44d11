"""``hashtap plan`` against small runs."""

import pytest
from bench import plan

pytestmark = [pytest.mark.slow]


def test_the_plan_is_within_15_percent_of_small_runs() -> None:
    measured = plan.measure()
    assert [figure.line() for figure in measured.figures if not figure.ok] == []
