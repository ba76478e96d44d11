"""Writers as processes: they die, they stop for a while, their server dies, and nothing wrong comes of it."""

import gc
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.capture.test_session import Host, assert_captured, prompt
from tests.server.waiting import group_ended, wait_until

import hashtap
from hashtap import writers
from hashtap.errors import SetupError
from hashtap.identity import prompt_key
from hashtap.logs import RepeatLimit, log
from hashtap.ring_memory import RingMemory
from hashtap.verify import verify
from hashtap.writer_messages import Forward
from hashtap.writers import Writers
from hashtap_kernels.layout import Dtype


@pytest.fixture(autouse=True)
def _quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "RESTART_S", 0.2)


def processes(host: Host) -> list[int]:
    return host.session._writers.pids


def captured(host: Host, ids: list[int]) -> bool:
    """Whether a prompt's receipt says so."""
    rid = str(ids)
    kept = host.admit(rid, ids)
    host.forward((rid, ids, 0))
    return kept.state == "captured"


def written(host: Host) -> None:
    wait_until(lambda: host.session.counters()["queue"] == 0, 20, "everything to be written")


def replaced(host: Host, before: list[int]) -> None:
    wait_until(lambda: processes(host) != before and not host.session._writers.trouble, 20, "another writer")


def test_a_writer_that_dies_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What it had sealed stays, what it had written is recovered, what comes later goes to the next one."""
    host = Host(tmp_path, dtype=Dtype.FP32, capture_writers=2)
    early, late = [prompt(n, 60) for n in range(20)], [prompt(n, 60) for n in range(100, 120)]
    assert all(captured(host, ids) for ids in early)
    host.session._writers.drain()
    between = [prompt(n, 60) for n in range(20, 40)]
    assert all(captured(host, ids) for ids in between)
    written(host)
    time.sleep(2)  # an idle writer puts its last bytes on the disk
    before = processes(host)
    os.kill(before[0], signal.SIGKILL)
    replaced(host, before)
    assert processes(host)[1] == before[1]
    assert all(captured(host, ids) for ids in late)
    reader = host.close()
    for ids in early + between + late:
        assert_captured(reader, ids)
    counts = host.session.counters()
    assert (counts["write_errors"], counts["ring_used_bytes"], counts["queue"]) == (1, 0, 0)
    assert counts["rows"] == 60 * 60
    assert "a writer process died, with status -9: 0 forwards were not written" in caplog.text
    assert verify(tmp_path).ok


def within(seconds: float, work: Callable[[], object]) -> None:
    """Do it on a thread, which may hang: it is to be done in so many seconds."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive()


def no_more_listeners(patch: pytest.MonkeyPatch, after: int = 0) -> list[str]:
    """As where the limit on threads is reached: a listener's cannot be started. Returns those that were tried."""
    start, tried = threading.Thread.start, list[str]()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "hashtap-listener":
            tried.append(thread.name)
            if len(tried) > after:
                raise RuntimeError("can't start new thread")
        start(thread)

    patch.setattr(threading.Thread, "start", refuse)
    return tried


@pytest.mark.parametrize("alone", [False, True])
def test_while_no_writer_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool) -> None:
    """Nobody waits for it: others take its keys, without any prompts fail, and drains are answered."""
    host = Host(tmp_path, dtype=Dtype.FP32, capture_writers=1 if alone else 2)
    before = processes(host)
    assert captured(host, prompt(0, 30))
    written(host)
    with monkeypatch.context() as patch:
        patch.setattr("sys.executable", "/bin/false")
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: host.session._writers._vacant, 20, "its death to be noticed")
        prompts = [prompt(n, 30) for n in range(1, 21)]
        assert all(captured(host, ids) for ids in prompts)
        within(20, host.session._writers.drain)
        assert processes(host) == before
        within(20, host.session.end_epoch)
        host.session.begin_epoch("e1", cache_is_empty=True)
        counts = host.session.counters()
        assert (counts["queue"], counts["ring_used_bytes"]) == (0, 0)
        assert counts["bad_frames"] == (len(prompts) if alone else 0)
    replaced(host, before)
    later = [prompt(n, 30) for n in range(100, 120)]
    assert all(captured(host, ids) for ids in later)
    within(20, host.session.close)
    reader = hashtap.open(tmp_path, epoch="e1")
    for ids in later:
        assert_captured(reader, ids)
    assert len(reader) == len(later)
    if not alone:
        assert hashtap.open(tmp_path, epoch="e0").keys() >= {prompt_key(ids) for ids in prompts}


def test_a_pass_stays_with_the_writer_that_began_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one's key, which it took while that was dead, and goes on with when there is a new one."""
    host = Host(tmp_path, dtype=Dtype.FP32, capture_writers=2)
    before = processes(host)
    ids = next(ids for ids in (prompt(n, 100) for n in range(50)) if prompt_key(ids)[0] % 2 == 0)
    kept = host.admit("long", ids)
    with monkeypatch.context() as patch:
        patch.setattr("sys.executable", "/bin/false")
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: host.session._writers._vacant, 20, "its death to be noticed")
        host.forward(("long", ids[:50], 0))
        written(host)
    replaced(host, before)
    host.forward(("long", ids[50:], 50))
    assert kept.state == "captured"
    reader = host.close()
    assert_captured(reader, ids)
    assert verify(tmp_path).ok


def test_any_failure_of_a_restart_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where memory and threads are short, too."""
    host = Host(tmp_path, capture_writers=1)
    before = processes(host)

    def fails(*_: object, **__: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(writers, "recover", fails)
        tried = no_more_listeners(patch)
        os.kill(before[0], signal.SIGKILL)
        wait_until(lambda: len(tried) > 1, 20, "the second try")
        within(20, host.session._writers.drain)
    replaced(host, before)
    ids = prompt(1, 30)
    assert captured(host, ids)
    within(20, host.session.close)
    assert_captured(hashtap.open(tmp_path), ids)
    assert host.session.counters()["ring_used_bytes"] == 0
    assert "cannot be listened to: can't start new thread" in caplog.text
    assert "what it left is not recovered" in caplog.text


def test_a_writer_that_is_not_understood_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody hears it any more, so it is as good as dead."""
    host = Host(tmp_path, capture_writers=1)
    before = processes(host)

    def fails(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(host.session._writers._unwritten, "done", fails)
        host.session._writers._children[0].tell(Forward(999, [], [], []))
        wait_until(lambda: not host.session._writers._children[0]._listener.is_alive(), 20, "its listener to end")
    replaced(host, before)
    ids = prompt(1, 30)
    assert captured(host, ids)
    within(20, host.session.close)
    assert_captured(hashtap.open(tmp_path), ids)


def test_a_prompt_that_is_cut_in_two_by_a_death_is_not_listed(tmp_path: Path) -> None:
    host = Host(tmp_path, capture_writers=1)
    cut, whole = prompt(1, 100), prompt(2, 50)
    kept = host.admit("cut", cut)
    host.forward(("cut", cut[:50], 0))
    before = processes(host)
    os.kill(before[0], signal.SIGKILL)
    replaced(host, before)
    host.forward(("cut", cut[50:], 50))
    assert captured(host, whole)
    assert not host.session._writers._passes._lost.isdisjoint({kept.record.serial})
    serial = kept.record.serial
    del kept
    host.session._writers.drain()
    assert serial not in host.session._writers._passes._lost
    again = prompt(1, 100)
    assert captured(host, again)
    reader = host.close()
    assert set(reader.keys()) == {prompt_key(whole), prompt_key(cut)}
    assert_captured(reader, cut)
    assert verify(tmp_path).duplicates == 0


def test_a_donor_that_died_with_its_writer_is_none(tmp_path: Path) -> None:
    host = Host(tmp_path, capture_prefix_cache="on", capture_writers=2)
    donor = prompt(1, 100)
    assert captured(host, donor)
    before = processes(host)
    assert len(before) == 1
    os.kill(before[0], signal.SIGKILL)
    replaced(host, before)
    kept = host.admit("shares", [*donor, 7])
    host.forward(("shares", [7], 100))
    assert kept.state == "needs recompute"
    assert captured(host, [*donor, 8])
    kept = host.admit("shares", [*donor, 9])
    host.forward(("shares", [9], 100))
    assert kept.state == "captured"
    reader = host.close()
    assert_captured(reader, [*donor, 8])
    assert_captured(reader, [*donor, 9])


def test_a_writer_that_stands_still_is_waited_for(tmp_path: Path) -> None:
    """The scheduler's thread never is: the ring fills up, then new prompts are held back."""
    host = Host(tmp_path, capture_writers=1, forward_tokens=256, capture_ring_gib=1 / 1024)
    pid = processes(host)[0]
    os.kill(pid, signal.SIGSTOP)
    try:
        number, slowest_s = 0, 0.0
        while host.session.may_admit():
            number += 1
            began = time.perf_counter()
            assert captured(host, prompt(number, 256))
            slowest_s = max(slowest_s, time.perf_counter() - began)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert number > 5
    assert slowest_s < 1
    reader = host.close()
    assert len(reader) == number


def test_closing_beside_a_dead_writer(tmp_path: Path) -> None:
    host = Host(tmp_path, capture_writers=2)
    assert captured(host, prompt(1, 30))
    for pid in processes(host):
        os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    host.session.close()
    assert time.monotonic() - began < 10
    assert host.session.counters()["ring_used_bytes"] == 0
    assert verify(tmp_path).ok or not list(tmp_path.glob("*.safetensors"))


def test_a_server_that_dies_has_what_it_captured_sealed(tmp_path: Path) -> None:
    """By its writers, which outlive it: nobody has to recover anything."""
    prompts = [prompt(n, 1 + n % 90) for n in range(50)]
    server = os.fork()
    if server == 0:
        os.setsid()
        host = Host(tmp_path, dtype=Dtype.FP32)
        if all(captured(host, ids) for ids in prompts):
            written(host)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(server, 0)
    wait_until(lambda: group_ended(server), 20, "the writers to end")
    reader = hashtap.open(tmp_path)
    for ids in prompts:
        assert_captured(reader, ids)
    assert not reader.directory.partials()
    assert verify(tmp_path).ok


def test_a_writer_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(SetupError, match="a writer process ended as it started, with status 1"):
        Host(tmp_path)
    monkeypatch.setattr("sys.executable", "/none")
    with pytest.raises(SetupError, match=r"a writer process cannot be started: .*/none"):
        Host(tmp_path)


def test_a_start_without_threads_leaves_no_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    launch = Writers._launch
    monkeypatch.setattr(Writers, "_launch", lambda self: (child := launch(self), started.append(child.pid))[0])
    no_more_listeners(monkeypatch, after=1)
    with pytest.raises(SetupError, match="cannot be listened to: can't start new thread; raise the limit on threads"):
        Host(tmp_path, capture_writers=2)
    assert len(started) == 1
    assert not Path(f"/proc/{started[0]}").exists()


def test_a_closed_session_stores_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    host = Host(tmp_path)
    host.session.close()
    assert captured(host, prompt(1, 30))
    assert "a forward was captured after the writer was closed: it is not stored" in caplog.text
    assert host.session.counters()["ring_used_bytes"] == 0


def test_a_session_forgets_its_prompts(tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert captured(host, prompt(0, 50))
    host.session._writers.drain()
    gc.collect()
    before = len(gc.get_objects()), len(weakref.finalize._registry)  # type: ignore[attr-defined]
    for number in range(1, 300):
        while not host.session.may_admit():
            time.sleep(0.001)
        assert captured(host, prompt(number, 50))
    host.session._writers.drain()
    gc.collect()
    objects, finalizers = len(gc.get_objects()), len(weakref.finalize._registry)  # type: ignore[attr-defined]
    assert objects - before[0] < 100
    assert finalizers == before[1]
    assert not host.session._writers._passes._writers
    assert not len(host.session._writers._unwritten)
    assert all(len(child.forgotten) < 10 for child in host.session._writers._children)
    host.session.close()


def test_a_writer_loads_nothing_heavy(tmp_path: Path) -> None:
    host = Host(tmp_path)
    assert captured(host, prompt(1, 30))
    written(host)
    for pid in processes(host):
        assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text()
    host.session.close()


def test_a_copy_that_fails_costs_its_own_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The writers never hear of them, and go on."""
    caplog.set_level(logging.CRITICAL, "hashtap")  # a line that is kept keeps the prompt, by its traceback
    host = Host(tmp_path, dtype=Dtype.FP32, capture_writers=1)
    before, send = processes(host), host.session._transport.send

    def fails() -> None:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(host.session._transport, "send", lambda *given, **more: send(*given, **more) and fails)
        assert captured(host, prompt(1, 30))
        written(host)
    gc.collect()
    for number in range(2, 12):
        assert captured(host, prompt(number, 30))
    reader = host.close()
    assert set(reader.keys()) == {prompt_key(prompt(number, 30)) for number in range(2, 12)}
    counts = host.session.counters()
    assert (processes(host), counts["bad_frames"], counts["write_errors"]) == (before, 1, 0)
    assert counts["ring_used_bytes"] == 0


def test_a_writers_lines_reach_the_log_and_are_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hashtap")
    host = Host(tmp_path)
    assert captured(host, prompt(1, 30))
    host.session.close()
    assert any(message.startswith("sealed ") for message in caplog.messages)
    (limit,) = (each for each in log.filters if isinstance(each, RepeatLimit))
    assert not [text for text in limit._seen if str(tmp_path) in text]


def test_memory_that_cannot_be_mapped_is_given_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    closed: list[int] = []
    close = os.close
    monkeypatch.setattr("os.close", lambda descriptor: (closed.append(descriptor), close(descriptor)))
    monkeypatch.setattr("hashtap.ring_memory.mmap.mmap", fails)
    with pytest.raises(SetupError, match=r"--capture-ring-gib .* cannot be had .*Cannot allocate memory"):
        RingMemory.create(1 << 20)
    gc.collect()
    assert len(closed) == 1
