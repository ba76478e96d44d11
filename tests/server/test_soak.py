"""The short forms of ``make soak``: many requests of all kinds, and a server that dies on the way."""

from pathlib import Path

import pytest
from tests.server.soak import soak

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.mark.cell("all of it at once, and a killed server", "exact", "300 mixed requests; `make soak`: 20,000")
def test_soak(tmp_path: Path) -> None:
    figures = soak(tmp_path / "captures", requests=300, restarts=1, seed=3, sample=40)
    print(figures)
    assert figures["done"]["plain"] > 100
    assert figures["counters_of_servers_told_to_stop"]["duplicates"] > 0
