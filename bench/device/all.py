"""All GPU checks in one go, in under six minutes, with one table and one record.

PYTHONPATH=kernels:capture python bench/device/all.py [--dry] [--record FILE]

Each script is a process of its own, so that one that fails takes no other along. Those that measure run alone.
"""

from harness import DRY, bar_line  # isort: skip

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hashtap.bench.surroundings import surroundings

HERE = Path(__file__).parent
TOTAL_S = 345
PARTS = 2 if DRY else 6
# What runs at a time, and for how long at most; the bars that matter most come first.
STAGES = [
    ([f"correctness --part {part}/{PARTS}" for part in range(PARTS)], 90),
    (["kernel"], 70),
    (["prefill"], 120),
    (["transfer"], 60),
    (["replay"], 30),
    (["naive"], 30),
]


@dataclass
class Run:
    """One script under way."""

    name: str
    process: subprocess.Popen[bytes]
    record: Path
    log: Path


def start(command: str, folder: Path, limit_s: float) -> Run:
    name, *options = command.split()
    stem = command.replace(" ", "").replace("/", "of")
    record, log = folder / f"{stem}.json", folder / f"{stem}.log"
    arguments = [sys.executable, str(HERE / f"{name}.py"), *options, "--record", str(record)]
    arguments += ["--budget-s", f"{limit_s - 10:.0f}", *(["--dry"] if DRY else [])]
    with log.open("wb") as output:
        process = subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT, process_group=0)
    return Run(name, process, record, log)


def stop(run: Run) -> None:
    """End a script and what it started, if it has not ended."""
    if run.process.poll() is None:
        os.killpg(run.process.pid, signal.SIGKILL)
        run.process.wait()


def finish(run: Run, until: float) -> dict[str, Any]:
    """Wait for a script, not past ``until``: its record, or what there is instead of one."""
    try:
        run.process.wait(max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        stop(run)
    if run.process.returncode:
        print(f"--- {run.name}: exit status {run.process.returncode}\n{run.log.read_text()[-2500:]}", flush=True)
    record: dict[str, Any] = {"ended": False, "bars": []}
    if run.record.exists():
        record = json.loads(run.record.read_text())
    end = {"figure": f"{run.name} came to its end", "value": record["ended"], "least": True, "most": None}
    return record | {"bars": [end | {"ok": record["ended"]}, *record["bars"]]}


def table(bars: list[dict[str, Any]]) -> list[str]:
    """The figures line by line, what must be exact in one line unless it is not."""
    exact = [bar for bar in bars if bar["least"] is True]
    wrong = [bar for bar in exact if not bar["ok"]]
    lines = [bar_line(bar) for bar in bars if bar["least"] is not True or not bar["ok"]]
    return [*lines, f"exact_checks {len(exact) - len(wrong)} =={len(exact)} {'SHORT' if wrong else 'ok'}"]


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry", action="store_true", help="tiny sizes on a CPU, in Triton's interpreter")
    default = Path(os.environ.get("OUT", ".")) / "device-all.json"
    parser.add_argument("--record", type=Path, default=default, help="where to write the record [%(default)s]")
    options = parser.parse_args()
    began = time.monotonic()
    scripts: list[dict[str, Any]] = []
    bars: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="device-") as folder:
        for commands, limit_s in STAGES:
            left_s = began + TOTAL_S - time.monotonic()
            started, limit_s = time.monotonic(), min(limit_s, left_s)
            runs = [start(command, Path(folder), limit_s) for command in commands] if left_s > 15 else []
            try:
                records = [finish(run, started + limit_s) for run in runs]
            finally:
                for run in runs:
                    stop(run)
            bars += [bar for record in records for bar in record["bars"]]
            if not runs:
                name = f"{commands[0].split()[0]} was begun"
                bars.append({"figure": name, "value": False, "least": True, "most": None, "ok": False})
            took_s = time.monotonic() - started
            print(f"{commands[0]}: {took_s:.0f} s", flush=True)
            scripts.append({"commands": commands, "took_s": took_s, "records": records})
    good = all(bar["ok"] is not False for bar in bars)
    facts = surroundings(["python", "bench/device/all.py", *sys.argv[1:]]) | {"script": "all", "dry": DRY, "ok": good}
    facts["took_s"] = time.monotonic() - began
    options.record.write_text(json.dumps(facts | {"bars": bars, "scripts": scripts}, indent=1) + "\n")
    print("\n".join(table(bars)), f"record: {options.record}", sep="\n")
    sys.exit(not good)


if __name__ == "__main__":
    main()
