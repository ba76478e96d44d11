import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.capture.build import GEOMETRY, SEED, TORCH_DTYPE, Host, States, states_of
from tests.capture.tamper import Tampered

from hashtap.checks import odd_rows, ranges
from hashtap.errors import UsageError
from hashtap.frame import NUMPY_DTYPE, stored_bytes_limit
from hashtap.identity import prompt_key
from hashtap.report import Problem, Report
from hashtap.shard import read_shard
from hashtap.verify import verify
from hashtap_kernels.layout import HEADER_BYTES, Dtype
from hashtap_kernels.proof import prompt_proof

PROMPTS = [[n] * length for n, length in enumerate([3, 300, 1, 17, 256, 513])]
SAMPLES = [(f"s-{n}", ids, b"") for n, ids in enumerate(PROMPTS)]


def capture(path: Path, prompts: list[list[int]], states: States | None = None, **options: object) -> Path:
    """Capture ``prompts``, the first with these ``states`` if given; returns the first shard."""
    with Host(path, **{"threads": 1, **options}) as host:  # type: ignore[arg-type]
        for number, ids in enumerate(prompts):
            rows = states_of(ids) if states is None or number else states
            host.forward([(host.record(ids), rows, 0, len(ids))])
    return host.directory.shards()[0]


def kinds(report: Report) -> list[str]:
    return [problem.kind for problem in report.problems]


def only(report: Report, kind: str) -> Problem:
    assert kinds(report) == [kind]
    return report.problems[0]


@pytest.mark.parametrize("quick", [False, True])
def test_nothing_is_wrong(tmp_path: Path, quick: bool) -> None:
    with Host(tmp_path, table_rows=300, shard_bytes=150_000) as host:
        for ids in PROMPTS:
            host.capture([ids], chunk=100)
            host.writer.drain()
    report = verify(tmp_path, SAMPLES, quick=quick)
    assert report.ok
    assert (report.verified, report.samples, report.records, report.salted) == (6, 6, 6, 0)
    assert report.tokens == sum(map(len, PROMPTS))
    assert report.raw_bytes == report.tokens * GEOMETRY.row_bytes
    assert report.stored_bytes == sum(path.stat().st_size for path in host.directory.shards())
    assert report.summary().startswith("6/6 verified")
    assert ("quick" in report.summary()) == quick
    assert json.loads(json.dumps(report.to_json()))["ok"]
    assert verify(tmp_path, quick=quick).summary().startswith("6/6 verified")


def test_missing_samples_are_named(tmp_path: Path) -> None:
    """Thirty-two of two hundred were captured."""
    samples = [(f"s-{n}", [n, n], b"") for n in range(200)]
    capture(tmp_path, [ids for _, ids, _ in samples[:32]])
    report = verify(tmp_path, samples)
    assert (report.verified, report.samples, report.ok) == (32, 200, False)
    assert {name for problem in report.problems for name in problem.sample_ids} == {f"s-{n}" for n in range(32, 200)}
    assert set(kinds(report)) == {"missing"}
    assert str(report.problems[0]).startswith("missing: sample s-")
    assert "168 problems" in report.summary()


def test_an_empty_directory(tmp_path: Path) -> None:
    Host(tmp_path).writer.close()
    assert "there is no sealed shard" in only(verify(tmp_path), "missing").detail
    report = verify(tmp_path, SAMPLES)
    assert (report.verified, kinds(report)) == (0, ["missing"] * 7)
    with pytest.raises(UsageError, match="not a directory"):
        verify(tmp_path / "nowhere")


def test_samples_that_share_a_prompt(tmp_path: Path) -> None:
    capture(tmp_path, [[1, 2]])
    report = verify(tmp_path, [("a", [1, 2], b""), ("b", [1, 2], b""), ("c", [3], b""), ("d", [3], b"")])
    assert (report.verified, report.samples) == (2, 4)
    assert only(report, "missing").sample_ids == ("c", "d")


@pytest.mark.parametrize("planes", [False, True])
@pytest.mark.parametrize("quick", [False, True])
def test_a_flipped_byte_anywhere_in_frames(tmp_path: Path, quick: bool, planes: bool) -> None:
    """Records, a table and waste: what is spoilt is named with its sample, or alone where it has none."""
    table = np.full((4, 72), 120, np.uint8) if planes else None
    path = capture(tmp_path, [[1], [2, 3], [2, 3]], table=table)
    shard = read_shard(path)
    samples = [("a", [1], b""), ("b", [2, 3], b"")]
    with path.open("r+b", buffering=0) as file:
        for position in range(shard.frames_at, shard.frames_at + shard.frames_bytes, 7):
            file.seek(position)
            (byte,) = file.read(1)
            file.seek(position)
            file.write(bytes([byte ^ 1 << position % 8]))
            report = verify(tmp_path, samples, quick=quick)
            assert set(kinds(report)) == {"stored_sum"}
            row = int(np.searchsorted(shard.index[:, 0], position - shard.frames_at, "right")) - 1
            serial = int(shard.index[row, 3])
            owner = {1: ("a",), 2: ("b",)}.get(serial, ())
            assert any(problem.sample_ids == owner for problem in report.problems)
            assert report.problems[0].shard == path.name
            file.seek(position)
            file.write(bytes([byte]))
    assert verify(tmp_path, samples, quick=quick).ok


def test_damage_hides_nothing_else(tmp_path: Path) -> None:
    """One shard is cut, a frame of another is spoilt, a third lost the beginning of a record."""
    with Host(tmp_path, threads=1, shard_bytes=1) as host:
        for ids in PROMPTS:
            host.capture([ids], chunk=256)
            host.writer.drain()
    paths = host.directory.shards()
    assert len(paths) == 9  # one a frame
    paths[0].write_bytes(paths[0].read_bytes()[:-1])
    data = bytearray(paths[3].read_bytes())
    data[read_shard(paths[3]).frames_at + 300] ^= 1
    paths[3].write_bytes(data)
    paths[6].unlink()

    report = verify(tmp_path, SAMPLES)

    found = {problem.kind: problem for problem in report.problems}
    assert len(found) == len(report.problems) == 4
    assert found["bad_shard"].shard == paths[0].name
    assert found["missing"].sample_ids == ("s-0",)
    assert (found["stored_sum"].sample_ids, found["stored_sum"].rows) == (("s-2",), ((0, 1),))
    assert found["incomplete"].sample_ids == ("s-5",)
    assert report.verified == 3


def test_a_damaged_frame_names_its_rows(tmp_path: Path) -> None:
    path = capture(tmp_path, PROMPTS)
    shard = read_shard(path)
    row = int(np.flatnonzero(shard.index[:, 4] == 256 | 256 << 32)[0])
    data = bytearray(path.read_bytes())
    data[shard.frames_at + int(shard.index[row, 0]) + 999] ^= 1
    path.write_bytes(data)
    problem = only(verify(tmp_path, SAMPLES), "stored_sum")
    assert (problem.sample_ids, problem.rows) == (("s-5",), ((256, 512),))
    assert "rows 256-511" in str(problem)


# Checksums that are right over contents that are wrong: what a bug would do.


def test_two_records_exchange_their_keys(tmp_path: Path) -> None:
    tampered = Tampered(capture(tmp_path, [[1, 2, 3], [4, 5, 6]]))
    tampered.records[[0, 1], :2] = tampered.records[[1, 0], :2]
    tampered.reseal()
    report = verify(tmp_path, [("a", [1, 2, 3], b""), ("b", [4, 5, 6], b"")])
    assert report.verified == 0
    assert {problem.sample_ids for problem in report.problems if problem.kind == "key"} == {("a",), ("b",)}


@pytest.mark.parametrize("quick", [False, True])
def test_two_records_exchange_their_keys_in_every_frame_too(tmp_path: Path, quick: bool) -> None:
    tampered = Tampered(capture(tmp_path, [[1, 2, 3], [4, 5, 6]]))
    tampered.records[[0, 1], :2] = tampered.records[[1, 0], :2]
    keys = tampered.fields(0)["key"].copy(), tampered.fields(1)["key"].copy()
    tampered.fields(0)["key"], tampered.fields(1)["key"] = keys[::-1]
    tampered.reseal()
    report = verify(tmp_path, [("a", [1, 2, 3], b""), ("b", [4, 5, 6], b"")], quick=quick)
    assert (report.verified, kinds(report)) == (0, ["key", "key"])
    assert "its token ids have the key" in report.problems[0].detail


def test_two_records_exchange_their_frames(tmp_path: Path) -> None:
    tampered = Tampered(capture(tmp_path, [[1, 2, 3], [4, 5, 6]]))
    tampered.index[[0, 1], 3] = tampered.index[[1, 0], 3]
    tampered.reseal()
    report = verify(tmp_path, [("a", [1, 2, 3], b""), ("b", [4, 5, 6], b"")])
    assert (report.verified, kinds(report)) == (0, ["stored_sum", "stored_sum"])
    assert "not the one that the index says" in report.problems[0].detail


def test_a_changed_token_id(tmp_path: Path) -> None:
    tampered = Tampered(capture(tmp_path, [[1, 2, 3], [4, 5, 6]], codec="none"))
    tampered.token_ids(0)[1] = 7
    tampered.reseal()
    report = verify(tmp_path, [("a", [1, 2, 3], b""), ("b", [4, 5, 6], b"")])
    assert report.verified == 1
    assert kinds(report) == ["proof", "key", "proof"]
    assert all(problem.sample_ids == ("a",) for problem in report.problems)
    assert report.problems[0].rows == ((0, 3),)


def test_a_changed_token_id_with_its_proof(tmp_path: Path) -> None:
    """Then only the key tells."""
    tampered = Tampered(capture(tmp_path, [[1, 2, 3]], codec="none"))
    tampered.token_ids(0)[1] = 7
    proof = prompt_proof(tampered.token_ids(0), 0, SEED)
    tampered.fields(0)["proof"] = proof
    tampered.records[0, 4:6] = proof
    tampered.reseal()
    assert "its token ids have the key" in only(verify(tmp_path), "key").detail


def test_a_changed_proof(tmp_path: Path) -> None:
    tampered = Tampered(capture(tmp_path, [[1, 2, 3]]))
    tampered.records[0, 5] ^= np.uint64(1)
    tampered.reseal()
    assert "not that of its token ids" in only(verify(tmp_path), "proof").detail


def drop_row(tampered: Tampered, frame: int, row: int) -> None:
    """Take one token row out of a frame that is RAW and not compressed, and say so in its header."""
    data, fields = tampered.frames[frame], tampered.fields(frame)
    n, row_bytes = int(fields["tokens"][0]), GEOMETRY.row_bytes
    cuts = np.cumsum([HEADER_BYTES, n * row_bytes, 8 * n, 8 * n])
    parts = [data[start:stop] for start, stop in pairwise(cuts)]
    kept = [np.delete(part.reshape(n, -1), row, axis=0).reshape(-1) for part in parts]
    whole = np.concatenate([data[:HEADER_BYTES], *kept])
    tampered.frames[frame] = np.concatenate([whole, np.zeros(-len(whole) % 64, np.uint8)])
    tampered.fields(frame)["tokens"] = n - 1
    tampered.fields(frame)["coded_bytes"] = (n - 1) * row_bytes
    tampered.index[frame, 4] -= np.uint64(1 << 32)


def test_a_dropped_row(tmp_path: Path) -> None:
    tampered = Tampered(capture(tmp_path, [list(range(20)), [4, 5, 6]], codec="none"))
    drop_row(tampered, 0, 7)
    tampered.reseal()
    report = verify(tmp_path, [("a", list(range(20)), b""), ("b", [4, 5, 6], b"")])
    assert only(report, "incomplete").sample_ids == ("a",)
    assert report.verified == 1


def test_a_dropped_row_that_the_record_knows_of(tmp_path: Path) -> None:
    """The prompt is said to have been one shorter."""
    tampered = Tampered(capture(tmp_path, [list(range(20))], codec="none"))
    drop_row(tampered, 0, 7)
    tampered.fields(0)["total_tokens"] = 19
    tampered.records[0, 3] = 19
    tampered.reseal()
    report = verify(tmp_path, [("a", list(range(20)), b"")])
    assert set(kinds(report)) == {"key", "proof", "row_sum"}
    (moved,) = (problem for problem in report.problems if problem.kind == "row_sum")
    assert moved.rows == ((7, 19),)


def test_another_length(tmp_path: Path) -> None:
    tampered = Tampered(capture(tmp_path, [[1, 2, 3]]))
    tampered.fields(0)["total_tokens"] = 4
    tampered.reseal()
    assert "of 4 tokens, the record has 3" in only(verify(tmp_path, quick=True), "length").detail


def values_of(tampered: Tampered, frame: int, tokens: int) -> States:
    raw = tampered.frames[frame][HEADER_BYTES : HEADER_BYTES + tokens * GEOMETRY.row_bytes]
    return raw.view(np.uint16).reshape(tokens, 4, 72)


def test_changed_values(tmp_path: Path) -> None:
    ids = list(range(300))
    tampered = Tampered(capture(tmp_path, [ids], codec="none"))
    values_of(tampered, 0, 256)[[7, 8, 200], 1, 3] ^= 1
    values_of(tampered, 1, 44)[43, 3, 71] ^= 1
    tampered.reseal()
    problem = only(verify(tmp_path, [("a", ids, b"")]), "row_sum")
    assert (problem.rows, problem.sample_ids) == (((7, 9), (200, 201), (299, 300)), ("a",))
    assert verify(tmp_path, [("a", ids, b"")], quick=True).ok


@pytest.mark.parametrize("what", ["rows", "layers"])
def test_exchanged_rows_and_layers(tmp_path: Path, what: str) -> None:
    tampered = Tampered(capture(tmp_path, [list(range(9))], codec="none"))
    values = values_of(tampered, 0, 9)
    if what == "rows":
        values[[3, 5]] = values[[5, 3]]
    else:
        values[[3, 5]] = values[[3, 5]][:, [1, 0, 2, 3]]
    tampered.reseal()
    assert only(verify(tmp_path), "row_sum").rows == ((3, 4), (5, 6))


# Values that the forward really gave, and that no trainer wants.


def test_a_block_of_zeros(tmp_path: Path) -> None:
    ids = list(range(300))
    states = states_of(ids).copy()
    states[250:266, 1] = 0
    states[260, 1, 5] = 0x8000  # minus zero is zero too
    capture(tmp_path, [ids, [1, 2]], states)
    report = verify(tmp_path, [("a", ids, b""), ("b", [1, 2], b"")])
    problem = only(report, "zero_rows")
    assert (problem.sample_ids, problem.rows, problem.layer) == (("a",), ((250, 266),), "boundary 3")
    assert str(problem).startswith(
        f"zero_rows: sample a, key {prompt_key(ids).hex()}, rows 250-265, boundary 3, hashtap-"
    )
    assert report.verified == 1


def test_nan_inf_and_constant_rows(tmp_path: Path) -> None:
    ids = list(range(20))
    states = states_of(ids).copy()
    states[7, 0, 11] = 0x7FC0
    states[9, 0, 12] = 0xFF80
    states[7, 3, 13] = 0x7F80
    states[7, 3, 14] = 0xFFFF
    states[4:6, 2] = 0x3F80
    capture(tmp_path, [ids, [1, 2]], states, table=np.full((4, 72), 120, np.uint8))
    report = verify(tmp_path, [("a", ids, b""), ("b", [1, 2], b"")])
    assert [(problem.kind, problem.rows, problem.layer) for problem in report.problems] == [
        ("nan", ((7, 8),), "boundary 2"),
        ("nan", ((7, 8),), "final (post-norm)"),
        ("inf", ((9, 10),), "boundary 2"),
        ("inf", ((7, 8),), "final (post-norm)"),
        ("constant_rows", ((4, 6),), "boundary 4"),
    ]
    assert (report.verified, report.samples) == (1, 2)


@pytest.mark.parametrize("dtype", Dtype)
def test_odd_rows_of_every_type(dtype: Dtype) -> None:
    values = torch.linspace(-3, 3, 6 * 2 * 8).reshape(6, 2, 8)
    values[1, 1, 4] = float("nan")
    values[2, 0] = 0.0
    values[2, 0, 3] = -0.0
    values[3, 1] = 0.5
    values[4, 0, [0, 4, 7]] = 0.25
    if dtype is not Dtype.FP8_E4M3:
        values[5, 1, 0] = float("-inf")
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.element_bytes]
    rows = values.to(TORCH_DTYPE[dtype]).view(bits).numpy().view(NUMPY_DTYPE[dtype])
    found = {kind: np.argwhere(where).tolist() for kind, where in odd_rows(rows, dtype).items()}
    expected = {"nan": [[1, 1]], "inf": [[5, 1]], "zero_rows": [[2, 0]], "constant_rows": [[3, 1]]}
    if dtype is Dtype.FP8_E4M3:
        del expected["inf"]
    assert found == expected


def test_ranges() -> None:
    assert ranges([]) == ()
    assert ranges([0, 1, 2, 5, 7, 8]) == ((0, 3), (5, 6), (7, 9))


# What belongs together.


def test_weights_that_are_mixed(tmp_path: Path) -> None:
    capture(tmp_path, [[1], [2]])
    capture(tmp_path, [[2], [3]], changes={"epoch": "weights-2"})
    problem = only(verify(tmp_path), "epoch")
    assert "'weights-1'" in problem.detail
    assert "'weights-2'" in problem.detail
    report = verify(tmp_path, [("a", [2], b""), ("b", [3], b"")], epoch="weights-2")
    assert (report.ok, report.verified, report.records) == (True, 2, 2)
    assert only(verify(tmp_path, [("a", [1], b"")], epoch="weights-2"), "missing").sample_ids == ("a",)


def test_layers_that_are_mixed(tmp_path: Path) -> None:
    capture(tmp_path, [[1]])
    capture(tmp_path, [[2]], changes={"boundaries": (3, 4, 5)})
    assert "boundaries" in only(verify(tmp_path), "facts").detail


def test_duplicates_and_waste_are_counted(tmp_path: Path) -> None:
    capture(tmp_path, [[1, 2], [1, 2], [3]], codec="none")
    capture(tmp_path, [[1, 2]], codec="none")
    report = verify(tmp_path, [("a", [1, 2], b""), ("b", [3], b"")])
    frame_bytes = stored_bytes_limit(GEOMETRY, 2)
    assert report.ok
    assert (report.verified, report.records, report.duplicates) == (2, 2, 1)
    assert (report.waste_frames, report.waste_bytes) == (2, 2 * frame_bytes)
    assert "1 duplicates" in report.summary()


def test_salted_keys(tmp_path: Path) -> None:
    salt = b'{"lora":"ad1"}'
    with Host(tmp_path) as host:
        host.forward([(host.record([1, 2], salt), states_of([1, 2]), 0, 2)])
    report = verify(tmp_path)
    assert (report.ok, report.verified, report.salted) == (True, 1, 1)
    report = verify(tmp_path, [("a", [1, 2], salt)])
    assert (report.ok, report.verified, report.salted) == (True, 1, 0)
    assert only(verify(tmp_path, [("a", [1, 2], b"")]), "missing").sample_ids == ("a",)

    tampered = Tampered(host.directory.shards()[0])
    tampered.records[0, 9] = 0
    tampered.reseal()
    report = verify(tmp_path)
    assert kinds(report) == ["key", "key"]
    assert report.problems[0].key == prompt_key([1, 2], salt).hex()
    assert "the record's 0000000000000000" in report.problems[0].detail


def test_shards_that_are_not_sealed_are_counted(tmp_path: Path) -> None:
    path = capture(tmp_path, [[1]])
    path.with_name(path.name.replace("000000", "000001") + ".partial").write_bytes(bytes(5000))
    report = verify(tmp_path)
    assert (report.ok, report.partials) == (True, 1)
    assert "1 shards not sealed" in report.summary()
