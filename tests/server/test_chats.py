"""A chat from its messages to its states, on a real server whose own tokenizer and model path are used."""

import json
from pathlib import Path

import pytest
from tests.server.cli import run_hashtap
from tests.server.conftest import Served

from hashtap.datasets import CaptureDataset
from hashtap.reader import Reader

pytestmark = [pytest.mark.server, pytest.mark.slow]

TEMPLATE = (
    "{{ bos_token }} {% for m in messages %}{{ m.role }} {{ m.content }} "
    "{% if m.role == 'assistant' %}</s> {% endif %}{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


def test_a_chat_end_to_end(llama: Served, tmp_path: Path) -> None:
    template, samples = tmp_path / "chat.jinja", tmp_path / "chats.jsonl"
    template.write_text(TEMPLATE)
    chat = [("user", "t5 t6"), ("assistant", "t7"), ("user", "t8"), ("assistant", "t9 t10")]
    row = {"id": "chat-1", "messages": [{"role": role, "content": content} for role, content in chat]}
    samples.write_text(json.dumps(row) + "\n")

    answer = run_hashtap(
        "extract", samples, "--server", llama.server.url, "--out", llama.captures, "--chat-template", template
    )
    assert (answer["captured"], answer["sent"]) == (1, 1)
    report = run_hashtap("verify", llama.captures, "--samples", samples, "--chat-template", template)
    assert (report["verified"], report["samples"]) == (1, 1)

    # <s> is written by the template; a role is no word of this model, so it is <unk>.
    ids = [1, 0, 5, 6, 0, 7, 2, 0, 8, 0, 9, 10, 2]
    assert Reader(llama.captures).by_sample_id("chat-1").token_ids.tolist() == ids
    (sample,) = CaptureDataset(llama.captures, sample_ids=["chat-1"])  # type: ignore[misc]
    assert sample["loss_mask"].int().tolist() == [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
