"""Extraction against a real HTTP peer that captures through the real session and writer into a real directory."""

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from starlette.responses import JSONResponse, PlainTextResponse, Response
from tests.capture.peer import BOUNDARIES, GEOMETRY, MAX_PROMPT_TOKENS, VOCAB_SIZE, Answer, Peer, states

from hashtap.directory import CaptureDirectory
from hashtap.errors import MismatchError, ServerLost, UsageError
from hashtap.extract import Extraction, ExtractOptions
from hashtap.identity import NEEDS_RECOMPUTE, PAST_THE_CACHE, prompt_key
from hashtap.manifest import Manifest
from hashtap.progress import Snapshot
from hashtap.reader import Reader
from hashtap.tally import Summary

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("POLL_S", 0.05), ("ASK_EVERY_S", 0.2)):
        monkeypatch.setattr(f"hashtap.extract.{name}", seconds)


class Log:
    """A display that keeps what it was told."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self.lines: list[str] = []

    def show(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)

    def say(self, text: str) -> None:
        self.lines.append(text)

    def close(self) -> None:
        pass


def prompts(count: int, seed: int = 0, longest: int = 300) -> list[list[int]]:
    """Distinct prompts of 1 to ``longest`` tokens."""
    random = np.random.default_rng(seed)
    lengths = random.integers(1, longest, count)
    return [[number, *random.integers(0, VOCAB_SIZE, length).tolist()] for number, length in enumerate(lengths)]


def write(path: Path, samples: Sequence[Mapping[str, Any] | Sequence[int]]) -> Path:
    """A sample file; a bare list of ids becomes a sample named ``s-<n>``, counted from 1."""
    lines = [
        sample if isinstance(sample, Mapping) else {"id": f"s-{number}", "input_ids": sample}
        for number, sample in enumerate(samples, start=1)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def extract(samples: Path, peer: Peer, out: Path | None = None, log: Log | None = None, **options: Any) -> Summary:
    """Run to the end and return the summary."""
    defaults: dict[str, Any] = {"concurrency": 8, "backoff_s": 0.01, "timeout_s": 20.0}
    chosen = ExtractOptions(server=peer.url, out=out or peer.directory, **{**defaults, **options})
    extraction = Extraction(samples, chosen, log or Log())
    asyncio.run(extraction.run())
    return extraction.summary()


def quarantined(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "quarantine.jsonl").read_text().splitlines()]


def assert_captured(directory: Path, wanted: Sequence[Sequence[int]]) -> None:
    """Every prompt has a record whose ids are its own and whose states are those of its ids and positions."""
    reader = Reader(directory)
    for token_ids in wanted:
        capture = reader.by_token_ids(token_ids)
        ids, positions = torch.tensor(token_ids), torch.arange(len(token_ids))
        assert capture.token_ids.tolist() == list(token_ids)
        assert torch.equal(capture.tensor(), torch.stack(states(ids, positions), dim=1))


def first_attempt(answer: Answer) -> Any:
    """Trouble with each prompt's first attempt only."""
    return lambda attempt, body: answer if attempt == 1 else None


def test_every_sample_is_captured_and_identical_prompts_are_sent_once(tmp_path: Path) -> None:
    wanted = prompts(37)
    samples = write(tmp_path / "s.jsonl", [*wanted, wanted[3], wanted[5], wanted[3]])
    log = Log()
    with Peer(tmp_path / "captures") as peer:
        summary = extract(samples, peer, log=log)
        assert sorted(map(str, (body["input_ids"] for body in peer.received))) == sorted(map(str, wanted))
        assert 2 <= peer.most_in_flight <= 8

    assert (summary.captured, summary.samples, summary.prompts, summary.sent) == (40, 40, 37, 37)
    assert (summary.left_out, summary.pending) == ({}, 0)
    assert summary.tokens == sum(map(len, wanted))
    assert summary.raw_bytes == summary.tokens * GEOMETRY.row_bytes
    assert (log.snapshots[-1].done, log.snapshots[-1].tokens_done) == (40, summary.tokens)
    assert_captured(peer.directory, wanted)
    manifest = Manifest.load(peer.directory)
    assert [row.sample_id for row in manifest] == [f"s-{number}" for number in range(1, 41)]
    assert manifest.sample_ids_of(prompt_key(wanted[3])) == ["s-4", "s-38", "s-40"]
    assert Reader(peer.directory).by_sample_id("s-40").token_ids.tolist() == wanted[3]
    assert quarantined(peer.directory) == []


def test_request_ids_have_one_width_and_never_come_again(tmp_path: Path) -> None:
    with Peer(tmp_path / "captures", trouble=first_attempt(PlainTextResponse("busy", 503))) as peer:
        extract(write(tmp_path / "s.jsonl", prompts(12)), peer)
        assert len(set(peer.rids)) == len(peer.rids) == 24
        assert {len(rid) for rid in peer.rids} == {32}


def test_a_second_run_sends_only_what_is_missing(tmp_path: Path) -> None:
    wanted = prompts(30)
    with Peer(tmp_path / "captures") as peer:
        extract(write(tmp_path / "s.jsonl", wanted[:20]), peer)
        again = extract(write(tmp_path / "s.jsonl", wanted[:20]), peer)
        assert (again.sent, again.captured, again.already_captured) == (0, 20, 20)
        more = extract(write(tmp_path / "s.jsonl", wanted), peer)
        assert (more.sent, more.captured, more.already_captured) == (10, 30, 20)
        assert len(peer.received) == 30
    assert_captured(peer.directory, wanted)


def test_a_timed_out_attempt_that_goes_on_leaves_one_record(tmp_path: Path) -> None:
    wanted = prompts(9)
    with Peer(tmp_path / "captures", trouble=first_attempt(1.5)) as peer:
        summary = extract(write(tmp_path / "s.jsonl", wanted), peer, timeout_s=0.5)
        assert (summary.captured, summary.sent) == (9, 18)
    reader = Reader(peer.directory)
    assert len(reader) == 9
    assert_captured(peer.directory, wanted)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(JSONResponse({"detail": "The request queue is full."}, 503), id="queue full"),
        pytest.param(PlainTextResponse("Internal Server Error", 500), id="server error"),
        pytest.param(PlainTextResponse("<html>proxy</html>"), id="not SGLang's answer"),
        pytest.param(JSONResponse(["list"]), id="not an object"),
        pytest.param(
            JSONResponse({"meta_info": {"finish_reason": {"type": "abort", "message": "aborted"}}}), id="aborted"
        ),
        pytest.param(lambda receipt: {**receipt, "state": "dropped", "reason": "the ring was full"}, id="dropped"),
        pytest.param(lambda receipt: {**receipt, "state": "incomplete", "reason": "prefix cache"}, id="incomplete"),
    ],
)
def test_passing_trouble_is_retried(tmp_path: Path, answer: Answer) -> None:
    wanted = prompts(11)
    with Peer(tmp_path / "captures", trouble=first_attempt(answer)) as peer:
        summary = extract(write(tmp_path / "s.jsonl", wanted), peer)
    assert (summary.captured, summary.sent, summary.left_out) == (11, 22, {})
    assert_captured(peer.directory, wanted)


def test_what_needs_to_be_computed_again_is_sent_past_the_cache_at_once(tmp_path: Path) -> None:
    def cached(receipt: dict[str, Any]) -> dict[str, Any]:
        return {**receipt, "state": NEEDS_RECOMPUTE, "reason": "5 rows from position 0 came from the prefix cache"}

    wanted = prompts(9)
    with Peer(tmp_path / "captures", trouble=lambda _, body: None if "extra_key" in body else cached) as peer:
        summary = extract(write(tmp_path / "s.jsonl", wanted), peer, attempts=1)
        keys = [body["extra_key"] for body in peer.received if "extra_key" in body]
    assert (summary.captured, summary.left_out, len(peer.received)) == (9, {}, 18)
    assert len(set(keys)) == 9
    assert all(key.startswith(PAST_THE_CACHE) for key in keys)
    assert_captured(peer.directory, wanted)


def test_lasting_trouble_leaves_a_sample_out_and_names_it(tmp_path: Path) -> None:
    wanted = prompts(6)

    def trouble(attempt: int, body: dict[str, Any]) -> Answer:
        if body["input_ids"] == wanted[2]:
            return lambda receipt: {**receipt, "state": "dropped", "reason": "the ring was full"}
        return None

    with Peer(tmp_path / "captures", trouble=trouble) as peer:
        summary = extract(write(tmp_path / "s.jsonl", [*wanted, wanted[2]]), peer, attempts=3)
    assert summary.left_out == {"not captured": 2}
    assert (summary.sent, summary.pending) == (5 + 3, 0)
    assert [(bad["id"], bad["line"], bad["detail"]) for bad in quarantined(peer.directory)] == [
        ("s-3", 3, "dropped: the ring was full"),
        ("s-7", 7, "dropped: the ring was full"),
    ]


def test_a_sample_that_the_server_refuses_is_not_sent_again(tmp_path: Path) -> None:
    wanted = prompts(5)

    def trouble(attempt: int, body: dict[str, Any]) -> Answer:
        if body["input_ids"] == wanted[1]:
            return JSONResponse({"error": {"message": "Input length exceeds the pool"}}, 400)
        if body["input_ids"] == wanted[4]:
            return lambda receipt: {**receipt, "state": "refused", "reason": "input embeddings"}
        return None

    with Peer(tmp_path / "captures", trouble=trouble) as peer:
        summary = extract(write(tmp_path / "s.jsonl", wanted), peer)
        assert len(peer.received) == 5
    assert (summary.captured, summary.left_out) == (3, {"refused by the server": 2})
    details = {bad["id"]: bad["detail"] for bad in quarantined(peer.directory)}
    assert details == {"s-2": "Input length exceeds the pool", "s-5": "input embeddings"}


def test_unusable_lines_are_counted_and_never_sent(tmp_path: Path) -> None:
    good = prompts(40)
    out_of_vocabulary = [{"id": f"v-{n}", "input_ids": [1, VOCAB_SIZE]} for n in range(25)]
    too_long = [{"id": f"l-{n}", "input_ids": [1] * (MAX_PROMPT_TOKENS + 1)} for n in range(20)]
    no_ids = [{"id": f"n-{n}", "prompt": "not known"} for n in range(15)]
    log = Log()
    with Peer(tmp_path / "captures") as peer:
        summary = extract(write(tmp_path / "s.jsonl", [*no_ids, *good, *out_of_vocabulary, *too_long]), peer, log=log)
        assert len(peer.received) == 40
    assert summary.left_out == {"out of vocabulary": 25, "too long": 20, "no input_ids": 15}
    assert (summary.captured, summary.samples, summary.bad_fraction) == (40, 100, 0.6)
    assert log.lines[0] == "left out before sending: 25 of 100 lines, out of vocabulary"
    tokens = sum(map(len, good))
    on_disk = f"about {tokens * GEOMETRY.row_bytes / 1.48 / 1e6:.2f} MB on disk at a ratio of 1.48"
    assert log.lines[3].startswith(f"to capture: {tokens:,} tokens, {on_disk}; free in {peer.directory}: ")
    assert log.lines[3].endswith("enough")
    assert len(quarantined(peer.directory)) == 60


def test_the_longest_prompt_that_fits_is_captured(tmp_path: Path) -> None:
    wanted = [[7] * (MAX_PROMPT_TOKENS)]
    with Peer(tmp_path / "captures") as peer:
        assert extract(write(tmp_path / "s.jsonl", wanted), peer).captured == 1
    assert_captured(peer.directory, wanted)


def test_many_samples_go_out_within_the_bound(tmp_path: Path) -> None:
    wanted = prompts(200, longest=20)
    with Peer(tmp_path / "captures") as peer:
        summary = extract(write(tmp_path / "s.jsonl", wanted), peer, concurrency=32)
        assert peer.most_in_flight <= 32
    assert summary.captured == 200
    assert_captured(peer.directory, wanted)


def test_a_server_that_is_full_comes_to_every_prompt_in_time(tmp_path: Path) -> None:
    """40 at once on a server with 2 places: many answers of "full", and nothing fails by them."""
    wanted = prompts(40, longest=20)

    def trouble(attempt: int, body: dict[str, Any]) -> Answer:
        full = peer.in_flight >= 2
        return JSONResponse({"detail": "The request queue is full."}, 503) if full else 0.05

    with Peer(tmp_path / "captures", trouble=trouble) as peer:
        summary = extract(write(tmp_path / "s.jsonl", wanted), peer, concurrency=40, attempts=4, backoff_s=0.02)
    assert (summary.captured, summary.left_out) == (40, {})
    times = Counter(tuple(body["input_ids"]) for body in peer.received)
    assert max(times.values()) > 4, "no prompt met a full server as often as it may fail"
    assert_captured(peer.directory, wanted)


def test_a_server_that_stays_full_ends_the_run(tmp_path: Path) -> None:
    full = JSONResponse({"detail": "The request queue is full."}, 503)
    with Peer(tmp_path / "captures", trouble=lambda attempt, body: full) as peer:
        with pytest.raises(ServerLost, match=r"20 samples failed in a row.*status 503: The request queue is full"):
            extract(write(tmp_path / "s.jsonl", prompts(60)), peer, concurrency=1, attempts=3)
        assert len(peer.received) == 20 * 3


def test_more_connections_than_open_files(tmp_path: Path) -> None:
    """The soft limit is raised as far as it must be; past the hard one nothing is sent."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 50
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        with Peer(tmp_path / "captures") as peer:
            extract(write(tmp_path / "s.jsonl", prompts(1)), peer, concurrency=few)
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (few + 64, hard)
            with pytest.raises(UsageError, match=rf"this process may have {hard:,}: give at most --concurrency"):
                extract(write(tmp_path / "s.jsonl", prompts(2)), peer, concurrency=hard)
            assert len(peer.received) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_server_without_hashtap_is_named(tmp_path: Path) -> None:
    with (
        Peer(tmp_path / "captures", captures=False) as peer,
        pytest.raises(UsageError, match=r"runs without hashtap.*--capture-dir"),
    ):
        extract(write(tmp_path / "s.jsonl", prompts(1)), peer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda receipt: None, "without a receipt"),
        (lambda receipt: {**receipt, "key": "0" * 32}, "something between client and server changes token ids"),
        (lambda receipt: {**receipt, "directory": "another"}, "names the capture directory another"),
        (lambda receipt: {**receipt, "epoch": "weights-2"}, "weights changed"),
        (lambda receipt: {**receipt, "rows": 1}, "captured 1 rows of a prompt of"),
        (lambda receipt: {"state": "captured"}, "cannot understand the receipt"),
    ],
    ids=["none", "key", "directory", "epoch", "rows", "other fields"],
)
def test_a_receipt_that_does_not_fit_ends_the_run(tmp_path: Path, change: Answer, message: str) -> None:
    with (
        Peer(tmp_path / "captures", trouble=lambda attempt, body: change) as peer,
        pytest.raises(MismatchError, match=message),
    ):
        extract(write(tmp_path / "s.jsonl", prompts(3, seed=5)), peer)


def test_new_weights_in_mid_run_end_it_and_a_second_run_captures_under_them(tmp_path: Path) -> None:
    wanted = prompts(12)
    samples = write(tmp_path / "s.jsonl", wanted)
    with Peer(tmp_path / "captures") as peer:

        def trouble(attempt: int, body: dict[str, Any]) -> Answer:
            if len(peer.received) == 6:
                peer.update_weights("weights-2")
            return None

        peer.trouble = trouble
        with pytest.raises(MismatchError, match=r"weights-1, now weights-2"):
            extract(samples, peer, concurrency=1)
        summary = extract(samples, peer)
        assert (summary.captured, summary.pending) == (12, 0)
        assert Manifest.load(peer.directory).epoch_of("s-1") == "weights-2"
        reader = Reader(peer.directory)
        assert [len(reader.by_key(prompt_key(ids), "weights-2")) for ids in wanted] == [len(ids) for ids in wanted]


def test_other_boundaries_than_asked_for(tmp_path: Path) -> None:
    samples = write(tmp_path / "s.jsonl", prompts(2))
    with Peer(tmp_path / "captures") as peer:
        with pytest.raises(MismatchError, match=r"--layers 1 2 3, but the server captures the boundaries 2 4 5"):
            extract(samples, peer, layers=(1, 2, 3))
        assert peer.received == []
        assert extract(samples, peer, layers=BOUNDARIES).captured == 2


def test_out_must_be_the_servers_directory(tmp_path: Path) -> None:
    samples = write(tmp_path / "s.jsonl", prompts(2))
    other = CaptureDirectory.create(tmp_path / "other")
    with Peer(tmp_path / "captures") as peer:
        with pytest.raises(MismatchError, match=f"is the capture directory {other.uuid}, but the server writes to"):
            extract(samples, peer, out=other.path)
        with pytest.raises(UsageError, match="none"):
            extract(samples, peer, out=tmp_path / "none")
        assert peer.received == []


def test_a_remote_client_asks_the_server_what_is_sealed(tmp_path: Path) -> None:
    wanted = prompts(13)
    own = tmp_path / "own"
    with Peer(tmp_path / "captures") as peer:
        first = extract(write(tmp_path / "s.jsonl", wanted[:8]), peer, out=own, remote=True)
        second = extract(write(tmp_path / "s.jsonl", wanted), peer, out=own, remote=True)
    assert (first.captured, second.captured, second.already_captured, second.sent) == (8, 13, 8, 5)
    assert sorted(path.name for path in own.iterdir()) == ["manifest.parquet", "quarantine.jsonl"]
    assert len(Manifest.load(own)) == 13
    assert_captured(peer.directory, wanted)
    with Peer(tmp_path / "another") as peer, pytest.raises(MismatchError, match="--out of its own"):
        extract(write(tmp_path / "s.jsonl", wanted), peer, out=own, remote=True)


def test_an_id_that_meant_another_prompt_stops_before_sending(tmp_path: Path) -> None:
    with Peer(tmp_path / "captures") as peer:
        extract(write(tmp_path / "s.jsonl", [[1, 2]]), peer)
        with pytest.raises(UsageError, match="'s-1'"):
            extract(write(tmp_path / "s.jsonl", [[1, 3]]), peer)
        assert len(peer.received) == 1


def test_the_failure_counter_counts_samples_not_attempts(tmp_path: Path) -> None:
    failing: Response = PlainTextResponse("broken", 500)
    samples = write(tmp_path / "s.jsonl", prompts(60))
    with Peer(tmp_path / "captures", trouble=lambda attempt, body: failing) as peer:
        with pytest.raises(ServerLost, match=r"20 samples failed in a row.*status 500: broken"):
            extract(samples, peer, concurrency=1, attempts=3)
        assert len(peer.received) == 20 * 3
    assert len(quarantined(peer.directory)) == 20


def test_failures_between_successes_do_not_stop_the_run(tmp_path: Path) -> None:
    wanted = prompts(60)
    broken = [ids for number, ids in enumerate(wanted) if number % 2]

    def trouble(attempt: int, body: dict[str, Any]) -> Answer:
        return PlainTextResponse("broken", 500) if body["input_ids"] in broken else None

    with Peer(tmp_path / "captures", trouble=trouble) as peer:
        summary = extract(write(tmp_path / "s.jsonl", wanted), peer, concurrency=1, attempts=2)
    assert (summary.captured, summary.left_out) == (30, {"not captured": 30})


def test_what_is_never_sealed_is_sent_again_then_named(tmp_path: Path) -> None:
    samples = write(tmp_path / "s.jsonl", wanted := prompts(3))
    with Peer(tmp_path / "captures", options={"capture_seal_after_s": 3600.0}) as peer:
        summary = extract(samples, peer, seal_wait_s=0.7)
        assert (summary.captured, summary.sent, summary.left_out) == (0, 9, {"not captured": 3})
        assert {bad["detail"] for bad in quarantined(peer.directory)} == {
            "captured by the server, but never sealed: its log says why; start it anew"
        }
    assert_captured(peer.directory, wanted)
    with Peer(tmp_path / "captures") as peer:
        summary = extract(samples, peer)
        assert (summary.captured, summary.sent) == (3, 0)
    assert quarantined(peer.directory) == []


def test_a_stopping_server_still_seals_what_it_captured(tmp_path: Path) -> None:
    samples = write(tmp_path / "s.jsonl", wanted := prompts(4))
    with Peer(tmp_path / "captures", options={"capture_seal_after_s": 2.0}) as peer:

        def trouble(attempt: int, body: dict[str, Any]) -> Answer:
            if len(peer.received) == 4:
                peer.close_soon(0.3)
            return None

        peer.trouble = trouble
        assert extract(samples, peer).captured == 4
    assert_captured(peer.directory, wanted)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def start_peer(directory: Path, port: int, delay_s: float) -> "subprocess.Popen[str]":
    """A peer in a process of its own, to be killed."""
    command = [sys.executable, "-m", "tests.capture.peer", str(directory), str(port), str(delay_s)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("http")
    return process


def test_a_killed_server_stops_the_run_and_a_second_run_finishes_it(tmp_path: Path) -> None:
    wanted = prompts(200)
    samples = write(tmp_path / "s.jsonl", wanted)
    captures, port = tmp_path / "captures", free_port()

    async def run_and_kill(process: "subprocess.Popen[str]", extraction: Extraction) -> None:
        run = asyncio.create_task(extraction.run())
        while not run.done() and len(Reader(captures)) < 80:
            await asyncio.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        await run

    options = ExtractOptions(server=f"http://127.0.0.1:{port}", out=captures, concurrency=8, backoff_s=0.01)
    with start_peer(captures, port, delay_s=0.1) as process:
        extraction = Extraction(samples, options, Log())
        with pytest.raises(ServerLost, match="20 samples failed in a row"):
            asyncio.run(run_and_kill(process, extraction))
    first = extraction.summary()
    assert len(Reader(captures)) >= 80  # what was sealed just before the end, the client may not have seen any more
    assert first.captured < 200
    # The others in flight may fail in the same moment as the twentieth.
    assert 20 <= first.left_out["not captured"] < 20 + options.concurrency
    assert first.captured + sum(first.left_out.values()) + first.pending == 200

    with Peer(captures) as peer:
        second = extract(samples, peer)
    assert (second.captured, second.left_out) == (200, {})
    assert second.already_captured >= first.captured  # some were sealed whose receipts were lost
    assert second.sent == 200 - second.already_captured
    assert quarantined(captures) == []
    assert_captured(captures, wanted)
    assert len(Reader(captures)) == 200


def test_a_server_lost_with_few_samples_left_is_told_from_bad_samples(tmp_path: Path) -> None:
    samples = write(tmp_path / "s.jsonl", prompts(5))
    with Peer(tmp_path / "captures") as peer:

        def trouble(attempt: int, body: dict[str, Any]) -> Answer:
            peer.close_soon(0.0)
            return 30.0

        peer.trouble = trouble
        with pytest.raises(ServerLost, match="cannot reach the server"):
            extract(samples, peer, attempts=2, timeout_s=2.0)


def test_no_server_at_all(tmp_path: Path) -> None:
    started = time.monotonic()
    extraction = Extraction(
        write(tmp_path / "s.jsonl", prompts(1)),
        ExtractOptions(server=f"http://127.0.0.1:{free_port()}", out=tmp_path),
        Log(),
    )
    with pytest.raises(ServerLost, match="is it up"):
        asyncio.run(extraction.run())
    assert time.monotonic() - started < 5
    assert extraction.summary() == Summary()


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://host", "http://:x"])
def test_a_url_that_is_none(tmp_path: Path, url: str) -> None:
    samples = write(tmp_path / "s.jsonl", prompts(1))
    with pytest.raises(UsageError, match="is no URL"):
        asyncio.run(Extraction(samples, ExtractOptions(server=url, out=tmp_path), Log()).run())


def test_lines_of_another_sample_file_stay_in_the_quarantine(tmp_path: Path) -> None:
    with Peer(tmp_path / "captures") as peer:
        extract(write(tmp_path / "a.jsonl", [[1], []]), peer)
        extract(write(tmp_path / "b.jsonl", [{"id": "b", "input_ids": []}]), peer)
        extract(write(tmp_path / "a.jsonl", [[1], [2]]), peer)
    (left,) = quarantined(peer.directory)
    assert (left["samples"], left["id"], left["reason"]) == (str(tmp_path / "b.jsonl"), "b", "empty prompt")
