"""A disk that is really full: a tmpfs of 50 MB, mounted in a namespace of its own."""

import json
from pathlib import Path

import pytest
from tests.tmpfs import on_tmpfs

CHILD = """
import json, logging, os, sys, time
from pathlib import Path
from tests.capture.build import Host, states_of
from hashtap.reader import Reader
from hashtap.verify import verify
from hashtap_kernels.layout import Geometry

path, logged = Path(sys.argv[1]) / "captures", []
keep = logging.Handler()
keep.emit = lambda record: logged.append(record.getMessage())
logging.getLogger("hashtap").addHandler(keep)
geometry = Geometry(4, 1024)
filler = Path(sys.argv[1]) / "filler"
filler.write_bytes(bytes(30 << 20))
answer = {}

def captured():
    found = sorted(capture.token_ids[0] for capture in Reader(path))
    for capture in Reader(path):
        assert (capture.hidden_states == states_of(capture.token_ids.tolist(), geometry)).all()
    return [int(number) for number in found]

with Host(path, geometry, threads=2, codec="none", shard_bytes=4 << 20, seal_after_s=0.2) as host:
    number = 0
    while host.writer.counters()["write_errors"] == 0:  # 0.8 MB each
        number += 1
        host.capture([[number] * 100])
        time.sleep(0.02)
    full_at = number
    until = time.monotonic() + 2
    while time.monotonic() < until:  # and it stays full
        number += 1
        host.capture([[number] * 100])
        time.sleep(0.2)
    answer["trouble"] = host.writer.trouble
    filler.unlink()
    host.settle()
    for _ in range(5):
        number += 1
        host.capture([[number] * 100])
    host.writer.drain()
    answer["counters"] = host.writer.counters()
    answer["released"] = host.released == host.forwards
answer |= {"sent": number, "full_at": full_at, "captured": captured(), "ok": verify(path).ok}
answer |= {"partials": len(host.directory.partials()), "files": sorted(file.suffix for file in path.iterdir())}
answer["log"] = [line for line in logged if "No space left" in line]
print(json.dumps(answer))
"""


TAKEN_AWAY = """
import json, subprocess, sys, time
from pathlib import Path
from tests.capture.build import Host, states_of
from hashtap.reader import Reader
from hashtap.verify import verify

disk, path, told = Path(sys.argv[1]), Path(sys.argv[1]) / sys.argv[2], []

def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)

def run(*command):
    subprocess.run(command, check=True)

def captured():
    for capture in Reader(path):
        assert (capture.hidden_states == states_of(capture.token_ids.tolist())).all()
    return sorted(int(capture.token_ids[0]) for capture in Reader(path))

def in_trouble(prompt):
    errors = host.writer.counters()["write_errors"]
    host.capture([prompt])
    until(lambda: host.writer.counters()["write_errors"] > errors)
    told.append(host.writer.trouble)

with Host(path, threads=2, codec="none") as host:
    host.capture([[1] * 100])
    host.writer.drain()
    run("mount", "-o", "remount,ro", str(disk))
    in_trouble([2] * 100)
    run("mount", "-o", "remount,rw", str(disk))
    host.settle()
    host.writer.drain()
    before = captured()
    run("umount", "-l", str(disk))
    in_trouble([3] * 100)
    beneath = [str(file) for file in disk.rglob("*")]
    run("mount", "-t", "tmpfs", "-o", "size=50m", "none", str(disk))
    path.mkdir(exist_ok=True)
    (path / "hashtap.json").write_text(json.dumps({"format": 1, "uuid": host.directory.uuid}))
    host.settle()
    host.capture([[4] * 100])
after = captured()
print(json.dumps({"told": told, "before": before, "beneath": beneath, "after": after, "ok": verify(path).ok}))
"""


@pytest.mark.parametrize("where", ["captures", "."], ids=["in it", "its mount point"])
def test_a_disk_that_is_taken_away(tmp_path: Path, where: str) -> None:
    """Read-only for a while, then unmounted and mounted again: what was captured in the meantime is written then.

    Not to the disk beneath, where an empty directory may stand in its place.
    """
    answer = json.loads(on_tmpfs(tmp_path, 50, "-c", TAKEN_AWAY, str(tmp_path), where))
    assert answer["told"] == ["Read-only file system", "No such file or directory"]
    assert answer["beneath"] == []
    assert (answer["before"], answer["after"], answer["ok"]) == ([1, 2], [3, 4], True)


def test_a_disk_that_fills_up_and_is_emptied(tmp_path: Path) -> None:
    """What is captured while it is full waits, which is counted and told; then all of it is there."""
    answer = json.loads(on_tmpfs(tmp_path, 50, "-c", CHILD, str(tmp_path)))
    counters = answer["counters"]
    assert (answer["ok"], answer["released"], answer["partials"]) == (True, True, 0)
    assert answer["captured"] == list(range(1, answer["sent"] + 1))
    assert answer["sent"] > answer["full_at"] + 5 > 15
    assert counters["records"] == answer["sent"]
    assert counters["write_errors"] > 1
    assert answer["trouble"] == "No space left on device"
    assert set(answer["files"]) == {".json", ".safetensors"}
    assert len(answer["log"]) == 1
