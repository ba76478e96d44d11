"""A prompt's key and proof, ns a token of a prompt of 8,192."""

from hashlib import blake2b
from typing import Any

import numpy as np

from hashtap import prompt_key
from hashtap_kernels.proof import add_proofs, prompt_proof

TOKENS = 8192
TIMES = 50  # in a round
SEED = (0x0123456789ABCDEF, 0xFEDCBA9876543210)
IDS = np.random.default_rng(0).integers(0, 150_000, TOKENS)


def test_prompt_key(beside: Any) -> None:
    assert prompt_key([1, 2, 3]).hex() == "e124a9e6918ab6adce4b6d23af2af3aa"
    assert prompt_key(IDS) == prompt_key(IDS.tolist()) != prompt_key(IDS[::-1])
    beside(
        lambda: [prompt_key(IDS) for _ in range(TIMES)],
        "hash alone",
        lambda: [blake2b(IDS.data, digest_size=16).digest() for _ in range(TIMES)],
        token=TOKENS * TIMES,
    )


def test_prompt_proof(beside: Any) -> None:
    whole = prompt_proof(IDS, 0, SEED)
    assert whole == add_proofs(prompt_proof(IDS[:1000], 0, SEED), prompt_proof(IDS[1000:], 1000, SEED))
    assert whole != prompt_proof(IDS[::-1], 0, SEED)
    copy = np.empty_like(IDS)
    beside(
        lambda: [prompt_proof(IDS, 0, SEED) for _ in range(TIMES)],
        "memcpy",
        lambda: [np.copyto(copy, IDS) for _ in range(TIMES)],
        token=TOKENS * TIMES,
    )
