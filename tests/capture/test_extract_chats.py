"""Chats, texts and saved datasets, extracted, verified and read; the client makes their ids, never the server."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.capture.peer import Peer
from tests.capture.test_chat import CHAT, marked
from tests.capture.test_cli import Hashtap, hashtap, only_line
from tests.capture.test_sample_rows import SCHEMA, save_dataset
from tests.capture.tiny_tokenizer import BLOCKS, make_tokenizer

from hashtap.chat import ChatTokenizer
from hashtap.datasets import CaptureDataset
from hashtap.manifest import Manifest
from hashtap.trainers.notes import source_of

__all__ = ["hashtap"]  # a fixture

ROWS: list[dict[str, Any]] = [
    {"id": "chat", "messages": CHAT},
    {"id": "short", "messages": CHAT[:2]},
    {"id": "text", "text": "Nobody asked."},
    {"id": "again", "messages": CHAT},
    {"id": "bad", "messages": [CHAT[0], {"role": "assistant", "content": "\nNo prefix"}]},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("model") / "t", adds_bos=True)


@pytest.fixture(params=["JSON lines", "saved dataset"])
def samples(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "JSON lines":
        path = tmp_path / "s.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        path = tmp_path / "saved"
        save_dataset(path, pa.Table.from_pylist(ROWS, pa.schema(SCHEMA)))
    return path


def test_chats_are_captured_resumed_and_verified(
    tmp_path: Path, tokenizer: Path, samples: Path, hashtap: Hashtap
) -> None:
    with Peer(tmp_path / "captures") as peer:
        command = [
            "extract",
            samples,
            "--server",
            peer.url,
            "--out",
            peer.directory,
            "--tokenizer",
            tokenizer,
            "--json",
        ]
        first, again = (json.loads(hashtap(*command)[1]) for _ in range(2))
        sent = [body["input_ids"] for body in peer.received]
        assert not any("text" in body for body in peer.received)
    assert (first["captured"], first["sent"], first["left_out"]) == (4, 3, {"turns cannot be told apart": 1})
    assert (again["captured"], again["sent"], again["exit_code"]) == (4, 0, 1)
    (bad,) = [json.loads(line) for line in (peer.directory / "quarantine.jsonl").read_text().splitlines()]
    assert (bad["id"], bad["line"], bad["reason"]) == ("bad", 5, "turns cannot be told apart")
    assert "{% generation %}" in bad["detail"]

    chats = ChatTokenizer(str(tokenizer))
    assert sorted(sent) == sorted([chats.chat(CHAT)[0], chats.chat(CHAT[:2])[0], chats.text("Nobody asked.")])
    dataset = CaptureDataset(peer.directory)
    chat, short, text, repeated = (dataset[at] for at in range(len(dataset)))
    assert [s["sample_id"] for s in (chat, short, text, repeated)] == ["chat", "short", "text", "again"]
    assert chat["input_ids"].tolist() == repeated["input_ids"].tolist() == chats.chat(CHAT)[0]
    assert marked(tokenizer, chat["input_ids"].tolist(), chat["loss_mask"].tolist()) == ["Hello.</s>", "No more  </s>"]
    assert marked(tokenizer, short["input_ids"].tolist(), short["loss_mask"].tolist()) == ["Hello.</s>"]
    assert text["loss_mask"].all()
    assert Manifest.load(peer.directory).loss_mask_of("text") is None

    code, out, _ = hashtap("verify", peer.directory, "--samples", samples, "--tokenizer", tokenizer)
    assert (code, out.splitlines()[0]) == (
        1,
        f"unusable: line 5 of {samples}: turns cannot be told apart: {bad['detail']}",
    )
    assert "4/4 verified" in out

    export = ["export", peer.directory, tmp_path / "out", "--to", "safetensors", "--samples", samples, "--skip-missing"]
    code, _, err = hashtap(*export)
    assert code == 2
    assert "the server's model 'peer' is no directory here: give --tokenizer DIR" in only_line(err)
    assert hashtap(*export, "--tokenizer", tokenizer)[0] == 0
    source = source_of(tmp_path / "out")
    assert [sample.sample_id for sample in source.samples] == ["chat", "short", "text", "again"]
    for at in range(3):
        assert source.token_ids(at).tolist() == dataset[at]["input_ids"].tolist()
    assert source[0]["loss_mask"].tolist() == chat["loss_mask"].tolist()  # type: ignore[union-attr]
    assert source.loss_mask(2) is None


def test_another_template_is_another_prompt(tmp_path: Path, tokenizer: Path, hashtap: Hashtap) -> None:
    samples = tmp_path / "s.jsonl"
    samples.write_text(json.dumps(ROWS[0]) + "\n")
    template = tmp_path / "blocks.jinja"
    template.write_text("Be brief.\n" + BLOCKS)
    with Peer(tmp_path / "captures") as peer:
        command = ["extract", samples, "--server", peer.url, "--out", peer.directory, "--tokenizer", tokenizer]
        assert hashtap(*command)[0] == 0
        code, _, err = hashtap(*command, "--chat-template", template)
    assert code == 2
    assert "take the tokenizer and chat template that were used before" in only_line(err)
    code, out, _ = hashtap(
        "verify", peer.directory, "--samples", samples, "--tokenizer", tokenizer, "--chat-template", template
    )
    assert (code, out.startswith("missing: ")) == (1, True)


@pytest.mark.parametrize("command", ["extract", "verify"])
def test_without_a_tokenizer_nothing_is_sent(tmp_path: Path, command: str, hashtap: Hashtap) -> None:
    samples = tmp_path / "s.jsonl"
    samples.write_text(json.dumps({"input_ids": [1, 2]}) + "\n")
    with Peer(tmp_path / "captures") as peer:
        where = ["--server", peer.url, "--out", peer.directory]
        assert hashtap("extract", samples, *where)[0] == 0
        samples.write_text(json.dumps(ROWS[0]) + "\n")
        arguments = [samples, *where] if command == "extract" else [peer.directory, "--samples", samples]
        code, _, err = hashtap(command, *arguments)
        assert len(peer.received) == 1
    assert code == 2
    assert "the server's model 'peer' is no directory here: give --tokenizer DIR" in only_line(err)
