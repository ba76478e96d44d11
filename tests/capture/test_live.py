"""A stream over a directory that still grows: every record once, in the order of sealing, whoever dies meanwhile."""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.responses import PlainTextResponse
from tests.capture.build import Host, states_of
from tests.capture.peer import Answer, Peer
from tests.capture.test_extract import Log, extract, free_port, prompts, start_peer, write
from tests.server.waiting import wait_until
from torch.utils.data import DataLoader

from hashtap.collate import Batch, pack
from hashtap.errors import FormatError, MismatchError, ServerLost, UsageError
from hashtap.extract import Extraction, ExtractOptions
from hashtap.identity import prompt_key
from hashtap.live import LiveStream
from hashtap.manifest import Manifest
from hashtap.order import SealingOrder
from hashtap.reader import NotCaptured, Reader
from hashtap.report import Problem
from hashtap.samples import Sample as ListedSample
from hashtap.set_aside import add_set_aside

EPOCH = "weights-1"


@pytest.fixture(autouse=True)
def _quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("extract.POLL_S", 0.05), ("extract.ASK_EVERY_S", 0.2), ("lead._LOOK_EVERY_S", 0.02)):
        monkeypatch.setattr(f"hashtap.{name}", seconds)


def numbered(first: int, stop: int) -> list[list[int]]:
    """Prompts of different lengths, each known by its first token."""
    return [[number, *range(number % 7)] for number in range(first, stop)]


def seal(host: Host, first: int, stop: int) -> None:
    host.capture(numbered(first, stop))
    host.writer.drain()


def stream(path: Path, *, idle_s: float | None = 0.2, **options: Any) -> LiveStream:
    settings: dict[str, Any] = {"poll_s": 0.02, "rank": 0, "world_size": 1, **options}
    if "max_tokens" not in settings:
        settings.setdefault("batch_size", 2)
    return LiveStream(path, idle_s=idle_s, **settings)


def numbers(batch: Batch) -> list[int]:
    return [int(row[0]) for row in batch["input_ids"]]


def all_numbers(batches: Iterable[Batch]) -> list[int]:
    return [number for batch in batches for number in numbers(batch)]


def set_aside(path: Path, *chosen: int) -> None:
    captures = [Reader(path).by_token_ids(numbered(number, number + 1)[0]) for number in chosen]
    problems = [Problem("nan", "rows are", writer=each.facts.writer, serial=each.serial) for each in captures]
    assert add_set_aside(path, problems) == len(chosen)


def names(path: Path, chosen: Sequence[list[int]], uuid: str, first: int = 0) -> None:
    samples = [
        ListedSample(f"s{n}", n, prompt_key(ids), np.array(ids, np.int32), np.arange(len(ids), dtype=np.uint8) % 2)
        for n, ids in enumerate(chosen, first)
    ]
    Manifest.merge(path, samples, epoch=EPOCH, directory_uuid=uuid)


def in_child(work: Callable[[], None]) -> int:
    """Do it in a process of its own; its id."""
    if (child := os.fork()) == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return child


def test_records_come_in_the_order_of_sealing(tmp_path: Path) -> None:
    """Of two writers whose shards' names are in another order; within a shard as they arrived."""
    with Host(tmp_path, threads=1) as one, Host(tmp_path, threads=1) as two:
        for at in range(0, 12, 3):
            seal(one if at % 2 else two, at, at + 3)
            time.sleep(0.01)
    batches = list(stream(tmp_path))
    assert [numbers(batch) for batch in batches] == [[n, n + 1] for n in range(0, 12, 2)]
    for batch in batches:
        for row, mask, states in zip(batch["input_ids"], batch["attention_mask"], batch["hidden_states"], strict=True):
            bits = states[mask].view(dtype=torch.int16).numpy().view(np.uint16)
            assert (bits == states_of(row[mask].tolist())).all()


def test_it_follows_a_writer(tmp_path: Path) -> None:
    """Before the first shard, while more come, and to the end, which leaves a short batch."""
    host = Host(tmp_path, threads=1)

    def write_on() -> None:
        for first in (0, 5, 6, 13):
            time.sleep(0.1)
            seal(host, first, {0: 5, 5: 6, 6: 13, 13: 21}[first])
        host.writer.close()

    writing = threading.Thread(target=write_on)
    writing.start()
    found = [numbers(batch) for batch in stream(tmp_path, idle_s=1.0)]
    writing.join()
    assert found == [[n, n + 1] for n in range(0, 20, 2)] + [[20]]


def test_a_prompt_that_is_captured_again_comes_once(tmp_path: Path) -> None:
    with Host(tmp_path, threads=1) as host:
        seal(host, 0, 4)
        live = iter(stream(tmp_path))
        assert numbers(next(live)) == [0, 1]
        with Host(tmp_path, threads=1) as other:
            seal(other, 1, 6)
        assert all_numbers(live) == [2, 3, 4, 5]
    assert len(Reader(tmp_path).duplicates) == 3


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("taken", [1, 3])
def test_going_on_while_it_grows(tmp_path: Path, workers: int, taken: int) -> None:
    """A trainer is killed after some batches, more is sealed meanwhile, and another number of workers goes on."""
    with Host(tmp_path, threads=1) as host:
        seal(host, 0, 7)
    first = iter(stream(tmp_path))
    states = [next(first)["state"] for _ in range(taken)]
    with Host(tmp_path, threads=1) as host:
        seal(host, 7, 16)
    rest = stream(tmp_path)
    rest.load_state_dict(json.loads(json.dumps(states[-1])))
    loader = DataLoader(rest, batch_size=None, num_workers=workers, multiprocessing_context="fork" if workers else None)
    assert all_numbers(loader) == list(range(2 * taken, 16))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_ranks_and_workers_follow_a_writer(tmp_path: Path) -> None:
    """A writer in a process of its own, two ranks of two workers each: no record twice, none is missing."""
    Host(tmp_path).writer.close()

    def write_on() -> None:
        with Host(tmp_path, threads=1) as host:
            for at in range(0, 40, 5):
                seal(host, at, at + 5)
                time.sleep(0.05)

    def follow(rank: int) -> None:
        source = stream(tmp_path, rank=rank, world_size=2, idle_s=2.0)
        loader = DataLoader(source, batch_size=None, num_workers=2, multiprocessing_context="fork")
        (tmp_path / f"rank{rank}").write_text(json.dumps([numbers(batch) for batch in loader]))

    children = [in_child(write_on), in_child(lambda: follow(0)), in_child(lambda: follow(1))]
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    found = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)]
    assert found[0] == [[n, n + 1] for n in range(0, 40, 4)]
    assert found[1] == [[n + 2, n + 3] for n in range(0, 40, 4)]


def test_all_ranks_get_equally_many(tmp_path: Path) -> None:
    with Host(tmp_path, threads=1) as host:
        seal(host, 0, 9)
    parts = [[numbers(batch) for batch in stream(tmp_path, rank=rank, world_size=2)] for rank in range(2)]
    assert parts == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    parts = [[numbers(batch) for batch in stream(tmp_path, rank=rank, world_size=5)] for rank in range(5)]
    assert parts == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]], [[8]]]
    assert list(stream(tmp_path, rank=0, world_size=6)) == []


def test_a_killed_trainer_holds_nobody_up(tmp_path: Path) -> None:
    """It dies at any moment, and half a row of the order is left."""
    with Host(tmp_path, threads=1) as host:
        seal(host, 0, 6)
        child = in_child(lambda: (list(stream(tmp_path, idle_s=60)), None)[1])
        order = SealingOrder(tmp_path, EPOCH)
        while len(order) < 6:
            order.look()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        (path,) = tmp_path.glob(".hashtap-order-*")
        with path.open("ab") as file:
            file.write(b"\x17" * 9)
        seal(host, 6, 10)
    assert all_numbers(stream(tmp_path)) == list(range(10))
    with path.open("ab") as file:
        file.write(bytes(48))  # as after a power cut
    with Host(tmp_path, threads=1) as host:
        seal(host, 10, 12)
    assert all_numbers(stream(tmp_path)) == list(range(12))


def test_as_many_as_fit(tmp_path: Path) -> None:
    with Host(tmp_path, threads=1) as host:
        seal(host, 0, 10)  # of 1 2 3 4 5 6 7 1 2 3 tokens
        live = iter(stream(tmp_path, max_tokens=6, collate=pack))
        found = [next(live)["lengths"].tolist() for _ in range(5)]
        seal(host, 10, 12)
        found += [batch["lengths"].tolist() for batch in live]
    assert found == [[1, 2, 3], [4], [5], [6], [7], [1, 2, 3], [4], [5]]


def test_it_ends_with_so_many(tmp_path: Path) -> None:
    with Host(tmp_path, threads=1) as host:
        seal(host, 0, 9)
    source = stream(tmp_path, idle_s=None, count=5)
    batches = list(source)
    assert [numbers(batch) for batch in batches] == [[0, 1], [2, 3], [4]]
    source.load_state_dict(batches[1]["state"])
    assert all_numbers(source) == [4]


def test_samples_are_those_of_the_manifest(tmp_path: Path) -> None:
    """What it does not name is left out, until it does."""
    with Host(tmp_path, threads=1) as host:
        seal(host, 0, 6)
        uuid = host.directory.uuid
        names(tmp_path, [numbered(3, 4)[0], numbered(1, 2)[0], numbered(3, 4)[0]], uuid)
        live = iter(stream(tmp_path))
        batch = next(live)
        assert batch["sample_ids"] == ["s1", "s0"]  # s2 has the prompt of s0
        assert batch["loss_mask"].int().tolist() == [[0, 1, 0, 0], [0, 1, 0, 1]]
        names(tmp_path, numbered(0, 3), uuid, first=3)
        seal(host, 6, 7)
        assert [batch["sample_ids"] for batch in live] == [["s3", "s5"]]


def test_an_end_that_was_none(tmp_path: Path) -> None:
    """Whoever ended goes on later; a stream that begins later passes over the place."""
    with Host(tmp_path, threads=1) as host:
        seal(host, 0, 4)
        batches = list(stream(tmp_path))
        order = SealingOrder(tmp_path, EPOCH)
        order.look()
        assert order.end == 4
        assert all_numbers(stream(tmp_path, idle_s=None)) == [0, 1, 2, 3]
        seal(host, 4, 6)
    resumed = stream(tmp_path)
    resumed.load_state_dict(batches[-1]["state"])
    assert all_numbers(resumed) == [4, 5]
    assert all_numbers(stream(tmp_path, idle_s=None)) == list(range(6))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_go_without_what_is_set_aside(tmp_path: Path, workers: int, caplog: pytest.LogCaptureFixture) -> None:
    """Rows keep their numbers, so that a state means the same before and after; an empty batch has a neighbour."""
    with Host(tmp_path, threads=1) as host:
        seal(host, 0, 12)
    before = list(stream(tmp_path))
    set_aside(tmp_path, 0, 1, 3, 6, 7)
    after = [[2], [2], [4, 5], [5], [8, 9], [10, 11]]
    for taken in range(6):
        source = stream(tmp_path)
        if taken:
            source.load_state_dict(before[taken - 1]["state"])
        context = "fork" if workers else None
        caplog.clear()
        batches = list(DataLoader(source, batch_size=None, num_workers=workers, multiprocessing_context=context))
        assert [numbers(batch) for batch in batches] == after[taken:]
        assert [batch["state"] for batch in batches] == [batch["state"] for batch in before[taken:]]
        told = [message for message in caplog.messages if "is set aside: batches go without it" in message]
        assert len(told) == (0 if workers or taken > 3 else 1)
    ranks = [[numbers(batch) for batch in stream(tmp_path, rank=rank, world_size=2)] for rank in range(2)]
    assert ranks == [after[0::2], after[1::2]]


def test_what_is_set_aside_comes_back_when_it_is_captured_anew(tmp_path: Path) -> None:
    with Host(tmp_path, threads=1) as host:
        seal(host, 0, 6)
    assert all_numbers(stream(tmp_path)) == list(range(6))
    set_aside(tmp_path, 3, 5)
    with Host(tmp_path, threads=1) as host:
        seal(host, 5, 6)
    assert all_numbers(stream(tmp_path)) == [0, 1, 2, 4, 5]
    set_aside(tmp_path, 0, 1, 2, 4, 5)
    with pytest.raises(NotCaptured, match=r"all 6 records of .* are set aside: extract their samples again"):
        list(stream(tmp_path))


def test_a_shard_that_was_moved_away_is_told(tmp_path: Path) -> None:
    """Nobody said that its records were to be left out."""
    for first in (0, 2):
        with Host(tmp_path, threads=1) as host:
            seal(host, first, first + 2)
    assert all_numbers(stream(tmp_path)) == [0, 1, 2, 3]
    Reader(tmp_path).by_token_ids([0]).shard.unlink()
    with pytest.raises(NotCaptured, match="is in none of the 1 sealed shards"):
        list(stream(tmp_path))


def test_only_waiting_is_idle(tmp_path: Path) -> None:
    """A trainer that takes its time is not a server that has ended."""
    with Host(tmp_path, threads=1) as host:
        seal(host, 0, 2)
        live = iter(stream(tmp_path, idle_s=0.3))
        next(live)
        later = threading.Timer(0.55, seal, (host, 2, 4))
        later.start()
        time.sleep(0.5)
        assert numbers(next(live)) == [2, 3]
        later.join()


def test_news_end_the_idle_time(tmp_path: Path) -> None:
    """Also those that do not make a batch yet."""
    with Host(tmp_path, threads=1) as host:
        seal(host, 0, 1)
        timers = [threading.Timer(0.5 * n, seal, (host, n, n + 1)) for n in range(1, 4)]
        for timer in timers:
            timer.start()
        assert [numbers(batch) for batch in stream(tmp_path, batch_size=4, idle_s=1.0)] == [[0, 1, 2, 3]]
        for timer in timers:
            timer.join()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": None}, "either batch_size or max_tokens"),
        ({"batch_size": 2, "max_tokens": 5}, "either batch_size or max_tokens"),
        ({"batch_size": 0}, "a batch of 0 is empty"),
        ({"rank": 2, "world_size": 2}, "rank 2 is not one of 2"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    Host(tmp_path).writer.close()
    with pytest.raises(UsageError, match=message):
        stream(tmp_path, **options)


def test_what_cannot_be_followed(tmp_path: Path) -> None:
    Host(tmp_path / "a").writer.close()
    assert list(stream(tmp_path / "a", idle_s=0.05)) == []
    with Host(tmp_path / "b", threads=1) as host:
        seal(host, 0, 4)
    state = next(iter(stream(tmp_path / "b")))["state"]
    with pytest.raises(UsageError, match="state is of the capture directory"):
        stream(tmp_path / "a").load_state_dict(state)
    with pytest.raises(UsageError, match="state is of the weights weights-1, this stream's are weights-2"):
        stream(tmp_path / "b", epoch="weights-2").load_state_dict(state)
    late = stream(tmp_path / "b")
    late.load_state_dict({**state, "row": 5})
    with pytest.raises(UsageError, match="lies at record 5 of 4"):
        list(late)
    with Host(tmp_path / "b", threads=1, changes={"epoch": "weights-2"}) as host:
        seal(host, 0, 1)
    with pytest.raises(MismatchError, match="choose one with epoch="):
        list(stream(tmp_path / "b"))
    assert all_numbers(stream(tmp_path / "b", epoch="weights-2")) == [0]
    path = next(path for path in (tmp_path / "b").glob(".hashtap-order-*") if path.stat().st_size > 100)
    path.write_bytes(b"rubbish" * 9)
    with pytest.raises(FormatError, match="is not an order of records"):
        list(stream(tmp_path / "b", epoch=EPOCH))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UsageError, match=r"cannot use .*hashtap-order"):
        list(stream(tmp_path / "b", epoch=EPOCH))


# With a client.


class Following(threading.Thread):
    """A trainer in a thread: what it took, each batch after a pause."""

    def __init__(
        self, source: LiveStream, pause_s: float = 0.0, seen: Callable[[int], None] = lambda row: None
    ) -> None:
        super().__init__()
        self.source, self.pause_s, self.seen = source, pause_s, seen
        self.ids: list[str] = []
        self.start()

    def run(self) -> None:
        for batch in self.source:
            self.ids += batch["sample_ids"]
            self.seen(batch["state"]["row"])
            time.sleep(self.pause_s)


def test_an_extraction_that_ends_ends_the_stream(tmp_path: Path) -> None:
    samples = write(tmp_path / "s.jsonl", [*prompts(21), [], prompts(21)[4]])
    with Peer(tmp_path / "captures", options={"capture_seal_after_s": 0.05}) as peer:
        trainer = Following(stream(peer.directory, idle_s=None))
        extract(samples, peer)
        trainer.join(20)
        assert sorted(trainer.ids) == sorted(f"s-{n}" for n in range(1, 22))
        # What ended begins anew with the next extraction.
        order = SealingOrder(peer.directory, EPOCH)
        more = write(tmp_path / "more.jsonl", [{"id": "late", "input_ids": [3, 1, 2]}])
        extract(more, peer)
        order.look()
        assert (len(order), order.end) == (22, 22)


def test_the_last_of_several_clients_ends_the_stream(tmp_path: Path) -> None:
    """One that is slow, one that is done before it, and one that gives up."""
    wanted = prompts(40)
    slow = wanted[:8]

    def trouble(attempt: int, body: dict[str, Any]) -> Answer:
        return (
            1.5 if body["input_ids"] in slow else PlainTextResponse("no", 500) if body["input_ids"] == [9, 9] else None
        )

    with Peer(tmp_path / "captures", trouble=trouble) as peer:
        first = write(tmp_path / "1.jsonl", [{"id": f"a-{n}", "input_ids": ids} for n, ids in enumerate(slow)])
        second = write(tmp_path / "2.jsonl", [{"id": f"b-{n}", "input_ids": ids} for n, ids in enumerate(wanted[8:])])
        third = write(tmp_path / "3.jsonl", [{"id": "c", "input_ids": [9, 9]}])
        client = threading.Thread(target=extract, args=(first, peer), kwargs={"concurrency": 2})
        client.start()
        trainer = Following(stream(peer.directory, idle_s=None))
        extract(second, peer)
        with pytest.raises(ServerLost):
            extract(third, peer, stop_after=1)
        assert client.is_alive()
        client.join(30)
        trainer.join(30)
    assert len(trainer.ids) == len(set(trainer.ids)) == 40


@pytest.mark.parametrize(("ahead", "batch"), [(7, 2), (2, 9)], ids=["ahead of a batch", "batches of more"])
def test_a_client_waits_for_a_trainer_that_lags(tmp_path: Path, ahead: int, batch: int) -> None:
    """It is never further ahead than it may, nor does a trainer ever wait for a client that waits for it."""
    samples = write(tmp_path / "s.jsonl", prompts(40, longest=20))
    leads: list[int] = []
    with Peer(tmp_path / "captures", options={"capture_seal_after_s": 0.05}) as peer:
        # A batch that it has taken, and one that it waits for, are both wanted.
        def seen(row: int) -> None:
            leads.append(len(peer.received) - row)

        trainer = Following(stream(peer.directory, idle_s=None, batch_size=batch), 0.08, seen)
        summary = extract(samples, peer, ahead_samples=ahead)
        trainer.join(20)
    assert (summary.captured, len(trainer.ids), len(set(trainer.ids))) == (40, 40, 40)
    assert max(leads) <= ahead
    assert max(leads) > 0
    # A batch that is wanted comes in one go, not in steps of what the client may be ahead.
    assert batch < ahead or len(Reader(peer.directory).shards) < 15


def test_without_a_trainer_the_client_waits(tmp_path: Path) -> None:
    samples = write(tmp_path / "s.jsonl", prompts(30, longest=20))
    with Peer(tmp_path / "captures", options={"capture_seal_after_s": 0.05}) as peer:
        client = threading.Thread(target=extract, args=(samples, peer), kwargs={"ahead_samples": 8, "concurrency": 32})
        client.start()
        wait_until(lambda: len(peer.received) >= 8, 30, "the first prompts")
        time.sleep(0.6)
        assert len(peer.received) == 8
        trainer = Following(stream(peer.directory, idle_s=None))
        client.join(20)
        trainer.join(20)
        assert (len(peer.received), len(set(trainer.ids))) == (30, 30)


def test_ahead_of_a_trainer_that_is_not_to_be_seen(tmp_path: Path) -> None:
    samples = write(tmp_path / "s.jsonl", prompts(3))
    with Peer(tmp_path / "captures") as peer, pytest.raises(UsageError, match="--ahead-samples needs the capture dir"):
        extract(samples, peer, out=tmp_path / "mine", remote=True, ahead_samples=3)


@pytest.mark.slow
def test_a_killed_server_leaves_the_stream_waiting_for_the_next(tmp_path: Path) -> None:
    """What it had not sealed is captured again, or recovered; the trainer gets each sample once."""
    samples = write(tmp_path / "s.jsonl", prompts(120))
    captures, port = tmp_path / "captures", free_port()
    with start_peer(captures, port, delay_s=0.05) as process:
        trainer = Following(stream(captures, idle_s=None))

        def kill() -> None:
            while len(trainer.ids) < 40:
                time.sleep(0.02)
            os.killpg(process.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        options = ExtractOptions(server=f"http://127.0.0.1:{port}", out=captures, concurrency=4, backoff_s=0.01)
        with pytest.raises(ServerLost):
            asyncio.run(Extraction(samples, options, Log()).run())
        killer.join()
    assert trainer.is_alive()
    with Peer(captures) as peer:
        extract(samples, peer)
    trainer.join(20)
    assert sorted(trainer.ids) == sorted(f"s-{n}" for n in range(1, 121))
