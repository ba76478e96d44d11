"""Texts and chats to ids: BOS exactly once, and a mask of what the assistant wrote and nothing else."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests import models
from tests.capture.tiny_tokenizer import BLOCKS, PLAIN, WITH_BOS, make_tokenizer

from hashtap.chat import ChatTokenizer
from hashtap.errors import UsageError
from hashtap.loaded_tokenizer import Job, Untokenised
from hashtap.together import together

BOS, EOS = 1, 2
CHAT = [
    {"role": "user", "content": "Hi é"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "No more  "},
]
AS_TEXT = "[user]\nHi é</s>\n[assistant]\nHello.</s>\n[user]\nAnd?</s>\n[assistant]\nNo more  </s>\n"


def plain_ids(path: Path, text: str) -> list[int]:
    """By the library that is below transformers, without anything added."""
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_file(str(path / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    return ids


def marked(path: Path, ids: list[int], mask: list[int]) -> list[str]:
    """The texts of the stretches that the mask marks."""
    from tokenizers import Tokenizer

    decode = Tokenizer.from_file(str(path / "tokenizer.json")).decode
    stretches: list[list[int]] = [[]]
    for token, bit in zip(ids, mask, strict=True):
        if bit:
            stretches[-1].append(token)
        elif stretches[-1]:
            stretches.append([])
    return [decode(stretch, skip_special_tokens=False) for stretch in stretches if stretch]


@pytest.mark.parametrize("adds_bos", [False, True], ids=["tokenizer adds none", "tokenizer adds BOS"])
@pytest.mark.parametrize("template", [PLAIN, WITH_BOS, BLOCKS, "{{ bos_token }}" + BLOCKS])
def test_the_template_alone_decides_about_bos(tmp_path: Path, template: str, adds_bos: bool) -> None:
    """As a server's chat route has it: what it serves is what must be captured."""
    from transformers import AutoTokenizer

    path = make_tokenizer(tmp_path / "t", template, adds_bos=adds_bos)
    ids, mask = ChatTokenizer(str(path)).chat(CHAT)
    lead = [BOS] if "bos_token" in template else []
    assert ids == lead + plain_ids(path, AS_TEXT)
    served = AutoTokenizer.from_pretrained(path).apply_chat_template(CHAT, return_dict=False)
    assert ids == served
    assert marked(path, ids, mask) == ["Hello.</s>", "No more  </s>"]


@pytest.mark.parametrize(
    ("adds_bos", "text", "lead"),
    [
        (True, "some text", [BOS]),
        (True, "<s>some text", []),
        (True, "<s><s>some text", []),
        (False, "some text", []),
        (False, "<s>some text", []),
        (True, "", [BOS]),
    ],
)
def test_a_text_has_its_bos_once(tmp_path: Path, adds_bos: bool, text: str, lead: list[int]) -> None:
    """What the text itself says is never added to, nor taken away."""
    path = make_tokenizer(tmp_path / "t", adds_bos=adds_bos)
    assert ChatTokenizer(str(path)).text(text) == lead + plain_ids(path, text)


def test_a_turn_ends_with_its_last_eos_or_with_all_that_is_written(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "t", PLAIN.replace("</s>", "|"))
    ids, mask = ChatTokenizer(str(path)).chat(CHAT)
    assert marked(path, ids, mask) == ["Hello.|\n", "No more  |\n"]


def test_a_chat_without_an_assistant_marks_nothing(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "t")
    ids, mask = ChatTokenizer(str(path)).chat(CHAT[:1])
    assert (ids, mask) == (plain_ids(path, "[user]\nHi é</s>\n"), [0] * len(ids))


LAST_TURN_ONLY = PLAIN.replace(
    "{{ m['content'] }}", "{{ m['content'] if loop.last or m['role'] == 'user' else m['content'] | upper }}"
)


@pytest.mark.parametrize(
    ("template", "chat", "reason", "detail"),
    [
        # The newline of the generation prompt and the reply's own become one token.
        (PLAIN, [CHAT[0], {"role": "assistant", "content": "\nHello"}], "turns cannot", "before message 1"),
        # As templates do that leave out the thoughts of all turns but the last.
        (LAST_TURN_ONLY, CHAT, "turns cannot be told apart", "up to message 1 is no prefix"),
        (PLAIN, CHAT[1:], "chat template failed", "empty conversation"),
        ("{{ raise_exception('roles must alternate') }}", CHAT, "chat template failed", "roles must alternate"),
        ("{% for m in messages %}{{ m.content + 1 }}{% endfor %}", CHAT, "chat template failed", "TypeError"),
    ],
)
def test_a_chat_without_ids_or_mask_is_refused(
    tmp_path: Path, template: str, chat: list[dict[str, str]], reason: str, detail: str
) -> None:
    path = make_tokenizer(tmp_path / "t", template)
    with pytest.raises(Untokenised, match=reason) as refusal:
        ChatTokenizer(str(path)).chat(chat)
    assert detail in refusal.value.detail


def test_generation_blocks_serve_where_prefixes_cannot(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "t")
    template = tmp_path / "blocks.jinja"
    template.write_text(BLOCKS)
    tokenizer = ChatTokenizer(str(path), chat_template=template)
    ids, mask = tokenizer.chat([{"role": "assistant", "content": "\nHello"}, CHAT[0], CHAT[1]])
    assert marked(path, ids, mask) == ["\n\nHello</s>", "Hello.</s>"]


AT_MOST_SIX = "{% if messages | length < 7 %}" + PLAIN + "{% else %}{{ raise_exception('too many') }}{% endif %}"


@pytest.mark.parametrize("width", [1, 3, 64])
@pytest.mark.parametrize(("template", "refused"), [(AT_MOST_SIX, [3, 4, 6, 7, 9]), (BLOCKS, [6, 7, 9])])
def test_many_side_by_side_are_what_each_is_alone(
    tmp_path: Path, template: str, refused: list[int], width: int
) -> None:
    """Chats of any number of turns, with and without blocks; some are refused, at their beginning or later."""
    chats = [CHAT, CHAT[:1], CHAT[:2], [*CHAT, {"role": "assistant", "content": "\nNo prefix"}], CHAT + CHAT, CHAT[2:]]
    chats += [[{"role": "user", "content": "\ud800"}], [CHAT[0], {"role": "assistant", "content": "\ud800"}], CHAT]
    tokenizer = ChatTokenizer(str(make_tokenizer(tmp_path / "t", template, adds_bos=True)))

    def outcome(job: Job[Any]) -> Job[Any]:
        try:
            return (yield from job)
        except Untokenised as refusal:
            return refusal.reason, refusal.detail

    def jobs() -> list[Job[Any]]:
        chatting = map(tokenizer.chat_job, chats)
        return [outcome(job) for job in (*chatting, tokenizer.text_job("a\ud800"), tokenizer.text_job("Nobody"))]

    alone = [result for job in jobs() for result in together([job], tokenizer.encode, 1)]
    assert list(together(jobs(), tokenizer.encode, width)) == alone
    assert [number for number, result in enumerate(alone) if isinstance(result[0], str)] == refused


def test_tools_reach_the_template(tmp_path: Path) -> None:
    template = "{% for tool in tools or [] %}<{{ tool['function']['name'] }}>{% endfor %}" + PLAIN
    path = make_tokenizer(tmp_path / "t", template)
    tools = [{"type": "function", "function": {"name": "look"}}]
    ids, mask = ChatTokenizer(str(path)).chat(CHAT, tools)
    assert ids == plain_ids(path, "<look>" + AS_TEXT)
    assert marked(path, ids, mask) == ["Hello.</s>", "No more  </s>"]


def test_a_tokenizer_that_drops_characters_is_masked_by_prefixes(tmp_path: Path) -> None:
    """Its characters do not lead to tokens: a block that ends in a dropped one would mark all the rest."""
    path = models.llama()  # splits words at spaces, and drops these
    template = tmp_path / "blocks.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} {% endgeneration %}"
        "{% else %}{{ m.content }} {% endif %}{% endfor %}"
    )
    chat = [("user", "t5 t6"), ("assistant", "t7"), ("assistant", "t9"), ("user", "t5"), ("assistant", "t7 t8")]
    tokenizer = ChatTokenizer(str(path), chat_template=template)
    ids, mask = tokenizer.chat([{"role": role, "content": content} for role, content in chat])
    assert ids == [5, 6, 7, 9, 5, 7, 8]
    assert mask == [0, 0, 1, 1, 0, 1, 1]


def test_the_models_directory_is_the_default(tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "t")
    other = make_tokenizer(tmp_path / "o", adds_bos=True)
    assert ChatTokenizer().for_model(str(path)).text("a") == plain_ids(path, "a")
    assert ChatTokenizer(str(other)).for_model(str(path)).text("a") == [BOS, *plain_ids(path, "a")]
    with pytest.raises(UsageError, match=r"model 'org/name' is no directory here: give --tokenizer DIR"):
        ChatTokenizer().for_model("org/name").text("a")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("none", {}, "cannot load a tokenizer from"),
        ("t", {"chat_template": Path("none.jinja")}, "cannot read the chat template none.jinja"),
        ("bare", {}, "has no chat template: give --chat-template FILE"),
    ],
)
def test_what_cannot_be_loaded(tmp_path: Path, name: str, options: dict[str, Any], message: str) -> None:
    make_tokenizer(tmp_path / "t")
    make_tokenizer(tmp_path / "bare", None)
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match=message):
        ChatTokenizer(str(tmp_path / name), **options).chat(CHAT)


@pytest.mark.parametrize("missing", ["transformers", "jinja2"])
def test_without_its_libraries_it_says_what_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from hashtap.chat import ChatTokenizer as C; C('x').text('a')"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"messages and text need {missing}: pip install transformers jinja2" in answer.stderr


@pytest.mark.slow
def test_smollm2_writes_its_own_chats() -> None:
    path = models.smollm2()
    tokenizer = ChatTokenizer(str(path))
    ids, mask = tokenizer.chat(CHAT)
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT)
    assert ids == plain_ids(path, system + turns)
    assert marked(path, ids, mask) == ["Hello.<|im_end|>", "No more  <|im_end|>"]
    assert tokenizer.text("some text") == plain_ids(path, "some text")
