"""The order of sealing as a file: on a full disk, and when it is not what it should be."""

import resource
from pathlib import Path

import pytest
from tests.capture.build import Host

from hashtap.errors import UsageError
from hashtap.order import SealingOrder
from hashtap.reader import Reader

EPOCH = "weights-1"


def captured(path: Path, count: int) -> Reader:
    with Host(path, threads=1) as host:
        host.capture([[number] for number in range(count)])
    return Reader(path)


def test_a_disk_that_fills_up_cuts_no_row_short(tmp_path: Path) -> None:
    """One row of three fits, and half of the next: who writes them fails, and nobody counts more than the one."""
    reader, order = captured(tmp_path, 3), SealingOrder(tmp_path, EPOCH)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (32 + 24 + 12, hard))
    try:
        with pytest.raises(UsageError, match="File too large"):
            order.extend(reader)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(order) == 0
    order.look()
    assert len(order) == 1
    assert order.extend(reader) == 2
    other = SealingOrder(tmp_path, EPOCH)
    other.look()
    assert [other.key(row) for row in range(3)] == [order.key(row) for row in range(3)]
    assert {other.key(row) for row in range(3)} == reader.keys()


def test_an_order_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = captured(tmp_path, 7)
    assert SealingOrder(tmp_path, EPOCH).extend(reader) == 7
    monkeypatch.setattr("hashtap.order._PIECE_BYTES", 3 * 24 + 5)
    order = SealingOrder(tmp_path, EPOCH)
    order.look()
    assert {order.key(row) for row in range(7)} == reader.keys()
    assert order.tokens(0, 7).tolist() == [1] * 7
