"""Tells how a capturing rank is doing: numbers for Prometheus every few seconds, a line in the log every minute.

The numbers go where SGLang's own do, so that its ``/metrics`` shows them when ``--enable-metrics`` is on.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from hashtap.logs import log

__all__ = ["GAUGES", "Watch", "line"]

EVERY_S = 5.0
LINE_EVERY_S = 60.0
GAUGES = {
    "queue": "forwards that are not written yet",
    "ring_used_bytes": "of the ring on the way to disk",
    "ratio": "states written since the start over their bytes on disk",
}
"""Numbers that also go down; all others only grow."""

Counts = Mapping[str, int]


class Watch:
    """Looks at the counts of a rank, on a thread of its own until :meth:`close`.

    Args:
        counters: the counts now.
        rank: a label of the metrics.
        prometheus: whether to keep metrics as well. Needs prometheus_client.
    """

    def __init__(
        self, counters: Callable[[], Counts], *, rank: int, prometheus: bool, every_s: float = EVERY_S
    ) -> None:
        self._counters = counters
        self._every_s = every_s
        self._shown = dict(counters())  # what the metrics say
        self._told = (time.monotonic(), dict(self._shown))  # when the last line was logged, and the counts then
        self._metrics = _metrics(self._shown, rank) if prometheus else {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hashtap-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Bring the metrics up to date, then stop."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._every_s):
            self._look()
        self._look()

    def _look(self) -> None:
        now = dict(self._counters())
        for name, metric in self._metrics.items():
            if name == "ratio":
                metric.set(_ratio(now))
            elif name in GAUGES:
                metric.set(now[name])
            else:
                metric.inc(now[name] - self._shown[name])
        self._shown = now
        told_at, told = self._told
        seconds = time.monotonic() - told_at
        if seconds >= LINE_EVERY_S:
            self._told = (time.monotonic(), now)
            if now != told:
                log.info("%s", line(told, now, seconds))


def line(before: Counts, now: Counts, seconds: float) -> str:
    """What happened between two looks, in one line."""
    new = {name: now[name] - before[name] for name in now}
    ratio = f", ratio {_ratio(new):.3f}" if new["stored_bytes"] else ""
    sealing = f" in {new['seal_ms'] / new['shards']:,.0f} ms each" if new["shards"] else ""
    trouble = (
        "dropped",
        "incomplete",
        "needs_recompute",
        "refused",
        "duplicates",
        "failed_proofs",
        "bad_frames",
        "write_errors",
    )
    return (
        f"the last {seconds:.0f} s: {new['captured']:,} prompts captured, {new['records']:,} sealed in {new['shards']} "
        f"shards{sealing}, {new['rows']:,} rows, {new['raw_bytes'] / seconds / 1e6:,.1f} MB/s{ratio}; "
        f"{now['queue']} forwards queued, ring {now['ring_used_bytes'] / 1e6:,.1f} MB"
        + "".join(f", {new[name]:,} {name.replace('_', ' ')}" for name in trouble if new.get(name))
    )


def _ratio(counts: Counts) -> float:
    return counts["raw_bytes"] / counts["stored_bytes"] if counts["stored_bytes"] else 0.0


def _metrics(counts: Counts, rank: int) -> dict[str, Any]:
    # After SGLang has said where its processes keep theirs: prometheus_client looks when it is imported.
    from prometheus_client import Counter, Gauge

    metrics: dict[str, Any] = {}
    for name in [*counts, "ratio"]:
        if name in GAUGES:
            gauge = Gauge(f"hashtap_{name}", GAUGES[name], ["rank"], multiprocess_mode="mostrecent")
            metrics[name] = gauge.labels(rank)
        else:
            counter = Counter(f"hashtap_{name}", f"hashtap's count of {name.replace('_', ' ')}", ["rank"])
            metrics[name] = counter.labels(rank)
            metrics[name].inc(counts[name])
    return metrics
