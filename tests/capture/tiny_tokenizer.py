"""Tiny byte-level tokenizers of transformers, as directories: an id for each byte, and some of more than one."""

from pathlib import Path

__all__ = ["BLOCKS", "PLAIN", "WITH_BOS", "make_tokenizer"]

SPECIAL = ["<unk>", "<s>", "</s>"]

PLAIN = (
    "{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
"""Without BOS, and without generation blocks."""

WITH_BOS = "{{ bos_token }}" + PLAIN

BLOCKS = (
    "{% for m in messages %}[{{ m['role'] }}]\n{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}</s>"
    "{% endgeneration %}{% else %}{{ m['content'] }}</s>{% endif %}{{ '\\n' }}{% endfor %}"
)


def make_tokenizer(path: Path, template: str | None = PLAIN, *, adds_bos: bool = False) -> Path:
    """A tokenizer in ``path``: ids 0 to 2 are ``<unk> <s> </s>``, then the bytes, then ``\\n\\n``; all are below 300.

    Args:
        path: made by it.
        template: of chats.
        adds_bos: whether it puts ``<s>`` before a text by itself.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    newline = "Ċ"  # how byte-level BPE spells it
    letters = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), newline * 2]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(newline, newline)], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )
    fast.save_pretrained(path)
    return path
