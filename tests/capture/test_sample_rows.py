"""Tables and saved datasets as sample files: the same rows as JSON lines give."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.capture.test_chat import marked
from tests.capture.tiny_tokenizer import make_tokenizer

from hashtap.chat import ChatTokenizer
from hashtap.errors import UsageError
from hashtap.samples import SampleFile, load_samples

ROWS: list[dict[str, Any]] = [
    {"input_ids": [7, *range(number)], "loss_mask": [0] + [1] * number, "seq_len": 1 + number} for number in range(150)
]


def save_arrow(path: Path, table: pa.Table) -> None:
    """As ``datasets`` does: a stream, of batches of which the last one is short."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=100)


def save_dataset(path: Path, table: pa.Table, parts: int = 1) -> None:
    """A directory as ``save_to_disk`` of ``datasets`` leaves it; speculators prepares its data so."""
    path.mkdir()
    names = [f"data-{part:05d}-of-{parts:05d}.arrow" for part in range(parts)]
    for part, name in enumerate(names):
        save_arrow(path / name, table.slice(part * table.num_rows // parts, table.num_rows // parts))
    state = {"_data_files": [{"filename": name} for name in names], "_format_type": "torch", "_split": None}
    (path / "state.json").write_text(json.dumps(state))
    (path / "dataset_info.json").write_text("{}")


def save_parquet(path: Path, table: pa.Table) -> None:
    pq.write_table(table, path, row_group_size=40)


def save_feather(path: Path, table: pa.Table, batch_rows: int = 100) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=batch_rows)


def save_folder(path: Path, table: pa.Table) -> None:
    path.mkdir()
    for part in range(3):
        save_parquet(path / f"train-{part:05d}-of-00003.parquet", table.slice(part * 50, 50))


def assert_rows(file: SampleFile) -> None:
    assert [(sample.id, sample.line) for sample in file.samples] == [(str(n), n) for n in range(1, 151)]
    assert [sample.token_ids.tolist() for sample in file.samples] == [row["input_ids"] for row in ROWS]
    for sample, row in zip(file.samples, ROWS, strict=True):
        assert sample.loss_mask is not None
        assert sample.loss_mask.tolist() == row["loss_mask"]
    assert file.bad == []


@pytest.mark.parametrize(
    ("name", "save"),
    [
        ("s.parquet", save_parquet),
        ("s.arrow", save_arrow),
        ("s.arrow", save_feather),
        ("saved", save_dataset),
        ("saved", lambda path, table: save_dataset(path, table, parts=2)),
        ("folder", save_folder),
    ],
    ids=["Parquet", "Arrow stream", "Arrow file", "saved dataset", "in two parts", "folder of Parquet"],
)
def test_rows_are_read_in_order(tmp_path: Path, name: str, save: Callable[[Path, pa.Table], None]) -> None:
    save(tmp_path / name, pa.Table.from_pylist(ROWS))
    assert_rows(load_samples(tmp_path / name))


def test_what_the_real_package_saves(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(ROWS)
    table.set_format("torch")
    table.save_to_disk(tmp_path / "saved", num_shards=2)
    assert_rows(load_samples(tmp_path / "saved"))
    datasets.DatasetDict({"train": table}).save_to_disk(tmp_path / "dict")
    assert_rows(load_samples(tmp_path / "dict" / "train"))
    with pytest.raises(UsageError, match=f"several splits: give {tmp_path}/dict/train$"):
        load_samples(tmp_path / "dict")


def test_chats_of_a_table_are_those_of_its_json_lines(tmp_path: Path) -> None:
    """A table gives every message every field; a template must not see those that are null."""
    template = (
        "{% for m in messages %}{% if 'name' in m %}{{ m['name'] }}: {% endif %}{{ m['content'] }}</s>{% endfor %}"
    )
    tokenizer = ChatTokenizer(str(make_tokenizer(tmp_path / "t", template)))
    chat = [{"role": "user", "content": "Hi", "name": "Eve"}, {"role": "assistant", "content": "Hello."}]
    rows: list[dict[str, Any]] = [{"id": "a", "messages": chat}, {"id": "b", "text": "only text"}]
    save_dataset(tmp_path / "saved", pa.Table.from_pylist(rows, pa.schema(SCHEMA)))
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    lines, table = (load_samples(tmp_path / name, tokenizer=tokenizer) for name in ("s.jsonl", "saved"))

    assert [sample.id for sample in table.samples] == ["a", "b"]
    assert [sample.key for sample in table.samples] == [sample.key for sample in lines.samples]
    assert table.samples[0].loss_mask is not None
    assert table.samples[0].loss_mask.tolist() == [0] * len("Eve: Hi/") + [1] * len("Hello./")
    assert table.samples[1].loss_mask is None


SHAREGPT = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "Hi"},
    {"from": "gpt", "value": "Hello."},
    {"from": "human", "value": "And?"},
    {"from": "gpt", "value": "No more."},
]


@pytest.mark.parametrize("name", ["s.jsonl", "s.json", "s.parquet"])
def test_conversations_of_sharegpt_are_chats(tmp_path: Path, name: str) -> None:
    roles = ["system", "user", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": turn["value"]} for role, turn in zip(roles, SHAREGPT, strict=True)]
    rows = [{"id": "a", "conversations": SHAREGPT}, {"id": "b", "conversations": SHAREGPT[1:3]}]
    if name == "s.parquet":
        save_parquet(tmp_path / name, pa.Table.from_pylist(rows))
    else:
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name).write_text(json.dumps(rows, indent=1) if name == "s.json" else lines)
    tokenizer = ChatTokenizer(str(make_tokenizer(tmp_path / "t")))
    file = load_samples(tmp_path / name, tokenizer=tokenizer)
    assert ([sample.id for sample in file.samples], file.bad) == (["a", "b"], [])
    for sample, chat, said in zip(
        file.samples, (messages, messages[1:3]), (["Hello.</s>", "No more.</s>"], ["Hello.</s>"]), strict=True
    ):
        assert sample.loss_mask is not None
        ids, mask = sample.token_ids.tolist(), sample.loss_mask.tolist()
        assert (ids, mask) == tokenizer.chat(chat)
        assert marked(tmp_path / "t", ids, mask) == said


@pytest.mark.parametrize(
    ("conversations", "detail"),
    [
        (
            [*SHAREGPT, {"from": "bard", "value": "x"}],
            'turn 5 is from "bard"; known are human, user, gpt, assistant, sys',
        ),
        ([{"from": ["gpt"], "value": "x"}], 'turn 0 is from ["gpt"]'),
        ([{"from": "human", "value": None}], "the value of turn 0 must be a string, not null"),
        ([{"from": "human"}], "the value of turn 0 must be a string, not null"),
        ([{"value": "x"}], "message 0 must be an object with a role"),
        ([], "conversations must be a list of one or more, not []"),
        ("Hi", 'conversations must be a list of one or more, not "Hi"'),
    ],
)
def test_conversations_that_are_none(tmp_path: Path, conversations: Any, detail: str) -> None:
    (tmp_path / "s.json").write_text(json.dumps([{"id": "x", "conversations": conversations}, {"input_ids": [1]}]))
    file = load_samples(tmp_path / "s.json", tokenizer=ChatTokenizer("never loaded"))
    (bad,) = file.bad
    assert (bad.line, bad.id, bad.reason, len(file.samples)) == (1, "x", "bad conversations", 1)
    assert detail in bad.detail


def test_a_file_called_json(tmp_path: Path) -> None:
    """A list, in which each element is judged; or JSON lines; or neither."""
    path = tmp_path / "s.json"
    path.write_text('\n [{"input_ids": [1]}, 7, {"input_ids": [2]}]')
    file = load_samples(path)
    assert [sample.line for sample in file.samples] == [1, 3]
    assert [(bad.line, bad.detail) for bad in file.bad] == [(2, "a line is one object, not 7")]
    path.write_text('{"input_ids": [1]}\n{"input_ids": [2]}\n')
    assert [sample.line for sample in load_samples(path).samples] == [1, 2]
    for text in ('[{"input_ids": [1]}', "[" * 10**6):
        path.write_text(text)
        with pytest.raises(UsageError, match="cannot read the samples"):
            load_samples(path)


SCHEMA = [
    ("id", pa.string()),
    ("messages", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())]))),
    ("text", pa.string()),
]


def test_rows_stay_in_order_whatever_they_ask_of_a_tokenizer(tmp_path: Path) -> None:
    """More than are made ids at a time: texts, chats, ids, a text that no tokenizer takes, and an id given twice."""
    tokenizer = ChatTokenizer(str(make_tokenizer(tmp_path / "t")))
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    rows: list[dict[str, Any]] = [
        {"text": "a"},
        {"messages": chat},
        {"input_ids": [1]},
        {"text": "\ud800"},
        {"id": "2"},
    ]
    rows = [row | ({"id": "2", "text": "b"} if "id" in row else {}) for _ in range(40) for row in rows]
    (tmp_path / "s.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = load_samples(tmp_path / "s.jsonl", tokenizer=tokenizer)
    ids = {0: tokenizer.text("a"), 1: tokenizer.chat(chat)[0], 2: [1]}
    assert [(s.line, s.token_ids.tolist()) for s in file.samples] == [
        (line, ids[(line - 1) % 5]) for line in range(1, 201) if (line - 1) % 5 < 3
    ]
    reasons = ["tokenizer failed", "duplicate id"]
    assert [(bad.line, bad.reason) for bad in file.bad] == [
        (line, reasons[(line - 1) % 5 - 3]) for line in range(1, 201) if (line - 1) % 5 > 2
    ]


def test_a_null_is_a_field_that_is_not_there(tmp_path: Path) -> None:
    rows = [{"id": None, "input_ids": [1], "loss_mask": None}, {"id": "b", "input_ids": None, "loss_mask": None}]
    rows.append({"id": "c", "input_ids": [1, None], "loss_mask": None})
    save_parquet(tmp_path / "s.parquet", pa.Table.from_pylist(rows, pa.schema(IDS)))
    file = load_samples(tmp_path / "s.parquet")
    assert [sample.id for sample in file.samples] == ["1"]
    assert [(bad.id, bad.reason) for bad in file.bad] == [("b", "no input_ids"), ("c", "bad input_ids")]


IDS = [("id", pa.string()), ("input_ids", pa.list_(pa.int64())), ("loss_mask", pa.list_(pa.int8()))]


def test_rows_of_a_great_table_are_read_a_few_at_a_time(tmp_path: Path) -> None:
    """One record batch of 60 MB, which is mapped; as Python lists it would take 270 MB, its samples take 30 MB."""
    count, tokens = 300, 25_000
    values = pa.array(np.arange(count * tokens))
    offsets = pa.array(np.arange(count + 1, dtype=np.int32) * tokens)
    save_feather(tmp_path / "s.arrow", pa.table({"input_ids": pa.ListArray.from_arrays(offsets, values)}), count)
    code = f"""
from pathlib import Path
from hashtap.samples import load_samples
file = load_samples({str(tmp_path / "s.arrow")!r})
peak_kib = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
print(len(file.samples), int(peak_kib) >> 10)
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert int(answer[0]) == count
    assert int(answer[1]) < 350, "MiB, of which 100 for the libraries"


@pytest.mark.parametrize("name", ["s.parquet", "s.arrow", "saved"])
def test_a_table_that_is_damaged_is_an_error(tmp_path: Path, name: str) -> None:
    table = pa.Table.from_pylist(ROWS)
    {"s.parquet": save_parquet, "s.arrow": save_arrow, "saved": save_dataset}[name](tmp_path / name, table)
    (path,) = [*(tmp_path / name).glob("*.arrow")] or [tmp_path / name]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UsageError, match="cannot read the samples"):
        load_samples(tmp_path / name)


def test_a_table_without_samples_is_an_error(tmp_path: Path) -> None:
    save_parquet(tmp_path / "s.parquet", pa.table({"prompt": ["a"], "answer": ["b"]}))
    with pytest.raises(
        UsageError, match="has the columns prompt, answer; samples have input_ids, messages, conversations or text"
    ):
        load_samples(tmp_path / "s.parquet")
    save_parquet(tmp_path / "none.parquet", pa.Table.from_pylist([], pa.schema(IDS)))
    with pytest.raises(UsageError, match="is empty"):
        load_samples(tmp_path / "none.parquet")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match="holds no Parquet or Arrow file"):
        load_samples(tmp_path / "folder")
    (tmp_path / "folder" / "state.json").write_text("{")
    with pytest.raises(UsageError, match="cannot read the samples"):
        load_samples(tmp_path / "folder")
