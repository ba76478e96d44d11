import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import pytest
import torch
from tests.capture.build import GEOMETRY, Host, states_of
from tests.capture.tamper import Tampered

import hashtap
from hashtap.errors import FormatError, MismatchError, UsageError
from hashtap.frame import StoredFrame
from hashtap.identity import prompt_key
from hashtap.manifest import Manifest
from hashtap.reader import NotCaptured, Reader
from hashtap.samples import load_samples
from hashtap_kernels.layout import Dtype, Geometry

PROMPTS = [[n] * length for n, length in enumerate([3, 300, 1, 17, 256, 513, 64, 2])]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight prompts in several shards, the earlier ones RAW, the later ones PLANES."""
    path = tmp_path_factory.mktemp("captures")
    with Host(path, table_rows=400, shard_bytes=150_000) as host:
        for ids in PROMPTS:
            host.capture([ids], chunk=200)
            host.writer.drain()
    return path


def test_by_key_by_ids_and_in_turn(path: Path) -> None:
    reader = hashtap.open(path)
    assert len(reader) == len(PROMPTS)
    assert [capture.token_ids.tolist() for capture in reader] == PROMPTS
    assert reader.keys() == {prompt_key(ids) for ids in PROMPTS}
    for ids in PROMPTS:
        key = prompt_key(ids)
        assert key in reader
        assert key.hex() in reader
        for capture in (reader.by_key(key), reader.by_key(key.hex()), reader.by_token_ids(ids)):
            assert (capture.key, len(capture), capture.token_ids.tolist()) == (key, len(ids), ids)
            assert capture.hidden_states.dtype == np.uint16
            assert (capture.hidden_states == states_of(ids)).all()


def test_opening_reads_no_frame(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Header, index, records and trailer of each shard, to the byte, and no shard is mapped."""
    shards = Reader(path).shards
    beside_frames = sum(shard.file_bytes - shard.frames_bytes for shard in shards)
    assert sum(shard.frames_bytes for shard in shards) > 10 * beside_frames
    taken, pread = 0, os.pread

    def counted(descriptor: int, size: int, offset: int) -> bytes:
        nonlocal taken
        data = pread(descriptor, size, offset)
        taken += len(data)
        return data

    monkeypatch.setattr(os, "pread", counted)
    monkeypatch.setattr("mmap.mmap", lambda *_, **__: pytest.fail("a shard was mapped"))
    before = bytes_read()
    reader = Reader(path, cache=False)
    assert len(reader) == len(PROMPTS)
    assert taken == beside_frames
    # In whatever other way: the directory's identity, and what the kernel tells of this process.
    assert bytes_read() - before < taken + 4096


def bytes_read() -> int:
    """By this process, mapped files aside."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_what_a_capture_says_of_itself(path: Path) -> None:
    capture = hashtap.open(path).by_token_ids(PROMPTS[3])
    assert (capture.dtype, capture.epoch, capture.final_norm) == ("bfloat16", "weights-1", "post")
    assert capture.boundaries == (2, 3, 4)
    assert capture.shard.parent == path
    assert repr(capture) == f"<Capture {capture.key.hex()}: bfloat16 [17, 4, 72]>"


def test_the_last_record_of_every_shard(path: Path) -> None:
    reader = Reader(path)
    last = {capture.shard: capture for capture in reader}
    assert len(last) > 2
    for capture in last.values():
        assert (capture.hidden_states == states_of(capture.token_ids.tolist())).all()


def test_tensors(path: Path) -> None:
    for ids in PROMPTS:
        tensor = Reader(path).by_token_ids(ids).tensor()
        assert (tensor.dtype, tensor.shape) == (torch.bfloat16, (len(ids), 4, 72))
        assert (tensor.view(torch.int16).numpy().view(np.uint16) == states_of(ids)).all()


@pytest.mark.parametrize("dtype", Dtype)
def test_every_element_type(tmp_path: Path, dtype: Dtype) -> None:
    geometry = Geometry(2, 16, dtype)
    with Host(tmp_path, geometry) as host:
        host.capture([[1, 2, 3]])
    capture = Reader(tmp_path).by_token_ids([1, 2, 3])
    states = states_of([1, 2, 3], geometry)
    assert capture.hidden_states.dtype == states.dtype
    assert capture.hidden_states.tobytes() == states.tobytes()
    assert capture.tensor().dtype == getattr(torch, capture.dtype)
    assert capture.tensor().contiguous().view(torch.uint8).numpy().tobytes() == states.tobytes()


def test_row_and_id_of_a_position_belong_together(tmp_path: Path) -> None:
    """Row p is the state after token p: nothing is shifted."""
    ids = list(range(10))
    states = np.tile(np.array(ids, np.uint16)[:, None, None], (1, 4, 72))
    with Host(tmp_path) as host:
        host.forward([(host.record(ids), states, 0, 10)])
    capture = Reader(tmp_path).by_token_ids(ids)
    assert (capture.hidden_states[:, 0, 0] == capture.token_ids).all()


def test_as_many_tokens_as_layers(tmp_path: Path) -> None:
    """A square block still reads token first."""
    geometry = Geometry(4, 8)
    states = np.arange(4 * 4 * 8, dtype=np.uint16).reshape(4, 4, 8)
    with Host(tmp_path, geometry) as host:
        host.forward([(host.record([1, 2, 3, 4]), states, 0, 4)])
    assert (Reader(tmp_path).by_token_ids([1, 2, 3, 4]).hidden_states == states).all()


def test_arrays_are_the_users_own(path: Path) -> None:
    reader = Reader(path)
    capture = reader.by_token_ids(PROMPTS[0])
    capture.hidden_states[:] = 0
    assert capture.hidden_states is capture.hidden_states
    assert (reader.by_token_ids(PROMPTS[0]).hidden_states == states_of(PROMPTS[0])).all()


def test_reading_into_memory_that_is_there(path: Path) -> None:
    capture = Reader(path).by_token_ids(PROMPTS[5])
    out = np.full((2 + 513 + 2, 4, 72), 0xA5A5, np.uint16)
    capture.read_into(out[2:-2])
    assert (out[2:-2] == states_of(PROMPTS[5])).all()
    assert (out[[0, 1, -2, -1]] == 0xA5A5).all()


def test_many_threads_one_reader(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hashtap.reader._OPEN_MAPS", 2)
    reader = Reader(path)
    wanted = PROMPTS * 8
    random.Random(0).shuffle(wanted)
    with ThreadPoolExecutor(8) as pool:
        states = list(pool.map(lambda ids: reader.by_token_ids(ids).hidden_states, wanted))
    assert all((rows == states_of(ids)).all() for rows, ids in zip(states, wanted, strict=True))
    assert len(reader._maps) <= 2


@pytest.mark.parametrize("stops_at", [(PurePath, "__hash__"), (StoredFrame, "parse")], ids=["map", "frame"])
def test_reading_in_a_forked_process(path: Path, monkeypatch: pytest.MonkeyPatch, stops_at: tuple[type, str]) -> None:
    """While another thread, which does not come along, looks up a shard's map, or reads states."""
    reached, forked = threading.Event(), threading.Event()
    work = getattr(*stops_at)

    def stop(*given: Any) -> Any:
        if threading.current_thread().name == "reads":
            reached.set()
            forked.wait(20)
        return work(*given)

    reader = Reader(path)
    monkeypatch.setattr(*stops_at, stop)
    capture = reader.by_token_ids(PROMPTS[0])
    thread = threading.Thread(target=lambda: capture.hidden_states, name="reads")
    thread.start()
    assert reached.wait(20)
    if (child := os.fork()) == 0:
        signal.alarm(20)
        states = reader.by_token_ids(PROMPTS[1]).hidden_states
        os._exit(0 if (states == states_of(PROMPTS[1])).all() else 1)
    assert os.waitpid(child, 0)[1] == 0
    forked.set()
    thread.join()
    assert (capture.hidden_states == states_of(PROMPTS[0])).all()


def test_captures_are_read_side_by_side(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread waits for the one that reads another capture."""
    together, parse = threading.Barrier(2), StoredFrame.parse

    def meet(data: Any) -> StoredFrame:
        together.wait(20)
        return parse(data)

    chosen = [[0] * 3, [2]]  # of one frame each
    monkeypatch.setattr(StoredFrame, "parse", meet)
    reader = Reader(path)
    with ThreadPoolExecutor(2) as pool:
        states = list(pool.map(lambda ids: reader.by_token_ids(ids).hidden_states, chosen))
    assert all((rows == states_of(ids)).all() for rows, ids in zip(states, chosen, strict=True))


def test_names_of_shards_pair_nothing(path: Path, tmp_path: Path) -> None:
    """The files change names in a circle, and one gets a name of its own."""
    files = sorted(path.glob("*.safetensors"))
    names = [file.name for file in files]
    names = [*names[1:], "renamed.safetensors"]
    for file, name in zip(files, names, strict=True):
        (tmp_path / name).write_bytes(file.read_bytes())
    (tmp_path / "hashtap.json").write_bytes((path / "hashtap.json").read_bytes())
    reader = Reader(tmp_path)
    assert {bytes(capture.key) for capture in reader} == {prompt_key(ids) for ids in PROMPTS}
    for ids in PROMPTS:
        assert (reader.by_token_ids(ids).hidden_states == states_of(ids)).all()


def test_new_shards_are_picked_up(tmp_path: Path) -> None:
    with Host(tmp_path) as host:
        reader = Reader(tmp_path)
        assert not reader.refresh()
        host.capture([[1, 2, 3]])
        assert not reader.refresh()
        host.writer.drain()
        assert [1, 2, 3] not in [capture.token_ids.tolist() for capture in reader]
        assert reader.refresh()
        assert not reader.refresh()
        assert reader.by_token_ids([1, 2, 3]).token_ids.tolist() == [1, 2, 3]
    host.directory.shards()[0].unlink()
    assert reader.refresh()
    assert len(reader) == 0


def test_a_prompt_that_was_not_captured(path: Path) -> None:
    reader = Reader(path)
    key = prompt_key([9, 9])
    with pytest.raises(NotCaptured, match=f"{key.hex()} was not captured: it is in none of the") as caught:
        reader.by_token_ids([9, 9])
    assert isinstance(caught.value, KeyError)
    with pytest.raises(NotCaptured, match="with the weights weights-9"):
        reader.by_token_ids(PROMPTS[0], epoch="weights-9")
    with pytest.raises(NotCaptured, match="is no key"):
        reader.by_key("sample-7")
    with pytest.raises(NotCaptured):
        reader.by_token_ids(PROMPTS[0], salt=b'{"lora":"ad1"}')
    assert not reader.has(prompt_key(PROMPTS[0]), "weights-9")
    assert reader.has(prompt_key(PROMPTS[0]), "weights-1")


def test_salts(tmp_path: Path) -> None:
    salts = [b"", hashtap.salt_of({"lora": "a"}), hashtap.salt_of({"lora": "b"})]
    with Host(tmp_path) as host:
        for value, salt in enumerate(salts):
            states = np.full((2, 4, 72), value, np.uint16)
            host.forward([(host.record([1, 2], salt), states, 0, 2)])
    reader = Reader(tmp_path)
    assert len(reader) == 3
    assert [reader.by_token_ids([1, 2], salt).hidden_states[0, 0, 0] for salt in salts] == [0, 1, 2]


def test_weights_are_told_apart(tmp_path: Path) -> None:
    for epoch, prompts in (("weights-1", [[1], [2]]), ("weights-2", [[2], [3]])):
        with Host(tmp_path, changes={"epoch": epoch}) as host:
            host.capture(prompts)
    reader = Reader(tmp_path)
    assert (len(reader), reader.epochs) == (4, ["weights-1", "weights-2"])
    assert [reader.by_token_ids([n]).epoch for n in (1, 3)] == ["weights-1", "weights-2"]
    assert reader.by_token_ids([2], epoch="weights-2").epoch == "weights-2"
    with pytest.raises(MismatchError, match=r"with the weights \['weights-1', 'weights-2'\]: choose one"):
        reader.by_token_ids([2])
    with pytest.raises(MismatchError, match=r"has epoch 'weights-[12]' and .*: choose one with epoch="):
        _ = reader.facts
    one = Reader(tmp_path, epoch="weights-2")
    assert (len(one), one.facts.epoch, one.by_token_ids([2]).epoch) == (2, "weights-2", "weights-2")


@pytest.mark.parametrize(
    ("name", "changes"),
    [("model", {"model": "other"}), ("final_norm", {"final_norm": "pre"}), ("boundaries", {"boundaries": (3, 4, 5)})],
)
def test_facts_that_differ(tmp_path: Path, name: str, changes: dict[str, object]) -> None:
    for change in ({}, changes):
        with Host(tmp_path, changes=change) as host:
            host.capture([[1, 2, 3]])
    with pytest.raises(MismatchError, match=f"{name} .* keep them in different directories"):
        _ = Reader(tmp_path).facts


def test_facts_of_all(path: Path, tmp_path: Path) -> None:
    assert Reader(path).facts.geometry == GEOMETRY
    hashtap.directory.CaptureDirectory.create(tmp_path)
    with pytest.raises(NotCaptured, match="no sealed shard"):
        _ = Reader(tmp_path).facts
    with pytest.raises(UsageError, match=r"holds no hashtap\.json"):
        Reader(tmp_path.parent)


def test_a_prompt_that_two_servers_captured(tmp_path: Path) -> None:
    for _ in range(2):
        with Host(tmp_path) as host:
            host.capture([[1, 2, 3], [4, 5]])
    reader = Reader(tmp_path)
    first, _second = host.directory.shards()
    assert (len(reader), len(reader.duplicates)) == (2, 2)
    assert {capture.shard for capture in reader} == {first}


def test_a_record_whose_first_shard_is_missing(tmp_path: Path) -> None:
    ids = list(range(500))
    with Host(tmp_path, codec="none", shard_bytes=100_000) as host:
        host.capture([ids], chunk=100)
        host.capture([[1, 2]])
    first, *_, last = host.directory.shards()
    assert len(Reader(tmp_path)) == 2
    first.unlink()
    reader = Reader(tmp_path)
    assert len(reader) == 1
    assert prompt_key(ids) not in reader
    (lost,) = reader.incomplete
    assert (lost.entry.key, lost.reason) == (prompt_key(ids), "frames of it are missing")
    assert lost.entry.shard.path <= last


def test_a_bad_shard(tmp_path: Path) -> None:
    with Host(tmp_path, codec="none", shard_bytes=1000) as host:
        for n in range(3):
            host.capture([[n] * 5])
            host.writer.drain()
    bad = host.directory.shards()[1]
    bad.write_bytes(bad.read_bytes()[:-1])
    with pytest.raises(FormatError, match=bad.name):
        Reader(tmp_path)
    reader = Reader(tmp_path, strict=False)
    assert [capture.token_ids[0] for capture in reader] == [0, 2]
    assert list(reader.bad_shards) == [bad]


def test_a_flipped_byte_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    with Host(tmp_path) as host:
        host.capture([[1, 2, 3], [4, 5, 6]])
    (path,) = host.directory.shards()
    shard = Reader(tmp_path).shards[0]
    data = bytearray(path.read_bytes())
    data[shard.frames_at + int(shard.index[1, 0]) + 200] ^= 4
    path.write_bytes(data)
    reader = Reader(tmp_path)
    good, spoilt = (reader.by_key(frame.tobytes()) for frame in shard.records[:, :2])
    assert len(good.hidden_states) == 3
    for read in (lambda: spoilt.hidden_states, lambda: spoilt.token_ids):
        with pytest.raises(FormatError, match=rf"{path.name}, frame 1 at byte \d+: .* checksum is wrong.* Restore"):
            read()


def test_a_shard_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    """Without a look at its length the process would end by SIGBUS."""
    prompts = [[number] * 2000 for number in range(10)]
    with Host(tmp_path) as host:
        host.capture(prompts)
    reader = Reader(tmp_path)
    (shard,) = reader.shards
    assert len(reader.by_token_ids(prompts[0]).hidden_states) == 2000
    with shard.path.open("r+b") as file:
        file.truncate(shard.file_bytes // 2)
    for prompt in prompts:
        with pytest.raises(FormatError, match=f"has {shard.file_bytes // 2} bytes now and had {shard.file_bytes}"):
            _ = reader.by_token_ids(prompt).hidden_states


def test_a_frame_of_another_record_is_noticed(tmp_path: Path) -> None:
    """Two records exchange their keys; every checksum is right."""
    with Host(tmp_path) as host:
        host.capture([[1, 2, 3], [4, 5, 6]])
    tampered = Tampered(host.directory.shards()[0])
    tampered.records[[0, 1], :2] = tampered.records[[1, 0], :2]
    tampered.reseal()
    with pytest.raises(FormatError, match=r"lies where .* belongs"):
        _ = Reader(tmp_path).by_token_ids([1, 2, 3]).token_ids


def test_a_record_that_shares_its_beginning(tmp_path: Path) -> None:
    """No writer makes these yet; a reader must follow them, over frame and shard boundaries, and more than once."""
    ids = list(range(600))
    prompts = {"donor": ids, "middle": [*ids[:300], 7, 8], "last": [*ids[:280], 9]}
    with Host(tmp_path) as host:
        host.capture([ids])
        host.writer.drain()
        for shared, tail in ((300, [7, 8]), (280, [9])):
            prompt = [*ids[:shared], *tail]
            record, states = host.record(prompt), np.concatenate([states_of(ids)[:shared], states_of(tail)])
            host.forward([(record, states, 0, shared), (record, states, shared, len(tail))])
            host.writer.drain()
    donor, middle, last = host.directory.shards()
    for path, shared, of in ((middle, 300, "donor"), (last, 280, "middle")):
        tampered = Tampered(path)
        keep = [row for row in range(len(tampered.frames)) if int(tampered.index[row, 4]) & 0xFFFFFFFF >= shared]
        tampered.frames = [tampered.frames[row] for row in keep]
        tampered.index = tampered.index[keep]
        tampered.records[0, 6] = shared
        tampered.records[0, 7:9] = np.frombuffer(prompt_key(prompts[of]), "<u8")
        tampered.reseal()

    reader = Reader(tmp_path)
    assert len(reader) == 3
    for name, tail in (("middle", [7, 8]), ("last", [9])):
        capture = reader.by_token_ids(prompts[name])
        assert capture.token_ids.tolist() == prompts[name]
        head = len(capture) - len(tail)
        assert (capture.hidden_states[:head] == states_of(ids)[:head]).all()
        assert (capture.hidden_states[head:] == states_of(tail)).all()

    donor.unlink()
    reader = Reader(tmp_path)
    assert len(reader) == 0
    assert len(reader.incomplete) == 2


def test_records_that_share_in_a_circle(tmp_path: Path) -> None:
    with Host(tmp_path) as host:
        host.capture([[1, 2, 3], [4, 5, 6]])
    tampered = Tampered(host.directory.shards()[0])
    tampered.records[:, 6] = 3
    tampered.records[[0, 1], 7:9] = tampered.records[[1, 0], :2]
    tampered.reseal()
    reader = Reader(tmp_path)
    assert len(reader) == 0
    assert len(reader.incomplete) == 2


def test_by_sample_id_whatever_the_order(tmp_path: Path) -> None:
    """Twelve samples whose ids do not sort as their numbers do."""
    samples = tmp_path / "samples.jsonl"
    prompts = {f"s-{n}": list(range(n)) for n in range(1, 13)}
    lines = [f'{{"id": "{name}", "input_ids": {ids}}}' for name, ids in prompts.items()]
    samples.write_text("\n".join(lines))
    with Host(tmp_path / "captures") as host:
        host.capture(reversed(prompts.values()))
    loaded = load_samples(samples).samples
    Manifest.merge(tmp_path / "captures", loaded, epoch="weights-1", directory_uuid=host.directory.uuid)
    reader = hashtap.open(tmp_path / "captures")
    for name, ids in prompts.items():
        assert reader.by_sample_id(name).token_ids.tolist() == ids
    with pytest.raises(NotCaptured, match="names no sample 's-13'"):
        reader.by_sample_id("s-13")


def test_reading_needs_neither_torch_nor_safetensors(path: Path) -> None:
    script = (
        "import sys; from hashtap.reader import Reader\n"
        f"assert all(len(c.hidden_states) == len(c.token_ids) for c in Reader({str(path)!r}))\n"
        "heavy = {'torch', 'triton', 'sglang', 'safetensors', 'pyarrow'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_shard_that_is_mended_is_read(tmp_path: Path) -> None:
    with Host(tmp_path) as host:
        host.capture([[1, 2, 3]])
    (path,) = host.directory.shards()
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    reader = Reader(tmp_path, strict=False)
    assert not reader.refresh()
    assert len(reader.bad_shards) == 1
    path.write_bytes(whole)
    assert reader.refresh()
    assert (len(reader), len(reader.bad_shards)) == (1, 0)


@pytest.mark.parametrize("threads", [1, 3])
def test_reading_many_ahead(path: Path, threads: int) -> None:
    reader = Reader(path)
    keys: list[bytes | str | hashtap.Capture] = [prompt_key(ids) for ids in PROMPTS[::-1]]
    keys[2] = reader.by_token_ids(PROMPTS[-3])
    keys[3] = prompt_key(PROMPTS[-4]).hex()
    found = list(reader.read(keys, threads))
    assert [capture.token_ids.tolist() for capture in found] == PROMPTS[::-1]
    for capture in found:
        assert capture._hidden_states is not None
        assert (capture.hidden_states == states_of(capture.token_ids.tolist())).all()


def test_reading_ahead_is_bounded_and_can_be_left(path: Path) -> None:
    reader, taken = Reader(path), []

    def keys() -> Iterator[bytes]:
        for number in range(1000):
            taken.append(number)
            yield prompt_key(PROMPTS[number % len(PROMPTS)])

    captures = reader.read(keys(), threads=2)
    next(captures)
    assert len(taken) == 5
    captures.close()


def test_a_key_among_many_that_was_not_captured(path: Path) -> None:
    reader = Reader(path)
    captures = reader.read([prompt_key(PROMPTS[0]), prompt_key([7]), prompt_key(PROMPTS[1])])
    assert next(captures).token_ids.tolist() == PROMPTS[0]
    with pytest.raises(NotCaptured, match="was not captured"):
        next(captures)
