import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.capture.build import Host, states_of
from torch.utils.data import DataLoader

from hashtap.collate import Batch, Sample, pack, pad_left, pad_right
from hashtap.datasets import CaptureDataset, CaptureStream
from hashtap.errors import MismatchError, UsageError
from hashtap.identity import prompt_key
from hashtap.manifest import Manifest
from hashtap.samples import Sample as ListedSample

PROMPTS = [[n + 1, *range(length - 1)] for n, length in enumerate([3, 300, 1, 17, 256, 5, 64, 2, 40, 7, 11])]
MASK = [1, 0, 1, 1, 0]  # of the sixth


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("captures")
    with Host(path, threads=1) as host:
        host.capture(PROMPTS)
    return path


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a manifest: s0 … s10, s11 with the prompt of s3, s12 which was not captured."""
    path = tmp_path_factory.mktemp("named")
    with Host(path, threads=1) as host:
        host.capture(PROMPTS)
    prompts = [*PROMPTS, PROMPTS[3], [99]]
    samples = [
        ListedSample(f"s{n}", n, prompt_key(ids), np.array(ids, np.int32), np.array(MASK, np.uint8) if n == 5 else None)
        for n, ids in enumerate(prompts)
    ]
    Manifest.merge(path, samples, epoch="weights-1", directory_uuid=host.directory.uuid)
    return path


def assert_sample(sample: Sample, ids: list[int]) -> None:
    assert sample["input_ids"].tolist() == ids
    assert sample["hidden_states"].dtype == torch.bfloat16
    assert (sample["hidden_states"].view(torch.int16).numpy().view(np.uint16) == states_of(ids)).all()


def test_without_a_manifest(path: Path) -> None:
    dataset = CaptureDataset(path)
    assert dataset.lengths.tolist() == [len(ids) for ids in PROMPTS]
    for n, ids in enumerate(PROMPTS):
        sample = dataset[n]
        assert_sample(sample, ids)
        assert sample["sample_id"] == prompt_key(ids).hex()
        assert sample["loss_mask"].tolist() == [True] * len(ids)
    with pytest.raises(IndexError):
        dataset[len(PROMPTS)]


def test_with_a_manifest(named: Path) -> None:
    dataset = CaptureDataset(named)
    assert (len(dataset), dataset.missing) == (12, 1)
    assert [dataset[n]["sample_id"] for n in range(12)] == [f"s{n}" for n in range(12)]
    assert_sample(dataset[11], PROMPTS[3])
    assert dataset[5]["loss_mask"].tolist() == [bool(bit) for bit in MASK]
    some = CaptureDataset(named, sample_ids=["s7", "s12", "s2"])
    assert [some[n]["sample_id"] for n in range(len(some))] == ["s7", "s2"]
    assert some.missing == 1


def test_what_cannot_be_a_dataset(path: Path, named: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="names no sample 'nobody'"):
        CaptureDataset(named, sample_ids=["s1", "nobody"])
    with pytest.raises(UsageError, match="there is no manifest"):
        CaptureDataset(path, sample_ids=["s1"])
    for epoch in ("a", "b"):
        with Host(tmp_path, changes={"epoch": epoch}) as host:
            host.capture([[1, 2, 3]])
    with pytest.raises(MismatchError, match="choose one with epoch="):
        CaptureDataset(tmp_path)
    assert len(CaptureDataset(tmp_path, epoch="b")) == 1


def test_in_another_process(path: Path) -> None:
    dataset = pickle.loads(pickle.dumps(CaptureDataset(path)))
    assert_sample(dataset[4], PROMPTS[4])
    loader = DataLoader(dataset, batch_size=4, num_workers=2, collate_fn=pad_right, multiprocessing_context="fork")
    assert [ids for batch in loader for ids in rows_of(batch)] == PROMPTS


def test_other_weights_that_come_later(tmp_path: Path) -> None:
    """Where the same prompts are captured anew, a worker that opens the directory reads what the dataset has."""
    with Host(tmp_path, threads=1) as host:
        host.capture(PROMPTS)
    dataset = CaptureDataset(tmp_path)
    with Host(tmp_path, threads=1, changes={"epoch": "weights-2"}) as host:
        host.capture(PROMPTS)
    loader = DataLoader(dataset, batch_size=4, num_workers=1, collate_fn=pad_right, multiprocessing_context="spawn")
    assert [ids for batch in loader for ids in rows_of(batch)] == PROMPTS
    dataset.reader.refresh()
    assert_sample(dataset[4], PROMPTS[4])
    assert pickle.loads(pickle.dumps(dataset)).reader.epochs == ["weights-1"]


# Collation.


def rows_of(batch: Batch) -> list[list[int]]:
    """The token ids that the batch's mask selects, sample by sample."""
    return [row[mask].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]


@pytest.mark.parametrize("pad", [pad_right, pad_left])
def test_padding_on_either_side(named: Path, pad: Callable[[Sequence[Sample]], Batch]) -> None:
    """The masks select exactly the real rows, beginning and end included; all else is zero."""
    dataset = CaptureDataset(named)
    chosen = [0, 5, 2, 6]
    batch = pad([dataset[n] for n in chosen])
    assert batch["hidden_states"].shape == (4, 64, 4, 72)
    assert rows_of(batch) == [PROMPTS[n] for n in chosen]
    for row, n in enumerate(chosen):
        length, mask = len(PROMPTS[n]), batch["attention_mask"][row]
        begin = 64 - length if pad is pad_left else 0
        assert mask.nonzero().flatten().tolist() == list(range(begin, begin + length))
        real = batch["hidden_states"][row][mask].view(torch.int16).numpy().view(np.uint16)
        assert (real == states_of(PROMPTS[n])).all()
        assert not batch["hidden_states"][row][~mask].any()
        assert not batch["input_ids"][row][~mask].any()
        assert batch["position_ids"][row][mask].tolist() == list(range(length))
    masks = [row[mask].tolist() for row, mask in zip(batch["loss_mask"], batch["attention_mask"], strict=True)]
    assert masks == [[True] * 3, [bool(bit) for bit in MASK], [True], [True] * 64]
    assert not batch["loss_mask"][~batch["attention_mask"]].any()
    assert batch["lengths"].tolist() == [3, 5, 1, 64]
    assert batch["sample_ids"] == ["s0", "s5", "s2", "s6"]


def test_packing(named: Path) -> None:
    dataset = CaptureDataset(named)
    chosen = [5, 2, 3]
    batch = pack([dataset[n] for n in chosen])
    assert batch["cu_seqlens"].tolist() == [0, 5, 6, 23]
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["input_ids"].tolist() == [token for n in chosen for token in PROMPTS[n]]
    assert batch["position_ids"].tolist() == [*range(5), 0, *range(17)]
    assert batch["loss_mask"].tolist() == [bool(bit) for bit in MASK] + [True] * 18
    states = batch["hidden_states"].view(torch.int16).numpy().view(np.uint16)
    assert (states == np.concatenate([states_of(PROMPTS[n]) for n in chosen])).all()


def test_no_batch_of_nothing() -> None:
    for collate in (pad_right, pad_left, pack):
        with pytest.raises(ValueError, match="no samples"):
            collate([])


# Streams.


def stream(path: Path, rank: int = 0, world_size: int = 1, **options: object) -> CaptureStream:
    settings: dict[str, object] = {"batch_size": 2, **options}
    return CaptureStream(CaptureDataset(path), rank=rank, world_size=world_size, **settings)  # type: ignore[arg-type]


def ids_of(batches: object) -> list[list[str]]:
    return [batch["sample_ids"] for batch in batches]  # type: ignore[attr-defined]


def flat(batches: list[list[str]]) -> list[str]:
    return [name for batch in batches for name in batch]


def loader(source: CaptureStream, workers: int, **options: object) -> DataLoader[Batch]:
    context = "fork" if workers else None
    return DataLoader(
        source,
        batch_size=None,
        num_workers=workers,
        multiprocessing_context=context,
        **options,  # type: ignore[arg-type]
    )


def test_a_pass_has_every_sample_once(named: Path) -> None:
    source = stream(named, batch_size=5)
    found = ids_of(source)
    assert [len(batch) for batch in found] == [5, 5, 2]
    assert sorted(flat(found)) == sorted(f"s{n}" for n in range(12))
    assert len(source) == 3
    assert ids_of(source) == found
    source.set_pass(1)
    other = ids_of(source)
    assert other != found
    assert sorted(flat(other)) == sorted(flat(found))
    assert ids_of(stream(named, batch_size=5, seed=1)) != found
    assert flat(ids_of(stream(named, batch_size=5, shuffle=False))) == [f"s{n}" for n in range(12)]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_ranks_and_workers_share_a_pass(named: Path, workers: int) -> None:
    """The same batches for each rank whatever the number of workers, and no sample twice."""
    whole = ids_of(stream(named))
    parts = [ids_of(loader(stream(named, rank, 2), workers)) for rank in range(2)]
    assert parts == [whole[0::2], whole[1::2]]


def test_all_ranks_get_equally_many(named: Path) -> None:
    parts = [ids_of(stream(named, rank, 4)) for rank in range(4)]
    assert [len(part) for part in parts] == [1] * 4
    assert sorted(batch for part in parts for batch in part) == sorted(ids_of(stream(named))[:4])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("done", [0, 1, 3, 5])
def test_going_on_after_a_batch(named: Path, workers: int, done: int) -> None:
    """With another number of workers, and into the next pass."""
    source = stream(named)
    source.set_pass(3)
    batches = list(source)
    resumed = stream(named)
    resumed.load_state_dict(batches[done]["state"])
    resumed.set_pass(3)
    assert ids_of(loader(resumed, workers)) == ids_of(batches[done + 1 :])
    for number in (4, 3):
        source.set_pass(number)
        resumed.set_pass(number)
        assert ids_of(resumed) == ids_of(source)


def test_workers_that_live_on_see_the_next_pass(named: Path) -> None:
    source = stream(named)
    living = loader(source, 2, persistent_workers=True)
    for number in (0, 1):
        source.set_pass(number)
        expected = stream(named)
        expected.set_pass(number)
        assert ids_of(living) == ids_of(expected)


def test_as_many_as_fit(named: Path) -> None:
    source = stream(named, batch_size=None, max_tokens=70, collate=pack, shuffle=False)
    batches = list(source)
    assert [batch["lengths"].tolist() for batch in batches] == [
        [3],
        [300],
        [1, 17],
        [256],
        [5, 64],
        [2, 40, 7, 11],
        [17],
    ]
    assert batches[4]["cu_seqlens"].tolist() == [0, 5, 69]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": None}, "either batch_size or max_tokens"),
        ({"max_tokens": 5}, "either batch_size or max_tokens"),
        ({"batch_size": 0}, "a batch of 0 is empty"),
        ({"rank": 2, "world_size": 2}, "rank 2 is not one of 2"),
    ],
)
def test_bad_options(path: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        stream(path, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 5}, "seed 0, here 5"),
        ({"batch_size": 3}, "batch_size 2, here 3"),
        ({"batch_size": None, "max_tokens": 600}, "batch_size 2, here None, max_tokens None, here 600"),
        ({"world_size": 2}, "world_size 1, here 2"),
        ({"shuffle": False}, "shuffle True, here False, seed 0, here None"),
    ],
)
def test_a_state_of_another_order(path: Path, changes: dict[str, Any], message: str) -> None:
    state = json.loads(json.dumps(next(iter(stream(path)))["state"]))
    with pytest.raises(UsageError, match=rf"another order of batches: {message}\. Make .* with set_pass\(1\)"):
        stream(path, **changes).load_state_dict(state)


def test_going_on_beside_samples_that_were_sealed_since(tmp_path: Path) -> None:
    """They would move all others; where the order is the same, more shards and other file names change nothing."""
    listed = [ListedSample(f"s{n}", n, prompt_key(ids), np.array(ids, np.int32), None) for n, ids in enumerate(PROMPTS)]
    with Host(tmp_path, threads=1) as host:
        host.capture(PROMPTS[:8])
    Manifest.merge(tmp_path, listed, epoch="weights-1", directory_uuid=host.directory.uuid)
    batches = list(stream(tmp_path))
    with Host(tmp_path, threads=1) as host:
        host.capture(PROMPTS[5:])
    with pytest.raises(
        UsageError, match=r"order of batches: samples 8, here 11, digest '\w{16}', here '\w{16}'\. Make"
    ):
        stream(tmp_path).load_state_dict(batches[1]["state"])
    as_it_was = CaptureDataset(tmp_path, sample_ids=[f"s{n}" for n in range(8)])
    resumed = CaptureStream(as_it_was, batch_size=2, rank=0, world_size=1)
    resumed.load_state_dict(batches[1]["state"])
    assert ids_of(resumed) == ids_of(batches[2:])
    turned = CaptureDataset(tmp_path, sample_ids=[f"s{n}" for n in reversed(range(8))])
    with pytest.raises(UsageError, match=r"order of batches: digest '\w{16}', here '\w{16}'\. Make"):
        CaptureStream(turned, batch_size=2, rank=0, world_size=1).load_state_dict(batches[1]["state"])


def test_a_seed_of_what_is_not_shuffled(path: Path) -> None:
    batches = list(stream(path, shuffle=False, seed=1))
    resumed = stream(path, shuffle=False, seed=2)
    resumed.load_state_dict(batches[0]["state"])
    assert ids_of(resumed) == ids_of(batches[1:])


def test_nothing_captured(tmp_path: Path) -> None:
    Host(tmp_path).writer.close()
    dataset = CaptureDataset(tmp_path)
    assert len(dataset) == 0
    assert list(CaptureStream(dataset, batch_size=3)) == []
