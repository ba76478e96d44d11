"""Prompts found again by their first tokens, compared with a search through all of them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hashtap.donors import Donors
from hashtap.flight import Record
from hashtap.identity import prompt_key

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=12)


def record(ids: list[int], serial: int = 0, salt: bytes = b"") -> Record:
    array = np.array(ids, np.int64)
    return Record(serial, prompt_key(array, salt), array, salt)


@given(PROMPTS, st.lists(st.integers(0, 2), min_size=1, max_size=9), st.data())
def test_found_exactly_when_a_prompt_begins_so(
    prompts: list[list[int]], wanted: list[int], data: st.DataObject
) -> None:
    donors = Donors()
    for prompt in prompts:
        donors.add(record(prompt))
    tokens = data.draw(st.integers(1, len(wanted)))
    found = donors.find(np.array(wanted), tokens)
    if found is None:
        assert not any(prompt[:tokens] == wanted[:tokens] and len(prompt) >= tokens for prompt in prompts)
    else:
        assert found.token_ids.tolist() in prompts
        assert found.token_ids[:tokens].tolist() == wanted[:tokens]


def test_a_failed_prompt_is_no_donor_and_is_replaced() -> None:
    donors, first, second = Donors(), record([1, 2, 3]), record([1, 2, 4])
    donors.add(first)
    first.failed = True
    assert donors.find(np.array([1, 2, 3]), 2) is None
    donors.add(second)
    assert donors.find(np.array([1, 2, 3]), 2) is second


def test_salts_are_worlds_apart() -> None:
    donors = Donors()
    donors.add(record([1, 2, 3], salt=b"{}"))
    assert donors.find(np.array([1, 2]), 2) is None
    assert donors.find(np.array([1, 2]), 2, b"{}") is not None


def test_no_more_is_remembered_than_the_limit() -> None:
    donors = Donors(limit_tokens=10)
    for prompt in ([1] * 6, [2] * 4, [1] * 6):
        donors.add(record(prompt))
    assert donors.find(np.array([2, 2]), 2) is not None
    donors.add(record([3] * 5))
    assert donors.find(np.array([2, 2]), 2) is None
    assert donors.find(np.array([3, 3]), 2) is not None
