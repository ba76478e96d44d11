"""Records that verify found wrong: nobody is given them any more, and all else goes on."""

import json
from pathlib import Path

import numpy as np
import pytest
from tests.capture.build import Host, states_of
from tests.capture.test_cli import Hashtap, hashtap  # noqa: F401
from tests.golden import independent
from torch.utils.data import DataLoader

from hashtap.datasets import CaptureDataset
from hashtap.errors import FormatError, UsageError
from hashtap.identity import prompt_key
from hashtap.reader import NotCaptured, Reader
from hashtap.report import Problem
from hashtap.set_aside import SET_ASIDE_NAME, add_set_aside, load_set_aside
from hashtap.shard import read_shard
from hashtap.verify import verify

NAN, INF = 0x7FC0, 0x7F80
PROMPTS = [[1, 2, 3], list(range(9)), [4], [5, 5]]
BAD = PROMPTS[1]


def capture(path: Path, *, odd: bool = True) -> None:
    """Capture the prompts; row 7 of one is NaN and its row 2 holds an infinity."""
    with Host(path, threads=1) as host:
        for ids in PROMPTS:
            states = states_of(ids)
            if odd and ids is BAD:
                states[7, 1], states[2, 3, 5] = NAN, INF
            host.forward([(host.record(ids), states, 0, len(ids))])


def write_samples(path: Path) -> Path:
    path.write_text("".join(json.dumps({"id": f"s-{n}", "input_ids": ids}) + "\n" for n, ids in enumerate(PROMPTS)))
    return path


def test_nan_and_inf_are_named_and_taken_out_of_use(tmp_path: Path, hashtap: Hashtap) -> None:  # noqa: F811
    captures = tmp_path / "captures"
    capture(captures)
    samples = write_samples(tmp_path / "samples.jsonl")
    code, out, err = hashtap("verify", captures, "--samples", samples, "--set-aside")
    assert code == 1
    assert "nan: sample s-1" in out
    assert "rows 7" in out
    assert "inf: sample s-1" in out
    assert f"1 records set aside in {captures / SET_ASIDE_NAME}" in out
    assert "start the server anew" in err

    reader = Reader(captures)
    assert reader.keys() == {prompt_key(ids) for ids in PROMPTS if ids is not BAD}
    assert [entry.key for entry in reader.set_aside] == [prompt_key(BAD)]
    with pytest.raises(NotCaptured):
        reader.by_token_ids(BAD)
    assert len(list(DataLoader(CaptureDataset(captures), batch_size=None))) == 3

    code, out, _ = hashtap("verify", captures, "--samples", samples, "--json")
    report = json.loads(out)
    assert (code, report["verified"], report["samples"], report["set_aside"]) == (1, 3, 4, 1)
    assert [(problem["kind"], problem["sample_ids"]) for problem in report["problems"]] == [("missing", ["s-1"])]
    assert hashtap("verify", captures)[0] == 0
    assert json.loads(hashtap("show", captures, "--json")[1])["set aside"] == 1


def test_the_sample_is_captured_anew(tmp_path: Path) -> None:
    """By another run of the server; what was set aside does not come back, nor does it hide the new record."""
    capture(tmp_path)
    assert add_set_aside(tmp_path, verify(tmp_path).problems) == 1
    reader = Reader(tmp_path)
    with Host(tmp_path, threads=1) as host:
        host.forward([(host.record(BAD), states_of(BAD), 0, len(BAD))])
    assert reader.refresh()
    assert np.array_equal(reader.by_token_ids(BAD).hidden_states, states_of(BAD))
    assert reader.duplicates == []
    assert {(key, len(ids)) for key, _, ids, _ in independent.read_directory(tmp_path)} == {
        (prompt_key(ids), len(ids)) for ids in PROMPTS
    }
    report = verify(tmp_path, [(str(n), ids, b"") for n, ids in enumerate(PROMPTS)])
    assert (report.ok, report.verified, report.set_aside) == (True, 4, 1)


def test_a_reader_that_is_open_learns_of_it(tmp_path: Path) -> None:
    capture(tmp_path)
    reader = Reader(tmp_path)
    assert prompt_key(BAD) in reader
    problems = verify(tmp_path).problems
    assert add_set_aside(tmp_path, problems) == 1
    assert add_set_aside(tmp_path, problems) == 0
    assert prompt_key(BAD) not in {key for key, *_ in independent.read_directory(tmp_path)}
    assert reader.refresh()
    assert prompt_key(BAD) not in reader
    assert not reader.refresh()


def test_spoilt_bytes_are_not_reported_for_ever(tmp_path: Path) -> None:
    capture(tmp_path, odd=False)
    (path,) = tmp_path.glob("*.safetensors")
    shard = read_shard(path)
    with path.open("r+b") as file:
        file.seek(shard.frames_at + int(shard.index[1, 0]) + 300)
        file.write(b"\xff\x00\xff")
    report = verify(tmp_path)
    assert [problem.kind for problem in report.problems] == ["stored_sum"]
    assert add_set_aside(tmp_path, report.problems) == 1
    assert verify(tmp_path).ok


@pytest.mark.parametrize(
    "line",
    ["{", "[]", "{}", "null", '{"writer": 7, "serial": 1}', " " * (1 << 20) + '{"writer": "a", "serial": 1}']
    + [f'{{"writer": "a", "serial": {serial}}}' for serial in ('"x"', "1e999", "1.5", "-1", "true", 1 << 64)],
)
def test_a_damaged_list_is_one_error(tmp_path: Path, line: str) -> None:
    """Better no capture than a bad one among them."""
    capture(tmp_path)
    add_set_aside(tmp_path, verify(tmp_path).problems)
    with (tmp_path / SET_ASIDE_NAME).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(FormatError, match=r"line 2 of .*set-aside\.jsonl is damaged: mend it"):
        load_set_aside(tmp_path)
    with pytest.raises(FormatError, match="line 2"):
        Reader(tmp_path)


@pytest.mark.parametrize("limit", ["_LIMIT_BYTES", "_LINE_LIMIT_BYTES"])
def test_no_list_is_longer_than_a_reader_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    Host(tmp_path).writer.close()
    few = [Problem("nan", "", writer="a", serial=n) for n in range(5)]
    assert add_set_aside(tmp_path, few) == 5
    monkeypatch.setattr(f"hashtap.set_aside.{limit}", (tmp_path / SET_ASIDE_NAME).stat().st_size)
    with pytest.raises(UsageError, match="move the shards of the bad records away"):
        add_set_aside(tmp_path, [Problem("nan", "x" * 1000, writer="a", serial=5)])
    assert load_set_aside(tmp_path) == {("a", n) for n in range(5)}


def test_of_many_samples_some_are_named(tmp_path: Path) -> None:
    Host(tmp_path).writer.close()
    names = tuple(f"sample-{n:020}" for n in range(100_000))
    assert add_set_aside(tmp_path, [Problem("nan", "", key="00", sample_ids=names, writer="a", serial=1)]) == 1
    assert load_set_aside(tmp_path) == {("a", 1)}
    assert json.loads((tmp_path / SET_ASIDE_NAME).read_text())["samples"] == list(names[:100])


def test_a_last_line_without_an_end_is_gone_on_behind(tmp_path: Path) -> None:
    Host(tmp_path).writer.close()
    (tmp_path / SET_ASIDE_NAME).write_text('{"writer": "a", "serial": 18446744073709551615}')
    assert add_set_aside(tmp_path, [Problem("nan", "", writer="a", serial=1)]) == 1
    assert load_set_aside(tmp_path) == {("a", 1), ("a", 18446744073709551615)}
