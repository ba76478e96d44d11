"""Turns → record, table, plot; and the loop over rounds."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hashtap.bench.counted import Got
from hashtap.bench.outcome import Asked, outcome
from hashtap.bench.plot import draw
from hashtap.bench.rounds import Fleet, Turn, precise_enough, rotated
from hashtap.bench.sides import Case, Side, make_sides
from hashtap.bench.table import show

SPEEDS = {"plain": (100.0, 50.0, 200.0), "aux": (99.0, 50.0, 198.0), "hashtap": (98.0, 49.5, 197.0)}
SPEEDS |= {"http": (40.0, 20.0, 80.0)}
ASKED = Asked(rows=3000, layers=4, hidden=8, element_bytes=2)


def turn(speed: float, step_s: float | None = 0.01) -> Turn:
    seconds = 1000 / speed
    return Turn(1000, seconds, (seconds / 4, seconds / 2, seconds), step_s, 2 * seconds, 10**9, Got())


def sides() -> list[Side]:
    return make_sides(Case("/models/m", Path("/nowhere")), ("http",))


def record(got: Got) -> dict[str, Any]:
    turns = {name: [turn(speed) for speed in speeds] for name, speeds in SPEEDS.items()}
    turns["http"] = [turn(speed, step_s=None) for speed in SPEEDS["http"]]
    gave = {"hashtap": Got(3000, 32, 128_000), "http": got}
    return {"model": "m", "rounds": 3, **outcome(sides(), turns, gave, ASKED)}


def test_the_figure_to_look_for_is_the_median_ratio_to_the_plain_server() -> None:
    found = record(Got(3000, 32, 500_000))
    assert found["tokens_per_s"]["ratio_rounds"] == pytest.approx((0.98, 0.99, 0.985))
    assert found["tokens_per_s"]["ratio_median"] == pytest.approx(0.985)
    assert found["against"]["http"]["tokens_per_s"]["ratio_median"] == pytest.approx(2.4625)
    assert found["against"]["aux"]["cpu_ms_per_token"]["ratio_median"] == pytest.approx(50 / 49.5)
    assert "step_s" in found["against"]["aux"]
    assert "step_s" not in found["against"]["http"], "it was not timed there"
    mine = found["sides"]["hashtap"]
    assert mine["tokens_per_s"]["median"] == 98.0
    assert mine["ttft_p50_s"]["rounds"][0] == pytest.approx(1000 / 98 / 2)
    assert (mine["complete"], mine["raw_over_bytes"]) == (True, 1.5)
    assert found["sides"]["plain"]["complete"] is None


@pytest.mark.parametrize("got", [Got(2999, 32, 1), Got(3000, 24, 1), Got()])
def test_a_side_that_gives_less_is_incomplete_not_fast(got: Got) -> None:
    found = record(got)
    assert found["sides"]["http"]["complete"] is False
    console = Console(record=True, width=220, file=StringIO())
    show(found, console)
    text = console.export_text()
    assert "INCOMPLETE" in text
    assert f"http is incomplete: it gave {got.rows:,} of 3,000 rows, {got.width / 8:g} of 4 layers" in text


def test_the_plot_has_every_side_and_is_repeatable(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = record(Got(90, 24, 1))
    png, svg = draw(found, tmp_path / "a")
    assert png.read_bytes().startswith(b"\x89PNG")
    text = svg.read_text()
    assert all(name in text for name in ("aux", "hashtap", "http (incomplete)"))
    assert draw(found, tmp_path / "b")[1].read_text() == text


def test_every_side_is_first_and_last_equally_often() -> None:
    orders = [rotated(sides(), number) for number in range(8)]
    for place in range(4):
        assert sorted(order[place].name for order in orders) == sorted(2 * [*SPEEDS])


def test_rounds_end_when_both_ratios_are_sure_enough() -> None:
    turns = {name: [turn(speed) for speed in SPEEDS[name]] for name in ("plain", "aux", "hashtap")}
    assert precise_enough(turns, 0.01)
    assert not precise_enough(turns, 0.001)
    turns["aux"] = [turn(speed) for speed in (99.0, 55.0, 198.0)]
    assert not precise_enough(turns, 0.01)


class Standing:
    """In place of a server: writes down what is done to it."""

    def __init__(self, side: Side, events: list[str]) -> None:
        self._say = lambda event: events.append(f"{event} {side.name}")

    def __enter__(self) -> "Standing":
        self._say("start")
        return self

    def __exit__(self, *_: object) -> None:
        self._say("stop")

    def pause(self) -> None:
        self._say("pause")

    def resume(self) -> None:
        self._say("resume")


@contextmanager
def fleet(events: list[str], *, one_at_a_time: bool) -> Iterator[tuple[Fleet, list[Side]]]:
    def make(side: Side) -> Any:
        return Standing(side, events)

    def warm_up(side: Side, server: object) -> None:
        events.append(f"warm {side.name}")

    chosen = sides()[:2]
    with Fleet(chosen, make, warm_up, one_at_a_time=one_at_a_time) as started:
        yield started, chosen


def test_only_the_server_whose_turn_it_is_runs() -> None:
    events: list[str] = []
    with fleet(events, one_at_a_time=False) as (started, chosen), started.turn(chosen[1]):
        events.append("measured")
    expected = ["start plain", "warm plain", "pause plain", "start aux", "warm aux", "pause aux"]
    expected += ["resume aux", "measured", "pause aux", "stop aux", "stop plain"]
    assert events == expected


def test_one_at_a_time_starts_a_server_for_its_turn() -> None:
    events: list[str] = []
    with fleet(events, one_at_a_time=True) as (started, chosen):
        assert events == []
        with started.turn(chosen[0]):
            events.append("measured")
    assert events == ["start plain", "warm plain", "measured", "stop plain"]


def test_a_server_that_does_not_start_stops_those_that_did() -> None:
    events: list[str] = []

    def make(side: Side) -> Any:
        if side.name == "aux":
            raise RuntimeError("no memory")
        return Standing(side, events)

    with (
        pytest.raises(RuntimeError, match="no memory"),
        Fleet(sides(), make, lambda *_: None, one_at_a_time=False),
    ):
        pass
    assert events[-1] == "stop plain"
