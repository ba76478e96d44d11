"""The matrix of modes: which ways of SGLang to run a prompt are tested, and what must come of each.

A test names its cells by ``@pytest.mark.cell(mode, outcome, how)``; outcomes are ``exact``, ``refused``, ``marked``.
``make modes`` loads this module as a plugin (``-p tests.cells``), runs every test that names one and, if all
pass, writes the table of ``docs/modes.md`` anew.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

__all__ = ["OUTCOMES", "TABLE", "Cell", "cells_in_table", "cells_of_tests"]

TESTS = Path(__file__).parent
TABLE = TESTS.parent / "docs" / "modes.md"
OUTCOMES = {
    "exact": "every prompt is captured: its ids, its rows, once",
    "refused": "nothing is captured; the server does not start, or the receipt says why",
    "marked": "the receipt says what is missing, and nothing is listed in a shard",
}
HEAD = """# Every way in which SGLang can run a prompt

Written by `make modes`, which runs every test named here{version}; do not edit. The outcome is one of three:

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


def cells_of_tests() -> set[Cell]:
    """The cells that tests name, found in their sources."""
    return {cell for path in sorted(TESTS.rglob("test_*.py")) for cell in _cells_of(path)}


def cells_in_table() -> set[Cell]:
    """The rows of the committed table."""
    lines = TABLE.read_text().splitlines()
    rows = lines[lines.index("|---|---|---|---|") + 1 :]
    return {Cell(*(part.strip() for part in row.strip("|").split(" | "))) for row in rows}


def _cells_of(path: Path) -> Iterator[Cell]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.cell":
            yield Cell(*(ast.literal_eval(argument) for argument in node.args), _where(path))


def _where(path: Path) -> str:
    return "server" if path.parent.name == "server" else {"test_batches": "batch", "test_modes": "arguments"}[path.stem]


def write_table(cells: list[Cell], version: str) -> None:
    """Write ``docs/modes.md``."""
    outcomes = "\n".join(f"- **{name}**: {meaning}." for name, meaning in OUTCOMES.items())
    rows = "".join(f"| {' | '.join(cell)} |\n" for cell in cells)
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text(HEAD.format(version=f" on SGLang {version}" if version else "", outcomes=outcomes) + rows)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write the table when everything that names a cell ran and passed."""
    ran = [Cell(*marker.args, _where(item.path)) for item in session.items for marker in item.iter_markers("cell")]
    if exitstatus == 0 and not session.config.option.collectonly and set(ran) == cells_of_tests():
        from importlib.metadata import version

        write_table(list(dict.fromkeys(ran)), version("sglang"))
        print(f"\nwrote {TABLE}")
