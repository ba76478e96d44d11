"""SpecForge's own offline reader, feature store, normaliser and collator on captures: run by ``make test-trainers``."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("specforge", reason="specforge is not in this environment", exc_type=ImportError)

import torch
from specforge.algorithms.eagle3.data import build_offline_collator, build_offline_normalizer, build_offline_reader
from specforge.runtime.data_plane.feature_store import LocalFeatureStore
from tests.trainers.proofs import CAPTURES, MASK, Read, assert_layers, assert_slots
from tests.trainers.smollm2 import HIDDEN, SAMPLES, TOKENS

from hashtap.errors import UsageError
from hashtap.trainers.export import export
from hashtap.trainers.source import TrainerSource
from hashtap.trainers.specforge import CapturedStore

pytestmark = [pytest.mark.trainer, pytest.mark.filterwarnings("default")]


def read(store: Any, refs: list[Any]) -> list[Read]:
    """All samples, as its loader takes them. Nothing is shifted; the last token's mask is cleared."""
    normalize = build_offline_normalizer(TOKENS)
    collate = build_offline_collator()
    reads = []
    for index, ref in enumerate(refs):
        tensors, handle = store.get(ref)
        batch = collate([normalize(tensors)])
        store.release(handle)
        reads.append(
            Read(
                f"text-{index}",
                list(batch["hidden_state"][0].split(HIDDEN, dim=-1)),
                batch["target"][0],
                batch["input_ids"][0],
                batch["loss_mask"].flatten(),
            )
        )
    return reads


@pytest.mark.parametrize("form", ["files", "shards"])
def test_every_slot_through_its_reader_and_collator(tmp_path: Path, form: str) -> None:
    source = TrainerSource(CAPTURES / "post", "specforge")
    if form == "files":
        export(source, tmp_path)
        store: Any = LocalFeatureStore()
        refs = build_offline_reader(str(tmp_path), run_id="r", ttt_length=3, max_len=TOKENS).read()
    else:
        store = CapturedStore(source)
        refs = store.refs(run_id="r", ttt_length=3, max_len=TOKENS)
    assert len(refs) == SAMPLES
    reads = read(store, refs)
    for sample in reads:
        assert_slots(sample, "post", [*MASK[:-1], 0])
    for sample in reads[:4]:
        assert_layers(sample, [1, 14, 26], added=1)


def test_references_are_those_of_its_own_reader(tmp_path: Path) -> None:
    """But for where the sample lies and how long it is."""
    source = TrainerSource(CAPTURES / "post", "specforge")
    export(source, tmp_path)
    own = build_offline_reader(str(tmp_path), run_id="r", ttt_length=3, max_len=TOKENS).read()
    for mine, theirs in zip(CapturedStore(source).refs(run_id="r", ttt_length=3, max_len=TOKENS), own, strict=True):
        for name in set(theirs.__dataclass_fields__) - {"feature_store_uri", "num_tokens"}:
            assert getattr(mine, name) == getattr(theirs, name), name


def test_it_reads_the_state_after_the_norm() -> None:
    with pytest.raises(UsageError, match="reads the final state after the final norm"):
        TrainerSource(CAPTURES / "pre", "specforge")


def test_a_store_that_is_read_only() -> None:
    store = CapturedStore(TrainerSource(CAPTURES / "post", "specforge"))
    with pytest.raises(UsageError):
        store.put({"input_ids": torch.zeros(1)}, sample_id="x", metadata={})
    assert store.health()["release_pending"] == 0
