"""The manifest: names, keys and loss masks survive merging, damage and two clients at once."""

import multiprocessing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hashtap.errors import FormatError, MismatchError, UsageError
from hashtap.identity import prompt_key
from hashtap.manifest import MANIFEST_NAME, Manifest, ManifestRow
from hashtap.samples import Sample

UUID = "0c0ffee0" * 4


def sample(sample_id: str, token_ids: list[int], loss_mask: list[int] | None = None) -> Sample:
    mask = None if loss_mask is None else np.array(loss_mask, np.uint8)
    return Sample(sample_id, 1, prompt_key(token_ids), np.array(token_ids, np.int32), mask)


def merge(directory: Path, *samples: Sample, epoch: str = "e1") -> Manifest:
    return Manifest.merge(directory, samples, epoch=epoch, directory_uuid=UUID)


def mask_of(manifest: Manifest, sample_id: str) -> list[int] | None:
    mask = manifest.loss_mask_of(sample_id)
    return None if mask is None else mask.tolist()


def test_what_was_merged_is_loaded(tmp_path: Path) -> None:
    merge(tmp_path, sample("s-10", [1, 2, 3], [0, 1, 1]), sample("s-2", [4]), sample("same", [1, 2, 3]))

    manifest = Manifest.load(tmp_path)

    key, other = prompt_key([1, 2, 3]), prompt_key([4])
    rows = [ManifestRow("s-10", key, "e1", 3), ManifestRow("s-2", other, "e1", 1), ManifestRow("same", key, "e1", 3)]
    assert list(manifest) == rows
    assert len(manifest) == 3
    assert manifest.key_of("s-2") == other
    assert manifest.epoch_of("s-2") == "e1"
    assert manifest.sample_ids_of(key) == ["s-10", "same"]
    assert manifest.sample_ids_of(prompt_key([5])) == []
    assert mask_of(manifest, "s-10") == [0, 1, 1]
    assert mask_of(manifest, "s-2") is None
    assert "s-2" in manifest
    assert "s-3" not in manifest
    assert manifest.directory_uuid == UUID


def test_unknown_ids_are_key_errors(tmp_path: Path) -> None:
    manifest = merge(tmp_path, sample("a", [1]))
    for lookup in (manifest.key_of, manifest.epoch_of, manifest.loss_mask_of):
        with pytest.raises(KeyError, match="unknown"):
            lookup("unknown")


def test_a_directory_without_manifest_has_an_empty_one(tmp_path: Path) -> None:
    manifest = Manifest.load(tmp_path)
    assert list(manifest) == []
    assert manifest.directory_uuid == ""


def test_merging_keeps_what_is_there_and_renews_what_comes_again(tmp_path: Path) -> None:
    merge(tmp_path, sample("a", [1], [0]), sample("b", [2], [1]), sample("c", [3], [1]))
    merge(tmp_path, sample("d", [4]), sample("b", [2], [0]), sample("a", [1]), epoch="e2")

    manifest = Manifest.load(tmp_path)

    assert [(row.sample_id, row.epoch) for row in manifest] == [("a", "e2"), ("b", "e2"), ("c", "e1"), ("d", "e2")]
    assert [mask_of(manifest, sample_id) for sample_id in "abcd"] == [None, [0], [1], None]


def test_an_id_with_another_prompt_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    merge(tmp_path, sample("a", [1]))
    before = (tmp_path / MANIFEST_NAME).read_bytes()
    with pytest.raises(UsageError, match=r"'a'.*another prompt"):
        merge(tmp_path, sample("new", [7]), sample("a", [2]))
    assert (tmp_path / MANIFEST_NAME).read_bytes() == before


def test_another_capture_directory_is_refused(tmp_path: Path) -> None:
    merge(tmp_path, sample("a", [1]))
    with pytest.raises(MismatchError, match="belongs to the capture directory 0c0ffee0"):
        Manifest.merge(tmp_path, [sample("a", [1])], epoch="e1", directory_uuid="f" * 32)


@pytest.mark.parametrize("kept", [0, 1, 0.5, -1], ids=["empty", "one byte", "half", "all but one byte"])
def test_a_damaged_manifest_is_named(tmp_path: Path, kept: float) -> None:
    merge(tmp_path, *(sample(str(number), [number], [1]) for number in range(100)))
    path = tmp_path / MANIFEST_NAME
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if kept == 0.5 else int(kept)])
    with pytest.raises(FormatError, match=r"manifest\.parquet"):
        Manifest.load(tmp_path)


def test_another_parquet_file_is_no_manifest(tmp_path: Path) -> None:
    pq.write_table(pa.table({"sample_id": ["a"], "key": ["b"]}), tmp_path / MANIFEST_NAME)
    with pytest.raises(FormatError, match="not a hashtap manifest"):
        Manifest.load(tmp_path)


def test_a_missing_directory_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write the manifest"):
        merge(tmp_path / "none", sample("a", [1]))


def merge_many(directory: Path, name: str) -> None:
    for number in range(8):
        merge(directory, sample(f"{name}-{number}", [number]))


def test_two_clients_at_once_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    clients = [context.Process(target=merge_many, args=(tmp_path, name)) for name in ("x", "y")]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
        assert client.exitcode == 0
    assert sorted(row.sample_id for row in Manifest.load(tmp_path)) == [
        f"{name}-{n}" for name in "xy" for n in range(8)
    ]
