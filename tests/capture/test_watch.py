import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.capture.build import Host

from hashtap import watch
from hashtap.watch import Watch, line

ROOT = Path(__file__).parents[2]

# As SGLang does it: the variable is set first, each process keeps files there, /metrics adds them up.
CHILD = """
import sys
from pathlib import Path
from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from tests.capture.test_session import Host
from hashtap.watch import Watch

host = Host(Path(sys.argv[1]), capture_writers=1)
watch = Watch(host.session.counters, rank=3, prometheus=True, every_s=0.01)
kept = [host.admit(str(n), [n, n + 1, n + 2]) for n in range(5)]
host.forward(*((str(n), [n, n + 1, n + 2], 0) for n in range(5)))
kept.append(host.admit("again", [4, 5, 6]))
host.forward(("again", [4, 5, 6], 0))
host.session.close()
watch.close()
registry = CollectorRegistry()
multiprocess.MultiProcessCollector(registry)
print(generate_latest(registry).decode())
print("seal_ms", host.session.counters()["seal_ms"])
"""


def test_metrics_as_sglang_shows_them(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    environment = {
        **os.environ,
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "metrics"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    command = [sys.executable, "-c", CHILD, str(tmp_path / "captures")]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100, env=environment).stdout
    shown = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("hashtap_"))
    found = {name.partition("{")[0]: float(value) for name, value in shown.items() if 'rank="3"' in name}
    counted = {"captured": 6, "records": 5, "shards": 1, "rows": 18, "raw_bytes": 18 * 4 * 24 * 2, "duplicates": 1}
    counted |= dict.fromkeys(("dropped", "write_errors", "bad_frames", "failed_proofs"), 0)
    for name, value in counted.items():
        assert found[f"hashtap_{name}_total"] == value, name
    assert (found["hashtap_queue"], found["hashtap_ring_used_bytes"]) == (0, 0)
    assert found["hashtap_ratio"] == found["hashtap_raw_bytes_total"] / found["hashtap_stored_bytes_total"] > 0
    assert f"\nseal_ms {found['hashtap_seal_ms_total']:.0f}\n" in text


def test_a_line_a_minute_when_something_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hashtap")
    monkeypatch.setattr(watch, "LINE_EVERY_S", 0.1)
    with Host(tmp_path) as host:
        extra = {"captured": 0, "ring_used_bytes": 0}
        watching = Watch(lambda: host.writer.counters() | extra, rank=0, prometheus=False, every_s=0.01)
        host.capture([[1, 2, 3]])
        host.writer.drain()
        time.sleep(0.5)
        watching.close()
    lines = [message for message in caplog.messages if message.startswith("the last")]
    assert 1 <= len(lines) <= 2
    assert "rows" in lines[0]


def test_what_the_line_says() -> None:
    names = ("captured", "records", "shards", "seal_ms", "rows", "raw_bytes", "stored_bytes", "queue")
    before = dict.fromkeys((*names, "ring_used_bytes", "dropped", "write_errors", "duplicates"), 0)
    now = before | {"captured": 1200, "records": 1000, "shards": 2, "seal_ms": 90, "rows": 5000, "raw_bytes": 3 * 10**9}
    now |= {"stored_bytes": 2 * 10**9, "queue": 4, "ring_used_bytes": 5 * 10**6, "dropped": 7}
    assert line(before, now, 60.0) == (
        "the last 60 s: 1,200 prompts captured, 1,000 sealed in 2 shards in 45 ms each, 5,000 rows, 50.0 MB/s, "
        "ratio 1.500; 4 forwards queued, ring 5.0 MB, 7 dropped"
    )
