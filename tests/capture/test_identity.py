"""The key: golden values, and inputs that must not share one."""

import subprocess
import sys
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hashtap.identity import as_token_ids, parse_key, prompt_key, salt_of

GOLDEN = [
    ([], {}, "8404f3c7fc92650de6f964667f881cf7"),
    ([1, 2, 3], {}, "e124a9e6918ab6adce4b6d23af2af3aa"),
    ([2, 1, 3], {}, "33bcf10f0ea5379a129425cb7b914f8c"),
    ([1, 2, 3], {"lora": "ad1"}, "87f436e4ab758006046813595129c990"),
    (list(range(1000)), {}, "a9b4d110e3d9529963d8c7c23839d2d3"),
]


@pytest.mark.parametrize(("ids", "salt", "key"), GOLDEN, ids=["empty", "123", "213", "salt", "thousand"])
def test_golden(ids: list[int], salt: dict[str, str], key: str) -> None:
    assert prompt_key(ids, salt_of(salt)).hex() == key


def test_same_in_every_process() -> None:
    code = "from hashtap.identity import prompt_key; print(prompt_key([1, 2, 3]).hex())"
    for seed in ("0", "1", "random"):
        answer = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert answer.stdout.strip() == GOLDEN[1][2]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50))
def test_same_from_every_kind_of_list(ids: list[int]) -> None:
    keys = {prompt_key(ids), prompt_key(tuple(ids)), prompt_key(array("q", ids)), prompt_key(np.array(ids, np.int64))}
    assert len(keys) == 1


def test_same_from_a_strided_view() -> None:
    ids = np.arange(20, dtype=np.int64)
    assert prompt_key(ids[::2]) == prompt_key(list(range(0, 20, 2)))
    assert prompt_key(ids.astype(np.int32)) == prompt_key(ids)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2], [2, 1]),
        ([5], [5, 0]),
        ([], [0]),
        ([0], [0, 0]),
        ([7], [7 + 2**16]),
        ([7], [7 + 2**31]),
        ([7], [7 + 2**32]),
        ([1_000_000 + 2**33], [1_000_000]),
        (list(range(1000)), [*range(500), 501, *range(501, 1000)]),
    ],
)
def test_different_prompts_differ(one: list[int], other: list[int]) -> None:
    assert prompt_key(one) != prompt_key(other)


def test_salt_is_canonical() -> None:
    assert salt_of({"b": 1, "a": "é"}) == salt_of({"a": "é", "b": 1}) == '{"a":"é","b":1}'.encode()
    assert salt_of({}) == salt_of(None) == b""
    with pytest.raises(ValueError, match="JSON"):
        salt_of({"scale": float("nan")})


@pytest.mark.parametrize(
    ("bad", "error"),
    [([1.0, 2.0], TypeError), ([True], TypeError), (["1"], TypeError), ([2**63], TypeError), ([2**64], TypeError)],
    ids=["float", "bool", "text", "2^63", "2^64"],
)
def test_what_is_no_token_id(bad: list[int], error: type[Exception]) -> None:
    with pytest.raises(error, match="token ids must"):
        as_token_ids(bad)


def test_two_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match="2-dimensional"):
        as_token_ids(np.zeros((2, 3), np.int64))


def test_parse_key() -> None:
    key = prompt_key([1])
    assert parse_key(key.hex()) == key
    for text in ("", "zz", key.hex()[:-2], key.hex() + "00", "sample-1", " ".join([key.hex()[:16], key.hex()[16:]])):
        assert parse_key(text) is None
