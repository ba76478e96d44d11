import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hashtap.directory import CaptureDirectory, shard_name
from hashtap.errors import FormatError, UsageError


def test_the_first_to_come_makes_it_and_all_see_the_same_uuid(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"

    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(CaptureDirectory.create, [path] * 16))

    assert {directory.uuid for directory in made} == {CaptureDirectory.open(path).uuid}
    assert [file.name for file in path.iterdir()] == ["hashtap.json"]


def test_two_directories_are_told_apart(tmp_path: Path) -> None:
    assert CaptureDirectory.create(tmp_path / "a").uuid != CaptureDirectory.create(tmp_path / "b").uuid


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)

    assert CaptureDirectory.create(tmp_path).uuid == CaptureDirectory.open(tmp_path).uuid
    assert [file.name for file in tmp_path.iterdir()] == ["hashtap.json"]


def test_what_cannot_be_a_capture_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path in (file, file / "below"):
        with pytest.raises(UsageError, match="not a directory"):
            CaptureDirectory.create(path)
    with pytest.raises(UsageError, match="cannot write the capture directory /proc/hashtap"):
        CaptureDirectory.create("/proc/hashtap")
    with pytest.raises(UsageError, match="is not a directory"):
        CaptureDirectory.open(tmp_path / "missing")
    with pytest.raises(UsageError, match=r"holds no hashtap.json"):
        CaptureDirectory.open(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"format": 1}',
        b'{"format": 1, "uuid": 7}',
        b'{"format": 1, "uuid": "x"}',
        b"\xff",
        b"[" * 60000,
    ],
)
def test_a_damaged_identity(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "hashtap.json").write_bytes(text)
    with pytest.raises(FormatError, match=r"hashtap.json is damaged .* fresh directory"):
        CaptureDirectory.open(tmp_path)


def test_a_newer_format(tmp_path: Path) -> None:
    facts = {"format": 2, "uuid": "00000000-0000-4000-8000-000000000000"}
    (tmp_path / "hashtap.json").write_text(json.dumps(facts))
    with pytest.raises(FormatError, match="says format 2 and this hashtap reads 1"):
        CaptureDirectory.open(tmp_path)


def test_only_sealed_shards_are_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "rack-7/gpu 3")
    directory = CaptureDirectory.create(tmp_path)
    names = [shard_name(rank, "89abcdef" * 4, number) for rank in (0, 11) for number in (0, 2, 1_000_000)]
    names += ["renamed.safetensors", "-.safetensors"]
    for name in [*names, "manifest.parquet", f".{names[0]}", f"{names[0]}.tmp", ".safetensors"]:
        (tmp_path / name).touch()
    partial = tmp_path / f"{shard_name(0, '89abcdef' * 4, 3)}.partial"
    partial.touch()

    assert directory.shards() == sorted(tmp_path / name for name in names)
    assert directory.partials() == [partial]


def test_names_carry_host_process_rank_run_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "rack-7/gpu 3")
    monkeypatch.setattr("os.getpid", lambda: 4242)
    assert shard_name(3, "89abcdef01234567", 12) == "hashtap-rack_7_gpu_3-4242-r3-89abcdef-000012.safetensors"
