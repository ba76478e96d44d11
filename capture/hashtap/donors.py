"""Prompts whose rows later prompts may share: a trie over the token ids of what was captured.

With the prefix cache on, the server does not compute the rows that it has cached. A prompt whose first k rows it
leaves out then shares them with a donor, a captured prompt that begins with the same k tokens.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hashtap.flight import Record

__all__ = ["Donors"]

Ids = npt.NDArray[np.int64]

LIMIT_TOKENS = 1 << 26
"""Tokens of the prompts remembered, 8 bytes each: half a GiB. Past it all are forgotten and the trie starts anew."""


@dataclass(slots=True)
class _Node:
    """An edge of the trie: the next tokens of all prompts that pass here."""

    ids: Ids
    record: Record  # one that passes here
    children: "dict[int, _Node]" = field(default_factory=dict)  # by their first token


class Donors:
    """Captured prompts of one epoch, found by their first tokens. Used on the scheduler's thread alone.

    Attributes:
        trusted: whether the server's cache holds rows of this epoch's weights alone; else no donor is found.
    """

    def __init__(self, limit_tokens: int = LIMIT_TOKENS) -> None:
        self._limit_tokens = limit_tokens
        self.trusted = True
        self.clear()

    def clear(self) -> None:
        """Forget all: the weights changed."""
        self._roots: dict[bytes, dict[int, _Node]] = {}  # by salt
        self._tokens = 0

    def add(self, record: Record) -> None:
        """Remember a prompt of which all rows were taken, its own or shared ones."""
        rest, children = record.token_ids, self._roots.setdefault(record.salt, {})
        while len(rest):
            node = children.get(int(rest[0]))
            if node is None:
                if self._tokens + len(rest) > self._limit_tokens:
                    self.clear()
                    rest, children = record.token_ids, self._roots.setdefault(record.salt, {})
                children[int(rest[0])] = _Node(rest, record)
                self._tokens += len(rest)
                return
            common = _common(node.ids, rest)
            if common < len(node.ids):  # split: what follows here belongs to the prompts that came before
                node.children = {int(node.ids[common]): _Node(node.ids[common:], node.record, node.children)}
                node.ids = node.ids[:common]
            if node.record.failed:
                node.record = record
            rest, children = rest[common:], node.children

    def find(self, token_ids: Ids, tokens: int, salt: bytes = b"") -> Record | None:
        """A captured prompt with the same first ``tokens`` tokens as ``token_ids``; None when there is none."""
        rest, children = token_ids[:tokens], self._roots.get(salt, {}) if self.trusted else {}
        node = None
        while len(rest):
            node = children.get(int(rest[0]))
            if node is None or _common(node.ids, rest) < min(len(node.ids), len(rest)):
                return None
            rest, children = rest[len(node.ids) :], node.children
        return None if node is None or node.record.failed else node.record


def _common(one: Ids, other: Ids) -> int:
    """How many tokens both begin with."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length
