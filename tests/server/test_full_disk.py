"""A server whose disk is full for longer than SGLang's watchdog would wait."""

import json
from pathlib import Path

import pytest
from tests.server.disk_fills_up import DISK_MB, WAIT_S
from tests.tmpfs import on_tmpfs

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.cell("a full disk", "marked", "prompts wait, then are `dropped` whole")
@pytest.mark.parametrize("when_full", ["wait", "drop"])
def test_a_disk_that_stays_full(tmp_path: Path, when_full: str) -> None:
    """What is captured waits in the ring; then prompts wait, then their captures are dropped whole, and all say so."""
    command = ("-m", "tests.server.disk_fills_up", str(tmp_path), when_full)
    answer = json.loads(on_tmpfs(tmp_path, DISK_MB, *command, timeout_s=500.0))
    states, seconds, log = answer["states"], answer["seconds"], answer["log"]
    # It answered all along, and ended as it should.
    assert answer["exit_status"] == 0
    assert "watchdog" not in log.lower().replace("watchdog_timeout", "").replace("watchdog initialized", "")
    # Prompts wait once, until it is plain that the disk stays full.
    assert states["before"] == ["captured"] * (len(states["before"]) - 1) + ["dropped"]
    assert (max(seconds["before"]) > WAIT_S - 0.5) == (when_full == "wait")
    assert len(states["before"]) > 10
    assert len(states["full"]) > 20
    assert set(states["full"]) == {"dropped"}
    # And capture goes on. What a receipt promised is there, all of it and nothing else.
    assert states["after"] == ["captured"] * 5
    assert answer["verified"]
    assert answer["extra"] == []
    assert answer["reasons"] == ["None", "the ring was full: No space left on device"]
    during, after = answer["during"], answer["after"]
    assert during["dropped"] == after["dropped"] == len(states["full"]) + 1
    assert during["write_errors"] > 10
    assert during["ring_used_bytes"] > 3 << 20
    assert (after["ring_used_bytes"], after["records"]) == (0, len(states["before"]) - 1 + 5)
    for line in (
        "what is captured waits: [Errno 28] No space left",
        "prompts are dropped: the ring was full: No space",
    ):
        assert line in log
    assert "can be written to again" in log
