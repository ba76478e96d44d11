"""The sample file: every line is either a sample or a named fault, and a file cut short is an error."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import zstandard

from hashtap.errors import UsageError
from hashtap.identity import prompt_key
from hashtap.sample_fields import MAX_TOKEN_ID, Limits
from hashtap.samples import load_samples

LIMITS = Limits(vocab_size=100, max_prompt_tokens=11)


def write(path: Path, *lines: str | Mapping[str, object]) -> Path:
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_text(text)
    return path


def test_a_sample_keeps_its_id_line_key_and_mask(tmp_path: Path) -> None:
    path = write(
        tmp_path / "s.jsonl",
        {"input_ids": [1, 2, 3], "id": "first", "loss_mask": [0, 0, 1]},
        "",
        {"input_ids": [3, 2, 1], "text": "other fields are of no concern"},
        {"input_ids": [1, 2, 3], "id": 17},
    )

    file = load_samples(path, LIMITS)

    assert [(sample.id, sample.line) for sample in file.samples] == [("first", 1), ("3", 3), ("17", 4)]
    assert [sample.key for sample in file.samples] == [
        prompt_key([1, 2, 3]),
        prompt_key([3, 2, 1]),
        prompt_key([1, 2, 3]),
    ]
    assert file.samples[0].token_ids.tolist() == [1, 2, 3]
    assert file.samples[0].loss_mask is not None
    assert file.samples[0].loss_mask.tolist() == [0, 0, 1]
    assert file.samples[1].loss_mask is None
    assert (file.lines, file.bad) == (3, [])


def test_order_is_the_files_and_never_the_ids(tmp_path: Path) -> None:
    ids = [f"s-{number}" for number in range(1, 13)]
    path = write(tmp_path / "s.jsonl", *({"id": name, "input_ids": [7] * len(name)} for name in ids))
    assert [sample.id for sample in load_samples(path).samples] == ids


@pytest.mark.parametrize(
    ("line", "reason", "seen"),
    [
        ('{"input_ids": [1, 2', "malformed JSON", "at column 20"),
        ("[1, 2, 3]", "malformed JSON", "[1, 2, 3]"),
        ("[" * 100_000, "malformed JSON", "deep"),
        ('{"input_ids": [1' + "0" * 5_000 + "]}", "malformed JSON", "4300 digits"),
        ("\udcff", "malformed JSON", "utf-8"),
        ('{"id": 1}', "no input_ids", "no input_ids"),
        ('{"input_ids": null}', "no input_ids", "no input_ids"),
        ('{"input_ids": "text"}', "bad input_ids", '"text"'),
        ('{"input_ids": [1, 2.0]}', "bad input_ids", "position 1 holds 2.0"),
        ('{"input_ids": [true, 2]}', "bad input_ids", "position 0 holds true"),
        ('{"input_ids": [[1, 2]]}', "bad input_ids", "position 0 holds [1, 2]"),
        ('{"input_ids": []}', "empty prompt", "no token"),
        ('{"input_ids": [1, 99, 100]}', "out of vocabulary", "token id 100 at position 2; ids go from 0 to 99"),
        ('{"input_ids": [1, -1]}', "out of vocabulary", "token id -1 at position 1"),
        ('{"input_ids": [18446744073709551616]}', "out of vocabulary", "18446744073709551616"),
        (
            json.dumps({"input_ids": [5] * 12}),
            "too long",
            "the server takes 11",
        ),
        ('{"input_ids": [1, 2], "loss_mask": [1]}', "bad loss_mask", "1 elements for 2 tokens"),
        ('{"input_ids": [1, 2], "loss_mask": [0, 2]}', "bad loss_mask", "0 to 2"),
        ('{"input_ids": [1, 2], "loss_mask": [0, true]}', "bad loss_mask", "position 1 holds true"),
        ('{"input_ids": [1, 2], "loss_mask": 1}', "bad loss_mask", "not 1"),
        ('{"input_ids": [1], "id": 1.5}', "bad id", "1.5"),
        ('{"input_ids": [1], "id": ""}', "bad id", '""'),
        ('{"input_ids": [1], "id": "a\\nb"}', "bad id", "printable"),
        ('{"input_ids": [1], "id": "\\ud800"}', "bad id", "printable"),
        ('{"input_ids": [8], "id": "good"}', "duplicate id", "line 1 has the same id"),
    ],
)
def test_a_bad_line_is_named_and_the_others_stay(tmp_path: Path, line: str, reason: str, seen: str) -> None:
    path = tmp_path / "s.jsonl"
    lines = ['{"input_ids": [7], "id": "good"}', line, '{"input_ids": [9], "id": "last"}']
    path.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))

    file = load_samples(path, LIMITS)

    assert [sample.id for sample in file.samples] == ["good", "last"]
    (bad,) = file.bad
    assert (bad.line, bad.reason) == (2, reason)
    assert seen in bad.detail
    assert file.reasons() == {reason: 1}


def test_the_longest_prompt_that_fits_is_taken(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", {"input_ids": [99] * 11})
    assert load_samples(path, LIMITS).samples[0].tokens == 11


def test_without_a_server_any_id_of_31_bits_passes(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", {"input_ids": [MAX_TOKEN_ID]}, {"input_ids": [MAX_TOKEN_ID + 1]})
    file = load_samples(path)
    assert file.samples[0].token_ids.tolist() == [MAX_TOKEN_ID]
    assert file.reasons() == {"out of vocabulary": 1}


def test_reasons_are_counted_most_frequent_first(tmp_path: Path) -> None:
    lines = ['{"input_ids": []}'] * 60 + ["{"] * 7 + ['{"input_ids": [1]}'] * 33
    file = load_samples(write(tmp_path / "s.jsonl", *lines))
    assert list(file.reasons().items()) == [("empty prompt", 60), ("malformed JSON", 7)]
    assert (len(file.samples), file.lines) == (33, 100)


@pytest.mark.parametrize("content", ["", "\n \n\r\n"], ids=["no byte", "blank lines"])
def test_a_file_without_a_line_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match="is empty"):
        load_samples(path)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.jsonl: No such file"):
        load_samples(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="directory"):
        load_samples(tmp_path)


def test_zst_is_read_over_several_frames(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl.zst"
    compress = zstandard.ZstdCompressor().compress
    path.write_bytes(compress(b'{"input_ids": [1, 2, 3]}\n{"input_i') + compress(b'ds": [4]}\n'))
    assert [sample.token_ids.tolist() for sample in load_samples(path).samples] == [[1, 2, 3], [4]]


@pytest.mark.parametrize("kept", [0.3, 0.999])
def test_a_zst_file_cut_short_is_an_error(tmp_path: Path, kept: float) -> None:
    lines = "".join(json.dumps({"input_ids": [number, 3 * number]}) + "\n" for number in range(50_000))
    stream = zstandard.ZstdCompressor().compress(lines.encode())
    path = tmp_path / "s.jsonl.zst"
    path.write_bytes(stream[: int(len(stream) * kept)])
    with pytest.raises(UsageError, match="cannot read"):
        load_samples(path)


def test_a_zst_file_that_is_none_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl.zst"
    path.write_text('{"input_ids": [1, 2, 3]}\n')
    with pytest.raises(UsageError, match="cannot read"):
        load_samples(path)


def test_samples_are_held_in_few_bytes_a_token(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", {"input_ids": [30_000] * 7_001, "loss_mask": [1] * 7_001})
    (sample,) = load_samples(path).samples
    assert sample.loss_mask is not None
    assert sample.token_ids.nbytes + sample.loss_mask.nbytes == 5 * 7_001
    assert sample.token_ids.dtype == np.int32
