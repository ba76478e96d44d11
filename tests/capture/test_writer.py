import fcntl
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.capture.build import GEOMETRY, Host, facts, states_of

from hashtap.errors import FormatError
from hashtap.flight import Record
from hashtap.frame import store_frame
from hashtap.header import Header
from hashtap.reader import Reader
from hashtap.shard import read_shard
from hashtap.shard_file import ShardFile
from hashtap.verify import verify
from hashtap_kernels.layout import HEADER_BYTES, Dtype, Geometry

PROMPTS = [list(range(n, 2 * n)) for n in (1, 2, 37, 255, 256, 257, 512, 900)]


def assert_captured(path: Path, prompts: list[list[int]], geometry: Geometry = GEOMETRY) -> None:
    reader = Reader(path)
    assert len(reader) == len(prompts)
    for ids in prompts:
        capture = reader.by_token_ids(ids)
        assert capture.token_ids.tolist() == ids
        assert capture.hidden_states.tobytes() == states_of(ids, geometry).tobytes()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("codec", ["zstd", "none"])
@pytest.mark.parametrize("chunk", [1 << 30, 256, 100])
def test_what_is_sent_is_what_is_sealed(tmp_path: Path, chunk: int, codec: str, threads: int) -> None:
    with Host(tmp_path, table_rows=700, threads=threads, codec=codec) as host:
        host.capture(PROMPTS, chunk)
    assert_captured(tmp_path, PROMPTS)
    counters = host.writer.counters()
    assert host.released == host.forwards
    assert (counters["records"], counters["queue"], counters["waste_bytes"]) == (len(PROMPTS), 0, 0)
    assert counters["rows"] == sum(map(len, PROMPTS))
    assert counters["raw_bytes"] == counters["rows"] * GEOMETRY.row_bytes
    assert counters["stored_bytes"] == sum(shard.frames_bytes for shard in Reader(tmp_path).shards)
    assert counters["bad_frames"] == counters["failed_proofs"] == counters["write_errors"] == 0


@pytest.mark.parametrize("dtype", Dtype)
def test_every_element_type(tmp_path: Path, dtype: Dtype) -> None:
    geometry = Geometry(3, 40, dtype)
    with Host(tmp_path, geometry, table_rows=300) as host:
        host.capture(PROMPTS[:6])
        host.writer.drain()
        host.capture(PROMPTS[6:])
    assert_captured(tmp_path, PROMPTS, geometry)
    planes = any((shard.index[:, 6] & np.uint64(0xFF) == 1).any() for shard in Reader(tmp_path).shards)
    assert planes == (dtype in (Dtype.BF16, Dtype.FP16))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_schedule(tmp_path: Path, data: st.DataObject) -> None:
    """Prompts in chunks of any size, mixed into forwards in any way, through any number of shards and threads."""
    path = Path(tempfile.mkdtemp(dir=tmp_path))
    lengths = data.draw(st.lists(st.integers(1, 600), min_size=1, max_size=4))
    prompts = [[number, *range(length - 1)] for number, length in enumerate(lengths)]
    options = {
        "shard_bytes": data.draw(st.sampled_from([20_000, 60_000, 1 << 30])),
        "threads": data.draw(st.integers(1, 3)),
    }
    with Host(path, table_rows=data.draw(st.sampled_from([0, 1, 300])), **options) as host:
        records = [host.record(ids) for ids in prompts]
        taken = [0] * len(records)
        while left := [n for n, ids in enumerate(prompts) if taken[n] < len(ids)]:
            parts = []
            for n in data.draw(st.lists(st.sampled_from(left), min_size=1, unique=True)):
                rest = len(prompts[n]) - taken[n]
                tokens = data.draw(st.integers(min(rest, 30), rest))
                parts.append((records[n], states_of(prompts[n]), taken[n], tokens))
                taken[n] += tokens
            host.forward(parts)
    assert_captured(path, prompts)
    assert verify(path, [(str(n), ids, b"") for n, ids in enumerate(prompts)]).ok


def test_one_sample_of_many_chunks(tmp_path: Path) -> None:
    ids = list(range(2561))
    with Host(tmp_path) as host:
        host.capture([ids], chunk=256)
    assert_captured(tmp_path, [ids])


@pytest.mark.parametrize("length", [255, 256, 257, 512, 1, 129])
def test_lengths_around_a_chunk(tmp_path: Path, length: int) -> None:
    with Host(tmp_path) as host:
        host.capture([list(range(length))], chunk=128)
    assert_captured(tmp_path, [list(range(length))])


def test_a_record_spans_shards(tmp_path: Path) -> None:
    with Host(tmp_path, shard_bytes=50_000) as host:
        host.capture(PROMPTS, chunk=100)
    reader = Reader(tmp_path)
    assert len(reader.shards) > 10
    assert_captured(tmp_path, PROMPTS)
    spanning = reader.by_token_ids(PROMPTS[-1])
    assert len({piece.shard.path for piece in reader.pieces(spanning._entry)}) > 1


def test_each_shard_holds_the_table_that_it_needs(tmp_path: Path) -> None:
    table = np.full((4, 72), 120, np.uint8)
    with Host(tmp_path, table=table, shard_bytes=30_000) as host:
        host.capture(PROMPTS)
    shards = Reader(tmp_path).shards
    assert len(shards) > 3
    assert [np.count_nonzero(shard.index[:, 6] & np.uint64(0xFF) == 2) for shard in shards] == [1] * len(shards)
    assert_captured(tmp_path, PROMPTS)


def test_a_prompt_that_ends_in_what_looks_like_padding(tmp_path: Path) -> None:
    prompts = [[5, 6, 0, 0, 0], list(range(60))]
    with Host(tmp_path) as host:
        host.capture(prompts)
    assert_captured(tmp_path, prompts)


def test_duplicates_are_counted_and_not_listed(tmp_path: Path) -> None:
    with Host(tmp_path) as host:
        host.capture([[1, 2, 3], [1, 2, 3]])
        host.writer.drain()
        host.capture([[1, 2, 3], [1, 2, 4]])
    assert_captured(tmp_path, [[1, 2, 3], [1, 2, 4]])
    counters = host.writer.counters()
    assert (counters["records"], counters["duplicates"]) == (2, 2)
    assert counters["waste_bytes"] > 0
    assert Reader(tmp_path).duplicates == []


def test_the_same_prompt_under_other_weights_is_no_duplicate(tmp_path: Path) -> None:
    with Host(tmp_path) as host:
        host.capture([[1, 2, 3]])
        host.writer.drain()
        host.writer.set_facts(facts(epoch="weights-2", writer=host.facts.writer))
        host.capture([[1, 2, 3]])
    assert host.writer.counters()["duplicates"] == 0
    assert Reader(tmp_path).epochs == ["weights-1", "weights-2"]


def test_no_record_crosses_a_change_of_weights(tmp_path: Path) -> None:
    ids = list(range(40))
    with Host(tmp_path) as host:
        record, states = host.record(ids), states_of(ids)
        host.forward([(record, states, 0, 20)])
        host.writer.drain()
        host.writer.set_facts(facts(epoch="weights-2", writer=host.facts.writer))
        host.forward([(record, states, 20, 20)])
    assert len(Reader(tmp_path)) == 0
    assert host.writer.counters()["waste_bytes"] > 0


def test_tokens_that_the_forward_did_not_consume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Host(tmp_path) as host:
        wrong, right = host.record([1, 2, 3]), host.record([4, 5])
        parts = [(wrong, states_of([1, 2, 3]), 0, 3), (right, states_of([4, 5]), 0, 2)]
        host.forward(parts, consumed=[1, 2, 7, 4, 5])
    assert_captured(tmp_path, [[4, 5]])
    assert host.writer.counters()["failed_proofs"] == 1
    assert f"the prompt {wrong.key.hex()} is not stored: the forward consumed other tokens" in caplog.text


def test_positions_that_the_forward_swapped(tmp_path: Path) -> None:
    """Additive proofs still tell [1, 2, 3] from [2, 1, 3]: each token is mixed with its position."""
    with Host(tmp_path) as host:
        host.forward([(host.record([1, 2, 3]), states_of([1, 2, 3]), 0, 3)], consumed=[2, 1, 3])
    assert host.writer.counters()["failed_proofs"] == 1


@pytest.mark.parametrize(
    "position", [0, 9, 20, 30, 41, HEADER_BYTES, HEADER_BYTES + 1000, HEADER_BYTES + 3 * GEOMETRY.row_bytes]
)
@pytest.mark.parametrize("planes", [False, True])
def test_a_byte_that_changed_on_the_way(
    tmp_path: Path, planes: bool, position: int, caplog: pytest.LogCaptureFixture
) -> None:
    def spoil(buffer: npt.NDArray[np.uint8]) -> None:
        buffer[position] ^= 0x10

    table = np.full((4, 72), 120, np.uint8) if planes else None
    with Host(tmp_path, table=table) as host:
        record = host.record([1, 2, 3])
        host.forward([(record, states_of([1, 2, 3]), 0, 3)], spoil=spoil)
        host.capture([[4, 5]])
    assert_captured(tmp_path, [[4, 5]])
    counters = host.writer.counters()
    assert (counters["bad_frames"], counters["records"], host.released) == (1, 1, 2)
    assert f"the prompt {record.key.hex()} is not stored" in caplog.text


def test_a_frame_of_another_pass(tmp_path: Path) -> None:
    with Host(tmp_path) as host:
        mine, other = host.record([1, 2, 3]), host.record([1, 2, 3])
        host.forward([(mine, states_of([1, 2, 3]), 0, 3)], owner=other)
    assert host.writer.counters()["bad_frames"] == 1
    assert host.directory.shards() == []


def test_rows_that_come_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ids = list(range(10))
    with Host(tmp_path) as host:
        record, states = host.record(ids), states_of(ids)
        host.forward([(record, states, 0, 5)])
        host.forward([(record, states, 0, 5)])
    assert len(Reader(tmp_path)) == 0
    assert "some of its rows came twice" in caplog.text


def test_the_writer_waits_for_the_bytes(tmp_path: Path) -> None:
    """The copy takes its time; whoever reads too early finds the fill pattern."""
    ids = list(range(300))
    right: list[npt.NDArray[np.uint8]] = []
    target: list[npt.NDArray[np.uint8]] = []

    def not_yet(buffer: npt.NDArray[np.uint8]) -> None:
        right.append(buffer.copy())
        target.append(buffer)
        buffer[:] = 0x5A

    def land() -> None:
        time.sleep(0.2)
        target[0][:] = right[0]

    with Host(tmp_path) as host:
        host.forward([(host.record(ids), states_of(ids), 0, 300)], spoil=not_yet, wait=land)
    assert_captured(tmp_path, [ids])


def test_a_flight_that_does_not_arrive(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    with Host(tmp_path) as host:
        host.forward([(host.record([1, 2]), states_of([1, 2]), 0, 2)], wait=fail)
        host.capture([[4, 5]])
    assert_captured(tmp_path, [[4, 5]])
    assert (host.released, host.writer.counters()["bad_frames"]) == (2, 1)
    assert "illegal memory access" in caplog.text


def test_rows_between_the_samples_are_left_to_verify(tmp_path: Path) -> None:
    """The writer recomputes the checksums of some rows, ``verify`` those of all."""

    def spoil_row(row: int) -> Callable[[npt.NDArray[np.uint8]], None]:
        def spoil(buffer: npt.NDArray[np.uint8]) -> None:
            buffer[HEADER_BYTES + row * GEOMETRY.row_bytes + 5] ^= 0x10

        return spoil

    ids = list(range(256))
    with Host(tmp_path) as host:
        for row in (0, 47, 255):
            host.forward([(host.record(ids), states_of(ids), 0, 256)], spoil=spoil_row(row))
        wait_for(lambda: host.writer.counters()["bad_frames"] == 3)
        host.forward([(host.record(ids), states_of(ids), 0, 256)], spoil=spoil_row(7))
    (problem,) = verify(tmp_path).problems
    assert (problem.kind, problem.rows) == ("row_sum", ((7, 8),))


def test_a_table_that_nobody_made(tmp_path: Path) -> None:
    table = np.full((4, 72), 120, np.uint8)
    with Host(tmp_path, table=table) as host:
        host.known_tables.clear()
        host.capture([[1, 2]])
    assert host.writer.counters()["bad_frames"] == 1
    assert host.directory.shards() == []


def test_an_abandoned_pass_leaves_nothing_but_waste(tmp_path: Path) -> None:
    ids = list(range(40))
    with Host(tmp_path) as host:
        record, states = host.record(ids), states_of(ids)
        host.forward([(record, states, 0, 20)])
        host.writer.abandon(record.serial)
        host.capture([ids])
    assert_captured(tmp_path, [ids])
    counters = host.writer.counters()
    assert (counters["records"], counters["duplicates"]) == (1, 0)
    assert len(host.writer._ledger) == 0
    assert counters["waste_bytes"] > 0


def test_abandoned_while_its_frames_are_under_way(tmp_path: Path) -> None:
    ids = list(range(40))
    landed = threading.Event()
    with Host(tmp_path, threads=1) as host:
        record, states = host.record(ids), states_of(ids)
        host.forward([(record, states, 0, 20)], wait=landed.wait)
        host.writer.abandon(record.serial)
        host.forward([(record, states, 20, 10)])
        landed.set()
    assert len(host.writer._ledger) == 0
    assert host.directory.shards() == host.directory.partials() == []


def test_an_abandoned_pass_makes_no_shard(tmp_path: Path) -> None:
    ids = list(range(40))
    with Host(tmp_path) as host:
        record = host.record(ids)
        host.forward([(record, states_of(ids), 0, 20)])
        host.writer.abandon(record.serial)
    assert host.directory.shards() == host.directory.partials() == []


def test_a_pass_in_flight_keeps_its_first_shard(tmp_path: Path) -> None:
    ids = list(range(40))
    with Host(tmp_path) as host:
        record, states = host.record(ids), states_of(ids)
        host.forward([(record, states, 0, 20)])
        host.writer.drain()
        assert len(host.directory.shards()) == 1
        assert len(Reader(tmp_path)) == 0
        host.forward([(record, states, 20, 20)])
    assert_captured(tmp_path, [ids])


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_no_shard_is_empty(tmp_path: Path, count: int) -> None:
    """The size of a shard is that of two prompts."""
    prompts = [[n] * 50 for n in range(count)]
    with Host(tmp_path, codec="none", shard_bytes=2 * GEOMETRY.frame_bytes(50)) as host:
        for ids in prompts:
            host.capture([ids])
    assert len(host.directory.shards()) == [0, 1, 1, 2][count]
    assert host.directory.partials() == []
    assert all(len(read_shard(path).records) for path in host.directory.shards())
    assert_captured(tmp_path, prompts)


def test_no_shard_has_more_frames_than_a_reader_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hashtap.shard_sequence.MAX_FRAMES", 32)
    prompts = [[n] for n in range(200)]
    with Host(tmp_path, threads=2) as host:
        for ids in prompts:
            host.capture([ids])
    assert_captured(tmp_path, prompts)
    sizes = [len(shard.index) for shard in Reader(tmp_path).shards]
    assert max(sizes) <= 32
    assert len(sizes) == 7


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The frame of [1, 2, 3] is compressed only once this is set."""
    come = threading.Event()

    def store(frame: Any, header: Header, *rest: Any) -> Any:
        if header.total_tokens == 3:
            assert come.wait(20)
        return store_frame(frame, header, *rest)

    monkeypatch.setattr("hashtap.writer.store_frame", store)
    return come


def capture_sharing(host: Host, count: int) -> list[list[int]]:
    """Send [1, 2, 3] and prompts that share its rows, each with one of its own; returns these."""
    (donor,) = host.capture([[1, 2, 3]])
    prompts = [[1, 2, 3, n] for n in range(count)]
    for ids in prompts:
        record = host.record(ids)
        record.donor, record.shared_tokens = donor, 3
        host.forward([(record, states_of(ids), 3, 1)])
    return prompts


def assert_sharing(reader: Reader, prompts: list[list[int]]) -> None:
    for ids in prompts:
        states = reader.by_token_ids(ids).hidden_states
        assert states.tobytes() == states_of([1, 2, 3]).tobytes() + states_of(ids)[3:].tobytes()


def test_a_late_donor_is_listed_with_all_that_wait_for_it(tmp_path: Path, late: threading.Event) -> None:
    """Its one frame goes to a shard of its own, which then lists more records than it has frames."""
    with Host(tmp_path, threads=2, codec="none", shard_bytes=1) as host:
        prompts = capture_sharing(host, 5)
        wait_for(lambda: host.writer.counters()["shards"] == 5)
        late.set()
    reader = Reader(tmp_path)
    assert [len(shard.index) for shard in reader.shards] == [1] * 6
    assert [len(shard.records) for shard in reader.shards] == [0] * 5 + [6]
    assert_sharing(reader, prompts)
    assert verify(tmp_path).ok


@pytest.mark.slow
def test_200000_prompts_of_one_token(tmp_path: Path) -> None:
    """A header does not grow with them, and all can be opened and found."""
    geometry = Geometry(1, 8)
    states = states_of([1], geometry)
    with Host(tmp_path, geometry, codec="none", seal_after_s=60.0) as host:
        for start in range(0, 200_000, 500):
            host.forward([(host.record([n]), states, 0, 1) for n in range(start, start + 500)])
    reader = Reader(tmp_path)
    assert len(reader) == 200_000
    for shard in reader.shards:
        assert shard.frames_at == 4096
    for number in (0, 1, 99_999, 199_999):
        assert (reader.by_token_ids([number]).hidden_states == states).all()


def test_a_shard_is_sealed_when_no_rows_come(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hashtap")
    with Host(tmp_path, seal_after_s=0.1) as host:
        host.capture([[1, 2, 3]])
        wait_for(lambda: bool(host.directory.shards()))
        assert_captured(tmp_path, [[1, 2, 3]])
        host.capture([[4, 5]])
        wait_for(lambda: len(host.directory.shards()) == 2)
    assert [line.split(": ")[1][:17] for line in caplog.messages] == ["1 records, 3 rows", "1 records, 2 rows"]


def test_a_shard_that_goes_on_getting_rows_is_sealed_by_age(tmp_path: Path) -> None:
    """Rows come faster than ``seal_after_s`` for longer than twelve times that."""
    with Host(tmp_path, seal_after_s=0.25) as host:
        started = time.monotonic()
        sent = 0
        while not host.directory.shards():
            host.capture([[sent]])
            sent += 1
            assert time.monotonic() < started + 20
            time.sleep(0.002)
        assert time.monotonic() - started >= 3
        assert len(Reader(tmp_path)) > sent // 2
    assert_captured(tmp_path, [[n] for n in range(sent)])


def test_only_whole_files_are_ever_visible(tmp_path: Path) -> None:
    stop = threading.Event()
    seen: set[str] = set()

    def poll(directory: Any) -> None:
        while not stop.is_set():
            for path in directory.shards():
                read_shard(path)
                seen.add(path.name)

    with Host(tmp_path, shard_bytes=40_000) as host:
        poller = threading.Thread(target=poll, args=[host.directory])
        poller.start()
        for start in range(0, 2000, 100):
            host.capture([list(range(start, start + 200))])
    stop.set()
    poller.join()
    assert len(seen) > 3


def test_two_writers_share_a_directory(tmp_path: Path) -> None:
    with Host(tmp_path, shard_bytes=40_000) as one, Host(tmp_path, shard_bytes=40_000) as two:
        one.capture(PROMPTS[::2])
        two.capture(PROMPTS[1::2])
    assert_captured(tmp_path, PROMPTS)


def test_a_closed_writer_gives_memory_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    host = Host(tmp_path)
    host.writer.close()
    host.writer.close()
    host.capture([[1, 2]])
    assert host.released == 1
    assert "after the writer was closed" in caplog.text
    assert host.directory.shards() == []


# Disks.


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A disk that takes so many more bytes, then is full: the last write is a short one."""
    left = [1 << 60]
    pwrite, truncate = os.pwrite, os.ftruncate

    def limited(descriptor: int, data: memoryview, at: int) -> int:
        end = os.fstat(descriptor).st_size
        if not (count := min(len(data), end + left[0] - at)):
            raise OSError(28, "No space left on device")
        left[0] -= max(0, at + count - end)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)
        return pwrite(descriptor, data[:count], at)

    def cut(descriptor: int, end: int) -> None:
        left[0] += os.fstat(descriptor).st_size - end
        truncate(descriptor, end)

    monkeypatch.setattr("os.pwrite", limited)
    monkeypatch.setattr("os.ftruncate", cut)
    return lambda count: left.__setitem__(0, count)


def test_short_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr("os.pwrite", lambda fd, data, at: pwrite(fd, bytes(data[:1000]), at))
    with Host(tmp_path) as host:
        host.capture(PROMPTS[:5])
    assert_captured(tmp_path, PROMPTS[:5])


def test_frames_larger_than_the_buffer(tmp_path: Path) -> None:
    geometry = Geometry(4, 4096)
    prompts = [[n] * 200 for n in range(4)]
    with Host(tmp_path, geometry, codec="none") as host:
        host.capture(prompts)
    assert_captured(tmp_path, prompts, geometry)


def test_what_is_idle_survives_the_process(tmp_path: Path) -> None:
    """Nothing waits in memory for the next rows."""
    with Host(tmp_path, codec="none") as host:
        host.capture([[1, 2, 3]])
        host.settle()
        (partial,) = host.directory.partials()
        assert states_of([1, 2, 3]).tobytes() in partial.read_bytes()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_full_disk_is_waited_for(
    tmp_path: Path, full: Callable[[int], None], caplog: pytest.LogCaptureFixture, threads: int
) -> None:
    """What was captured waits, in the middle of a frame too, and nothing is lost."""
    with Host(tmp_path, threads=threads) as host:
        host.capture([[1] * 100])
        host.settle()
        full(10_000)
        host.capture([[n] * 100 for n in range(2, 8)])
        wait_for(lambda: host.writer.counters()["write_errors"] > 1)
        assert host.writer.trouble == "No space left on device"
        full(1 << 60)
        host.capture([[8] * 100])
        host.settle()
        host.writer.drain()
        assert host.writer.trouble == ""
    assert_captured(tmp_path, [[n] * 100 for n in range(1, 9)])
    assert host.released == host.forwards
    assert len([line for line in caplog.messages if "No space left" in line]) == 1
    assert "New prompts wait for the ring" in caplog.text
    assert "can be written to again" in caplog.text


def test_the_end_does_not_wait_for_a_full_disk(
    tmp_path: Path, full: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    """What was written before is sealed, the rest is lost whole, and said to be."""
    with Host(tmp_path) as host:
        host.capture([[1] * 100])
        host.settle()
        full(10_000)
        host.capture([[n] * 100 for n in range(2, 8)])
        wait_for(lambda: host.writer.counters()["write_errors"] > 0)
    assert_captured(tmp_path, [[1] * 100])
    assert (host.released, host.directory.partials()) == (host.forwards, [])
    assert "Prompts are lost until this is mended" in caplog.text


@pytest.mark.parametrize("code", [2, 13, 30, 116])
def test_a_disk_that_takes_no_file_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Unmounted, not allowed, read-only, a stale handle: what is captured waits until it is mended."""
    opened = os.open

    def fail(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(code, os.strerror(code))
        return opened(path, flags, *more, **options)

    with Host(tmp_path) as host:
        with monkeypatch.context() as patch:
            patch.setattr("os.open", fail)
            host.capture([[1, 2, 3]])
            wait_for(lambda: host.writer.counters()["write_errors"] > 0)
            assert (host.writer.trouble, host.released) == (os.strerror(code), 0)
        host.capture([[4, 5]])
    assert_captured(tmp_path, [[1, 2, 3], [4, 5]])


def test_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's thread never waits for it; nothing is lost, however long the queue gets."""
    pwrite, fsync = os.pwrite, os.fsync

    def slow(real: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any) -> Any:
            time.sleep(0.1)
            return real(*arguments)

        return slow

    prompts = [[n] * 100 for n in range(20)]
    with Host(tmp_path, shard_bytes=100_000) as host:
        monkeypatch.setattr("os.pwrite", slow(pwrite))
        monkeypatch.setattr("os.fsync", slow(fsync))
        submit, waited_s = host.writer.submit, []

        def timed(flight: Any) -> None:
            began = time.monotonic()
            submit(flight)
            waited_s.append(time.monotonic() - began)

        monkeypatch.setattr(host.writer, "submit", timed)
        for ids in prompts:
            host.capture([ids])
        assert host.writer.counters()["queue"] > 5
        assert sorted(waited_s)[len(waited_s) // 2] < 0.05
    assert_captured(tmp_path, prompts)


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the next write fail with an error."""
    pwrite, codes = os.pwrite, list[int]()

    def fail_once(descriptor: int, data: memoryview, at: int) -> int:
        if codes:
            raise OSError(codes[0], os.strerror(codes.pop()))
        return pwrite(descriptor, data, at)

    monkeypatch.setattr("os.pwrite", fail_once)
    return codes.append


@pytest.mark.parametrize("code", [28, 122, 30])
def test_a_disk_that_takes_nothing_for_a_moment(tmp_path: Path, fails: Callable[[int], None], code: int) -> None:
    prompts = [[n] * 100 for n in range(10)]
    with Host(tmp_path, threads=1) as host:
        host.capture(prompts[:5])
        host.settle()
        fails(code)
        host.capture(prompts[5:])
        host.settle()
    assert_captured(tmp_path, prompts)
    assert host.writer.counters()["write_errors"] == 1


def test_a_write_that_fails_takes_nothing_else_along(tmp_path: Path, fails: Callable[[int], None]) -> None:
    """A broken disk: what was written before is sealed, what was not is lost whole."""
    prompts = [[n] * 100 for n in range(10)]
    with Host(tmp_path, threads=1) as host:
        host.capture(prompts)
        host.settle()
        fails(5)
        host.capture([[20] * 100])
        wait_for(lambda: host.writer.counters()["shards"] == 1)
        assert_captured(tmp_path, prompts)
        host.capture([[20] * 100, prompts[0]])
    assert_captured(tmp_path, [*prompts, [20] * 100])
    assert verify(tmp_path).ok
    counters = host.writer.counters()
    assert (counters["write_errors"], counters["records"], counters["duplicates"]) == (1, 11, 1)


def test_a_full_disk_at_the_seal(tmp_path: Path, full: Callable[[int], None]) -> None:
    """The last frames give way to the index; the rest is kept."""
    with Host(tmp_path, threads=1) as host:
        host.capture([[n] * 100 for n in range(20)])
        host.settle()
        full(0)
        host.writer.drain()
        assert_captured(tmp_path, [[n] * 100 for n in range(19)])
        full(1 << 60)
        host.capture([[19] * 100])
    assert_captured(tmp_path, [[n] * 100 for n in range(20)])
    counters = host.writer.counters()
    assert (counters["write_errors"], counters["duplicates"], counters["records"]) == (1, 0, 20)


def test_a_full_disk_at_the_seal_of_more_records_than_frames(
    tmp_path: Path, full: Callable[[int], None], late: threading.Event
) -> None:
    """As many frames give way as the records take."""
    frame_bytes = 768
    with Host(tmp_path, threads=2, codec="none", shard_bytes=12 * frame_bytes) as host:
        prompts = capture_sharing(host, 12)
        wait_for(lambda: host.writer.counters()["shards"] == 1)
        late.set()
        host.settle()
        host.capture([[n] for n in range(5)])
        host.settle()
        full(0)
        host.writer.drain()
        full(1 << 60)
    reader = Reader(tmp_path)
    assert [(len(shard.index), len(shard.records)) for shard in reader.shards] == [(12, 0), (3, 15)]
    assert_sharing(reader, prompts)
    assert verify(tmp_path).ok


def test_a_disk_too_full_for_any_shard(tmp_path: Path, full: Callable[[int], None]) -> None:
    with Host(tmp_path, threads=1) as host:
        host.capture([[1]])
        host.settle()
        full(0)
        host.writer.drain()
        assert host.directory.shards() == host.directory.partials() == []
        full(1 << 60)
        host.capture([[1]])
    assert_captured(tmp_path, [[1]])
    assert host.writer.counters()["duplicates"] == 0


@pytest.mark.parametrize("step", ["os.fsync", "pathlib.Path.rename"])
def test_a_step_of_sealing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with Host(tmp_path) as host:
        host.capture([[1, 2, 3]])
        with monkeypatch.context() as patch:
            patch.setattr(step, fail)
            host.writer.drain()
        assert host.directory.shards() == host.directory.partials() == []
        host.capture([[1, 2, 3]])
    assert_captured(tmp_path, [[1, 2, 3]])


@pytest.mark.parametrize("code", [5, 28, 122])
def test_a_sync_that_failed_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A second one would succeed, though the pages of the first may be gone: all of the shard is lost, and told."""
    fsync, codes, lost = os.fsync, [code], list[Record]()

    def fail_once(descriptor: int) -> None:
        if codes:
            raise OSError(codes[0], os.strerror(codes.pop()))
        fsync(descriptor)

    with Host(tmp_path, failed=lost.append) as host:
        records = host.capture([[1, 2, 3], [4]])
        host.settle()
        monkeypatch.setattr("os.fsync", fail_once)
        host.writer.drain()
        assert host.directory.shards() == host.directory.partials() == []
        assert {record.serial for record in lost} == {record.serial for record in records}
        assert host.writer.trouble == f"cannot sync: {os.strerror(code)}"
        counters = host.writer.counters()
        assert (counters["write_errors"], counters["records"], counters["shards"]) == (1, 0, 0)
        host.capture([[1, 2, 3], [4]])
    assert_captured(tmp_path, [[1, 2, 3], [4]])
    assert host.writer.trouble == ""


def test_the_directory_cannot_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Readers may have seen the shard by then: it stays, and its records are not captured twice."""

    def fail(_: object) -> None:
        raise OSError(5, "Input/output error")

    with Host(tmp_path) as host:
        host.capture([[1, 2, 3]])
        with monkeypatch.context() as patch:
            patch.setattr("hashtap.shard_sequence.sync_directory", fail)
            host.writer.drain()
        assert_captured(tmp_path, [[1, 2, 3]])
        assert "a power cut may lose it: cannot sync its directory" in caplog.text
        host.capture([[1, 2, 3], [4]])
    assert_captured(tmp_path, [[1, 2, 3], [4]])
    counters = host.writer.counters()
    assert (counters["write_errors"], counters["records"], counters["duplicates"]) == (1, 2, 1)


def test_a_record_goes_with_its_first_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second half is in a later shard, where it would be listed."""
    ids = list(range(40))
    seal = ShardFile.seal

    def fail_the_first(shard: ShardFile, records: Any) -> int:
        if shard.number == 0:
            raise OSError(5, "Input/output error")
        return seal(shard, records)

    monkeypatch.setattr(ShardFile, "seal", fail_the_first)
    with Host(tmp_path) as host:
        record, states = host.record(ids), states_of(ids)
        host.forward([(record, states, 0, 20)])
        host.writer.drain()
        host.forward([(record, states, 20, 20), (host.record([7]), states_of([7]), 0, 1)])
    assert_captured(tmp_path, [[7]])
    assert Reader(tmp_path).incomplete == []


def test_a_torn_frame_that_cannot_be_cut_off(
    tmp_path: Path, full: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with Host(tmp_path, threads=1) as host:
        host.capture([[1] * 100])
        host.settle()
        full(5000)
        with monkeypatch.context() as patch:
            patch.setattr("os.ftruncate", fail)
            host.capture([[2] * 100])
            host.writer.drain()
        full(1 << 60)
        assert host.directory.shards() == host.directory.partials() == []
        host.capture([[1] * 100, [2] * 100])
    assert_captured(tmp_path, [[1] * 100, [2] * 100])


@pytest.mark.parametrize("instead", [None, "", "{", '{"format": 1, "uuid": "00000000-0000-4000-8000-000000000000"}'])
def test_a_directory_that_went_away(tmp_path: Path, instead: str | None) -> None:
    """Nothing is written to what stands in its place; once it is back, what was captured meanwhile is."""
    path, away = tmp_path / "captures", tmp_path / "away"
    with Host(path) as host:
        path.rename(away)
        if instead is not None:
            path.mkdir()
            (path / "hashtap.json").write_text(instead)
        host.capture([[1, 2, 3]])
        wait_for(lambda: host.writer.counters()["write_errors"] == 2)
        assert [file.name for file in tmp_path.glob("captures/*")] == ["hashtap.json"] * (instead is not None)
        assert host.writer.trouble.startswith("no longer the directory" if instead is not None else "No such file")
        path.rename(tmp_path / "instead") if instead is not None else None
        away.rename(path)
        host.capture([[1, 2, 3], [4]])
    assert_captured(path, [[1, 2, 3], [4]])


def test_a_name_that_is_taken(tmp_path: Path) -> None:
    with Host(tmp_path, changes={"writer": "a" * 32}) as host:
        host.capture([[1, 2, 3]])
    before = host.directory.shards()[0].read_bytes()
    with Host(tmp_path, changes={"writer": "a" * 8 + "b" * 24}) as other:
        other.capture([[4, 5]])
        other.writer.drain()
        other.capture([[6]])
    assert other.writer.counters()["write_errors"] == 0
    assert host.directory.shards()[0].read_bytes() == before
    assert_captured(tmp_path, [[1, 2, 3], [4, 5], [6]])


# The end of the process.

_CHILD = """
import multiprocessing, os, signal, sys, time
from pathlib import Path
from tests.capture.build import Host

def run(path, end):
    host = Host(Path(path))
    host.capture([[1, 2, 3], list(range(700))])
    if end == "kill":
        while host.writer.counters()["queue"]:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    path, end = sys.argv[1:]
    if end == "child":
        process = multiprocessing.get_context("fork").Process(target=run, args=(path, "return"))
        process.start()
        process.join()
    else:
        run(path, end)
"""


def run_child(path: Path, end: str) -> int:
    root = Path(__file__).parent.parent.parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    return subprocess.run([sys.executable, "-c", _CHILD, str(path), end], env=env, timeout=60).returncode


@pytest.mark.parametrize("end", ["return", "child"])
def test_a_process_that_ends_without_closing_seals(tmp_path: Path, end: str) -> None:
    assert run_child(tmp_path, end) == 0
    assert_captured(tmp_path, [[1, 2, 3], list(range(700))])


def test_a_killed_process_leaves_a_partial_that_nobody_reads(tmp_path: Path) -> None:
    assert run_child(tmp_path, "kill") == -signal.SIGKILL
    reader = Reader(tmp_path)
    assert len(reader) == 0
    (partial,) = reader.directory.partials()
    with pytest.raises(FormatError, match="its writer did not finish"):
        read_shard(partial)
    with Host(tmp_path) as host:
        host.capture([[1, 2, 3]])
    assert_captured(tmp_path, [[1, 2, 3]])
    assert host.directory.partials() == [partial]


def test_a_forked_child_leaves_the_shard_alone(tmp_path: Path) -> None:
    with Host(tmp_path) as host:
        host.capture([[1, 2, 3]])
        wait_for(lambda: host.writer.counters()["queue"] == 0)
        pid = os.fork()
        if pid == 0:
            host.writer.close()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert len(host.directory.partials()) == 1
    assert_captured(tmp_path, [[1, 2, 3]])
