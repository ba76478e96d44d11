"""The table of modes says what the tests show, all of it and nothing else."""

from tests.cells import OUTCOMES, cells_in_table, cells_of_tests


def test_the_table_is_that_of_the_tests() -> None:
    assert cells_of_tests() == cells_in_table(), "run `make modes`"


def test_every_cell_has_an_outcome_and_one_only() -> None:
    cells = cells_of_tests()
    assert {cell.outcome for cell in cells} <= OUTCOMES.keys()
    assert len({cell.mode for cell in cells}) == len(cells)
    assert not any("|" in text for cell in cells for text in cell)
