"""FORMAT.md and the golden files, read by hashtap and by a reader that was written from the page alone."""

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.capture.build import SEED
from tests.capture.tamper import Tampered
from tests.golden import independent, independent_sums, make_golden

from hashtap.errors import FormatError
from hashtap.identity import prompt_key
from hashtap.reader import Reader
from hashtap.verify import verify
from hashtap_kernels import layout

HERE = Path(__file__).parent
PAGE = (HERE.parent.parent / "FORMAT.md").read_text()
EXPECTED: dict[str, Any] = json.loads((HERE / "expected.json").read_text())
SHARDS = sorted(HERE.glob("*/*.safetensors"))


def rows(title: str) -> Iterator[list[str]]:
    """The cells of the first table after ``title`` in the page."""
    lines = PAGE[PAGE.index(title) :].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("|---"))
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        yield [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("name", EXPECTED)
def test_hashtap_reads_the_golden_files(name: str) -> None:
    wanted = EXPECTED[name]["records"]
    reader = Reader(HERE / name)
    assert len(reader) == len(wanted)
    for record in wanted:
        capture = reader.by_key(record["key"], record["epoch"])
        assert capture.token_ids.tolist() == record["token_ids"]
        assert list(capture.hidden_states.shape) == record["shape"]
        assert hashlib.sha256(capture.hidden_states.tobytes()).hexdigest() == record["sha256"]
        assert prompt_key(record["token_ids"], record["salt"].encode()).hex() == record["key"]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_independent_reader_reads_them_too(name: str) -> None:
    wanted = {(record["key"], record["epoch"]): record for record in EXPECTED[name]["records"]}
    found = {(key.hex(), epoch): (ids, values) for key, epoch, ids, values in independent.read_directory(HERE / name)}
    assert found.keys() == wanted.keys()
    for identity, (ids, values) in found.items():
        assert ids.tolist() == wanted[identity]["token_ids"]
        assert list(values.shape) == wanted[identity]["shape"]
        assert hashlib.sha256(values.tobytes()).hexdigest() == wanted[identity]["sha256"]


@pytest.mark.parametrize("path", SHARDS, ids=lambda path: f"{path.parent.name}-{path.stem[-10:]}")
def test_every_sum_is_what_the_page_says(path: Path) -> None:
    for frame, tables in independent.read_frames(path):
        assert independent_sums.self_check(frame.header) == int(frame.header[120:128].view("<u8")[0])
        if frame.n == 0:
            assert independent_sums.table_id(tables[frame.table]) == frame.table
            continue
        seed = np.frombuffer(bytes.fromhex(frame.facts["seed"]), ">u8").astype(np.uint64)
        proof = tuple(frame.header[56:72].view("<u8").tolist())
        assert independent_sums.proof(frame.ids, frame.first, seed) == proof
        assert (independent_sums.row_sums(frame.values, frame.first) == frame.sums).all()


def test_the_independent_reader_is_short_and_independent() -> None:
    for module in (independent, independent_sums):
        source = Path(module.__file__).read_text()
        assert len(source.splitlines()) <= 100
        assert not re.search(r"^\s*(from|import) (hashtap|torch|safetensors)", source, re.M)


def test_the_golden_files_show_what_the_page_describes() -> None:
    reader = Reader(HERE / "captures")
    kinds = np.concatenate([shard.index[:, 6] for shard in reader.shards]).tolist()
    assert {kind & 0xFF for kind in kinds} == {0, 1, 2}
    assert {kind >> 8 for kind in kinds} == {0, 1}
    assert reader.epochs == ["weights-1", "weights-2"]
    assert len(reader.duplicates) == 1
    assert any(len({piece.shard.path for piece in reader.pieces(entry)}) > 1 for entry in reader.entries)
    assert any(entry.salt_sum for entry in reader.entries)
    assert [entry.shared_tokens for entry in Reader(HERE / "shared").entries] == [0, 280]
    assert verify(HERE / "captures", epoch="weights-1").waste_frames > 1


def test_verify_finds_nothing_wrong() -> None:
    for name, epoch in (("captures", "weights-1"), ("captures", "weights-2"), ("shared", None)):
        report = verify(HERE / name, epoch=epoch)
        # These made-up states do not change along a channel, and nobody says that they should.
        assert report.ok, report.problems


PLAIN = np.array([*[(1 << 64) - 1] * 3, 0xFF, (1 << 64) - 1], np.uint64)
"""Of serial, positions, table, kind and forward in an index row: all but the codec."""


def described(path: Path) -> Any:
    """All that a shard says but sizes, sums and codecs: the compressed bytes may be another libzstd's."""
    facts, _, index, records = independent.read_shard(path)
    frames = [
        [part.tobytes() for part in (frame.header[:88], frame.header[112:], frame.ids, frame.sums, values)]
        for frame, tables in independent.read_frames(path)
        for values in (frame.values if frame.n else tables[frame.table],)
    ]
    return facts, (index[:, 3:] & PLAIN).tolist(), records.tolist(), frames


def test_making_them_again_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_golden, "HERE", tmp_path)
    make_golden.main()
    assert json.loads((tmp_path / "expected.json").read_text()) == EXPECTED
    for path in SHARDS:
        assert described(tmp_path / path.parent.name / path.name) == described(path)
    assert len(list(tmp_path.glob("*/*.safetensors"))) == len(SHARDS)


def test_golden_keys() -> None:
    cases = {
        "key of []": prompt_key([]),
        "key of [1, 2, 3]": prompt_key([1, 2, 3]),
        "key of [2, 1, 3]": prompt_key([2, 1, 3]),
        'key of [1, 2, 3] with the salt `{"lora":"ad1"}`': prompt_key([1, 2, 3], b'{"lora":"ad1"}'),
        "key of 0 … 999": prompt_key(range(1000)),
    }
    table = dict(rows("## 10."))
    assert {name: table[name] for name in cases} == {name: key.hex() for name, key in cases.items()}


def hexed(*words: int) -> str:
    return " ".join(f"{int(word):016x}" for word in words)


def test_golden_sums() -> None:
    seed = np.array(SEED, np.uint64)
    ids = np.array([1, 2, 3])
    values = make_golden.states([1, 2, 3])
    table = np.arange(4 * 24, dtype=np.uint8).reshape(4, 24)
    cases = {
        "mix64(1)": hexed(independent_sums.mix64(np.array([1], np.uint64))[0]),
        "mix64(2⁶⁴ − 1)": hexed(independent_sums.mix64(np.array([(1 << 64) - 1], np.uint64))[0]),
        "seeds of the golden files": hexed(*seed),
        "proof of [1, 2, 3] at 0, 1, 2 with these": hexed(*independent_sums.proof(ids, 0, seed)),
        "proof of [1, 2, 3] at 256, 257, 258 with these": hexed(*independent_sums.proof(ids, 256, seed)),
        "row sums of the record [1, 2, 3] of weights-1": hexed(*independent_sums.row_sums(values, 0)),
        "id of the table [4, 24] with the bytes 0, 1, … 95": hexed(independent_sums.table_id(table)),
    }
    page = dict(rows("## 10."))
    assert {name: page.get(name) for name in cases} == cases


def test_the_header_table_is_the_layout() -> None:
    """Offsets and types of the page are those of the kernels' HEADER, field by field."""
    sizes = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "u64[2]": 16, "8 bytes": 8, "16 bytes": 16, "3 bytes": 3}
    fields = [(int(at), sizes[kind]) for at, kind, _ in rows("\nHeader:\n")]
    expected = [(offset, dtype.itemsize) for dtype, offset, *_ in layout.HEADER.fields.values()]
    assert fields == expected
    assert sum(size for _, size in fields) == layout.HEADER_BYTES


def test_cut_golden_files_are_refused(tmp_path: Path) -> None:
    """And the independent reader refuses them as well: the page's checks are enough to notice."""
    shutil.copytree(HERE / "shared", tmp_path / "shared")
    path = sorted((tmp_path / "shared").glob("*.safetensors"))[0]
    data = path.read_bytes()
    for length in (0, 1, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises((AssertionError, ValueError, IndexError)):
            list(independent.read_directory(tmp_path / "shared"))


def test_another_version_is_refused_by_both_readers(tmp_path: Path) -> None:
    """What version 1 does with version 2, in the shard's facts, in a frame and in the identity (§9)."""

    def refused(message: str) -> None:
        with pytest.raises(FormatError, match=message):
            [capture.hidden_states for capture in Reader(path)]
        with pytest.raises(AssertionError):
            list(independent.read_directory(path))
        shutil.rmtree(path)
        shutil.copytree(HERE / "shared", path)

    path = tmp_path / "shared"
    shutil.copytree(HERE / "shared", path)
    shard = sorted(path.glob("*.safetensors"))[0]
    tampered = Tampered(shard)
    tampered.header["__metadata__"]["hashtap.format"] = "2"
    tampered.reseal()
    refused("written in format '2' and this hashtap reads 1")
    tampered = Tampered(shard)
    tampered.fields(0)["version"] = 2
    tampered.reseal()
    refused("has version 2, and this hashtap reads 1")
    identity = json.loads((path / "hashtap.json").read_text())
    (path / "hashtap.json").write_text(json.dumps(identity | {"format": 2}))
    with pytest.raises(FormatError, match="says format 2 and this hashtap reads 1"):
        Reader(path)


def test_new_keys_are_ignored_and_new_tensors_are_not(tmp_path: Path) -> None:
    shutil.copytree(HERE / "shared", tmp_path / "shared")
    shard = sorted((tmp_path / "shared").glob("*.safetensors"))[0]
    before = [capture.key for capture in Reader(HERE / "shared")]
    tampered = Tampered(shard)
    tampered.header["__metadata__"] |= {"hashtap.new": "x", "other": "y"}
    tampered.reseal()
    assert [capture.key for capture in Reader(tmp_path / "shared")] == before
    assert len(list(independent.read_directory(tmp_path / "shared"))) == len(before)
    tampered.header["more"] = dict(tampered.header["trailer"])
    tampered.reseal()
    with pytest.raises(FormatError, match="other tensors"):
        Reader(tmp_path / "shared")
