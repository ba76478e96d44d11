"""A server whose disk fills up, stays full and is emptied: run on a small disk by ``test_full_disk.py``.

``python -m tests.server.disk_fills_up DISK WHEN_FULL`` prints what happened, as JSON.
"""

import json
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

from bench.server import Server
from tests import models
from tests.server.conftest import COMMON_FLAGS
from tests.server.prompts import random_prompts, receipt
from tests.server.waiting import wait_until

from hashtap.identity import prompt_key
from hashtap.reader import Reader
from hashtap.verify import verify

DISK_MB, LEFT_MB = 50, 6
WATCHDOG_S, WAIT_S = 16, 4
FULL_FOR_S = 40
"""More than the watchdog's time, and the half of it after which it looks again."""


class Run:
    """Sends prompts one by one and keeps what became of each.

    Attributes:
        sent: by phase, the key, receipt and seconds of each prompt.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.sent: dict[str, list[tuple[str, dict[str, Any], float]]] = {"before": [], "full": [], "after": []}
        self._seeds = count()

    def send(self, phase: str) -> str:
        """Send the next prompt; the state that its receipt tells."""
        (prompt,) = random_prompts([300], seed=next(self._seeds))
        began = time.monotonic()
        found = receipt(self.server.generate(prompt))
        self.sent[phase].append((prompt_key(prompt).hex(), found, time.monotonic() - began))
        return str(found["state"])

    def counters(self) -> dict[str, int]:
        return dict(self.server.get("/server_info")["internal_states"][0]["hashtap"]["counters"])

    def promised(self) -> set[str]:
        """The keys of all prompts whose receipts say that they are captured."""
        return {key for answers in self.sent.values() for key, found, _ in answers if found["state"] == "captured"}


def main(disk: Path, when_full: str) -> dict[str, Any]:
    captures, filler = disk / "captures", disk / "filler"
    flags = ("--capture-dir", captures, "--capture-layers", 1, 4, 6, "--capture-codec", "none")
    flags += ("--capture-ring-gib", 0.004, "--capture-shard-gib", 0.001, "--capture-seal-after-s", 0.3)
    flags += ("--capture-when-full", when_full, "--capture-wait-s", WAIT_S, "--watchdog-timeout", WATCHDOG_S)
    with Server(models.llama(), *COMMON_FLAGS, *flags, threads=1) as server:
        filler.write_bytes(bytes((DISK_MB - LEFT_MB) << 20))
        run = Run(server)
        while run.send("before") == "captured":
            pass
        full_since = time.monotonic()
        while time.monotonic() < full_since + FULL_FOR_S:
            run.send("full")
            assert server.generate([5, 6, 7], custom_params=None)["meta_info"]["completion_tokens"] == 1
            time.sleep(0.3)
        during = run.counters()
        filler.unlink()
        wait_until(lambda: run.counters()["queue"] == 0, 30, "the ring to be written")
        for _ in range(5):
            run.send("after")
        wait_until(lambda: sealed(captures) >= run.promised(), 30, "all that was captured to be sealed")
        wait_until(lambda: run.counters()["records"] >= len(run.promised()), 30, "the counters to say so")
        return {
            "states": {phase: [found["state"] for _, found, _ in answers] for phase, answers in run.sent.items()},
            "reasons": sorted({str(found["reason"]) for answers in run.sent.values() for _, found, _ in answers}),
            "seconds": {phase: [seconds for *_, seconds in answers] for phase, answers in run.sent.items()},
            "extra": sorted(sealed(captures) - run.promised()),
            "during": during,
            "after": run.counters(),
            "verified": verify(captures).ok,
            "log": server.log_text(),
            "exit_status": server.terminate(),
        }


def sealed(captures: Path) -> set[str]:
    return {capture.key.hex() for capture in Reader(captures)}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2])))
