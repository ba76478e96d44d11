"""Records that share rows: listed after their donor, or not at all."""

import numpy as np
import pytest

from hashtap.flight import Record
from hashtap.header import Header
from hashtap.identity import prompt_key
from hashtap.ledger import Ledger
from hashtap_kernels.layout import Dtype, Geometry, Payload

GEOMETRY = Geometry(2, 8, Dtype.BF16)


def record(serial: int, ids: list[int], shared: int = 0, donor: Record | None = None) -> Record:
    array = np.array(ids, np.int64)
    return Record(serial, prompt_key(array), array, shared_tokens=shared, donor=donor)


def frame(of: Record) -> Header:
    """The header of the one frame with all rows of its own."""
    first = of.shared_tokens
    return Header(
        geometry=GEOMETRY,
        payload=Payload.RAW,
        serial=of.serial,
        key=of.key,
        first_position=first,
        tokens=len(of.token_ids) - first,
        total_tokens=len(of.token_ids),
        proof=(1, 2),
        forward=1,
        table=0,
        coded_bytes=0,
        codec=0,
        stored_bytes=100,
        stored_sum=0,
        salt_sum=0,
    )


@pytest.fixture
def ledger() -> Ledger:
    ledger = Ledger()
    ledger.shard_opened(0)
    return ledger


@pytest.fixture
def chain() -> list[Record]:
    """Three turns of a conversation, each sharing the one before."""
    first = record(1, [1, 2, 3])
    second = record(2, [1, 2, 3, 4], 3, first)
    return [first, second, record(3, [1, 2, 3, 4, 5, 6], 4, second)]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1)])
def test_listed_when_their_donors_are(ledger: Ledger, chain: list[Record], order: tuple[int, ...]) -> None:
    for index in order:
        ledger.stored(chain[index], frame(chain[index]), 0)
    listed = ledger.shard_ends(0)
    assert [one.serial for one in listed] == [1, 2, 3]
    assert len(ledger) == 0


def test_a_donor_that_fails_takes_them_along(ledger: Ledger, chain: list[Record]) -> None:
    for one in chain[1:]:
        ledger.stored(one, frame(one), 0)
    ledger.fail(chain[0])
    assert [one.failed for one in chain] == [True, True, True]
    assert (ledger.shard_ends(0), len(ledger), ledger.waste_bytes) == ([], 0, 200)


def test_a_donor_that_failed_before(ledger: Ledger, chain: list[Record]) -> None:
    ledger.fail(chain[0])
    for one in chain[1:]:
        ledger.stored(one, frame(one), 0)
    assert ledger.shard_ends(0) == []
    assert len(ledger) == 0


def test_another_try_of_the_donors_prompt_that_fails_takes_nobody_along(ledger: Ledger, chain: list[Record]) -> None:
    ledger.stored(chain[1], frame(chain[1]), 0)
    ledger.fail(record(9, [1, 2, 3]))
    ledger.stored(chain[0], frame(chain[0]), 0)
    assert [one.serial for one in ledger.shard_ends(0)] == [1, 2]


def test_an_equal_record_serves_as_the_donor(ledger: Ledger, chain: list[Record]) -> None:
    equal = record(9, [1, 2, 3])
    ledger.stored(chain[1], frame(chain[1]), 0)
    ledger.stored(equal, frame(equal), 0)
    ledger.stored(chain[0], frame(chain[0]), 0)
    assert [one.serial for one in ledger.shard_ends(0)] == [9, 2]
    assert ledger.duplicates == 1


def test_a_lost_shard_takes_along_what_shares_its_rows(ledger: Ledger, chain: list[Record]) -> None:
    ledger.stored(chain[0], frame(chain[0]), 0)
    listed = ledger.shard_ends(0)
    ledger.shard_opened(1)
    ledger.stored(chain[2], frame(chain[2]), 1)
    ledger.stored(chain[1], frame(chain[1]), 1)
    ledger.lose({1}, listed)
    assert [one.failed for one in chain] == [True, True, True]
    again = record(4, [1, 2, 3, 4])
    ledger.stored(again, frame(again), 1)
    assert not again.failed


def test_no_shard_lists_more_than_a_reader_takes(
    ledger: Ledger, chain: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hashtap.ledger.MAX_FRAMES", 2)
    for one in reversed(chain):
        ledger.stored(one, frame(one), 0)
    assert [one.failed for one in chain] == [False, False, True]
    assert [one.serial for one in ledger.shard_ends(0)] == [1, 2]
    assert (len(ledger), ledger.waste_bytes) == (0, 100)
