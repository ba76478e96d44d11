"""The matrix of modes: which ways of SGLang to run a prompt are tested, and what must come of each.

A test names its cells by ``@pytest.mark.cell(mode, outcome, how)``; outcomes are ``exact``, ``refused``, ``marked``.
``make modes`` and ``make test-all`` load this module as a plugin (``-p tests.cells``), run every test that names one
and, if all pass, write the table of ``docs/modes.md`` anew.
"""

import ast
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest

__all__ = ["OUTCOMES", "TABLE", "Cell", "cells_in_table", "cells_of_tests", "write_table"]

TESTS = Path(__file__).parent
TABLE = TESTS.parent / "docs" / "modes.md"
OUTCOMES = {
    "exact": "every prompt is captured: its ids, its rows, once",
    "refused": "nothing is captured; the server does not start, or the receipt says why",
    "marked": "the receipt says what is missing, and nothing is listed in a shard",
}
HEAD = """# Ways in which SGLang can run a prompt

Each row is named by the test that shows it. `make modes` runs them all and, if they pass, writes this page, here for
SGLang {sglang}. An outcome is one of three:

{outcomes}

A *server* is a real SGLang on a CPU. What does not run on a CPU is shown on a *batch* built from SGLang's own classes,
or, where it is refused at start, on SGLang's *arguments*.

| mode | outcome | how | shown on |
|---|---|---|---|
"""


class Cell(NamedTuple):
    """One row of the table."""

    mode: str
    outcome: str
    how: str
    where: str  # "server", "batch" or "arguments"


def cells_of_tests() -> list[Cell]:
    """The cells that tests name, found in their sources, those on a server first."""
    files = [*sorted(TESTS.glob("server/test_*.py")), *sorted(TESTS.glob("seam/test_*.py"))]
    return [cell for path in files for cell in _cells_of(path)]


def cells_in_table() -> list[Cell]:
    """The rows of the committed table."""
    lines = TABLE.read_text().splitlines()
    rows = lines[lines.index("|---|---|---|---|") + 1 :]
    return [Cell(*(part.strip() for part in row.strip("|").split(" | "))) for row in rows]


def _cells_of(path: Path) -> Iterator[Cell]:
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    for node in sorted(calls, key=lambda call: call.lineno):
        if ast.unparse(node.func) == "pytest.mark.cell":
            yield Cell(*(ast.literal_eval(argument) for argument in node.args), _where(path))


def _where(path: Path) -> str:
    return "server" if path.parent.name == "server" else {"test_batches": "batch", "test_modes": "arguments"}[path.stem]


def write_table(cells: list[Cell], sglang: str) -> None:
    """Write ``docs/modes.md``."""
    outcomes = "\n".join(f"- **{name}**: {meaning}." for name, meaning in OUTCOMES.items())
    rows = "".join(f"| {' | '.join(cell)} |\n" for cell in cells)
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(HEAD.format(sglang=sglang, outcomes=outcomes) + rows)


_passed: set[Cell] = set()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have each report say which cells its test names: tests may run in several processes.

    Servers come first: they take long, and what is quick leaves no worker without work at the end.
    """
    items.sort(key=lambda item: item.get_closest_marker("server") is None)
    for item in items:
        cells = (Cell(*marker.args, _where(item.path)) for marker in item.iter_markers("cell"))
        item.user_properties.extend(("cell", tuple(cell)) for cell in cells)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note the cells of a test that passed."""
    if report.when == "call" and report.passed:
        _passed.update(Cell(*map(str, value)) for name, value in report.user_properties if name == "cell")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the table when everything that names a cell ran and passed."""
    named = cells_of_tests()
    if exitstatus == 0 and _passed == set(named):
        write_table(named, version("sglang"))
        print(f"\nwrote {TABLE}")
