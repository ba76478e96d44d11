"""AngelSlim's own offline dataset and collator on captures: run by ``make test-trainers``.

angelslim 0.5.0 cannot be imported as a whole, its wheel lacks ``angelslim/compressor/qat``. Empty packages with the
real paths stand in for the parents of its reader, so that the reader's own modules are loaded as they are.
"""

import importlib
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("angelslim") is None:
    pytest.skip("angelslim is not in this environment", allow_module_level=True)

import torch
from tests.trainers.proofs import CAPTURES, MASK, Read, assert_layers, assert_slots
from tests.trainers.smollm2 import HIDDEN, SAMPLES

from hashtap.trainers.angelslim import CapturedDataset
from hashtap.trainers.export import export
from hashtap.trainers.source import TrainerSource

pytestmark = [pytest.mark.trainer, pytest.mark.filterwarnings("default")]
READER = "angelslim.compressor.speculative.train.data.dataset_builder.offline_dataset_builder"


@pytest.fixture(scope="module")
def reader() -> Any:
    """The module of its offline dataset."""
    parts = READER.split(".")
    spec = importlib.util.find_spec("angelslim")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    place = Path(spec.submodule_search_locations[0])
    for depth in range(1, len(parts)):
        package = types.ModuleType(".".join(parts[:depth]))
        package.__path__ = [str(place.joinpath(*parts[1:depth]))]
        sys.modules[package.__name__] = package
    return importlib.import_module(READER)


@pytest.mark.parametrize("form", ["files", "shards"])
def test_every_slot_through_its_dataset_and_collator(tmp_path: Path, reader: Any, form: str) -> None:
    source = TrainerSource(CAPTURES / "post", "angelslim")
    if form == "files":
        export(source, tmp_path)
        dataset = reader.OfflineEagle3Dataset(str(tmp_path))
    else:
        dataset = CapturedDataset(source)
    assert len(dataset) == SAMPLES
    collate = reader.DataCollatorWithPadding()
    for index in range(SAMPLES):
        batch = collate([dataset[index]])
        assert torch.equal(batch["attention_mask"], torch.ones_like(batch["input_ids"]))
        sample = Read(
            f"text-{index}",
            list(batch["hidden_states"][0].split(HIDDEN, dim=-1)),
            batch["target_hiddens"][0],
            batch["input_ids"][0],
            batch["loss_mask"].flatten(),
        )
        assert_slots(sample, "post", MASK)
        if index < 4:
            assert_layers(sample, [1, 14, 26], added=1)
