"""What capture costs the scheduler's thread per forward, with everything on it but the GPU itself.

Session, plan, contract checks, the kernel launcher's own work and the hand-over to a real writer run as
they do beside a GPU; streams, events and copies do nothing, and the kernel is not run. The time must not
grow with the number of tokens, only with that of requests. The prompt's key, which is computed once when
a request arrives, is a figure of its own.
"""

import logging
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from bench.figures import Figure, Measured

os.environ["TRITON_INTERPRET"] = "1"  # lets the launcher be built without a GPU

import torch

import hashtap.session
from hashtap import CaptureConfig, prompt_key
from hashtap.directory import CaptureDirectory
from hashtap.facts import ShardFacts
from hashtap.session import Batch, Session
from hashtap.staging import Slot, StagedTransport
from hashtap_kernels import Gather
from hashtap_kernels.layout import Geometry

GEOMETRY = Geometry(4, 64)
REQUESTS = (1, 8, 64, 256)
TOKENS = (256, 8192)  # of a forward; the second is what is reported
FORWARDS = 200


class NoCuda:
    """Streams and events that do nothing."""

    def query(self) -> bool:
        return True

    def Stream(self) -> "NoCuda":  # noqa: N802
        return self

    def Event(self) -> "NoCuda":  # noqa: N802
        return self

    def current_stream(self) -> "NoCuda":
        return self

    def stream(self, stream: Any) -> Any:
        return nullcontext()

    def wait_event(self, event: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...


class Launcher(Gather):
    """The real launcher, which stops short of starting the kernel."""

    def _run(self, *_: Any) -> None: ...


def staged(_device: str, _geometry: Geometry, memory: Any, *_: Any) -> StagedTransport:
    cuda = NoCuda()
    slots = [Slot(torch.empty(1 << 23, dtype=torch.uint8), cuda, cuda) for _ in range(2)]
    launcher = Launcher(GEOMETRY, "cpu", TOKENS[-1])
    return StagedTransport(launcher, slots, torch.from_numpy(memory), (1, 2), cuda, lambda *_: None)


def measure() -> Measured:
    """Medians over many forwards, the sizes interleaved."""
    check_that_it_captures()
    times: dict[tuple[int, int], list[float]] = {(r, t): [] for r in REQUESTS for t in TOKENS if t >= r}
    with staged_session() as session:
        for number in range(FORWARDS):
            for (requests, tokens), list_ in times.items():
                list_.append(forward(session, number, requests, tokens))
    key_ns = 1e9 * statistics.median(key_time() for _ in range(200))
    small, large = (statistics.median(times[64, tokens]) for tokens in TOKENS)
    return Measured(
        [
            Figure("hot_path.host_us_64_requests", large * 1e6, 300, at_least=False, unit="us"),
            Figure("hot_path.time_8192_over_256_tokens", large / small, 1.25, at_least=False),
            Figure("hot_path.key_ns_per_token", key_ns, 15, at_least=False, unit="ns"),
        ],
        {
            f"{requests} requests, {tokens} tokens": {
                "median_us": statistics.median(seconds) * 1e6,
                "p99_us": float(np.percentile(seconds, 99)) * 1e6,
            }
            for (requests, tokens), seconds in times.items()
        },
    )


@contextmanager
def staged_session() -> Iterator[Session]:
    """A session as it runs beside a GPU, less the GPU."""
    logging.getLogger("hashtap").setLevel(logging.CRITICAL)  # the ring holds no frames, as no kernel ran
    hashtap.session.open_transport, original = staged, hashtap.session.open_transport
    try:
        with tempfile.TemporaryDirectory(prefix="hot-path-") as work:
            session = make_session(Path(work))
            yield session
            session.close()
    finally:
        hashtap.session.open_transport = original


def make_session(work: Path, geometry: Geometry = GEOMETRY, forward_tokens: int = TOKENS[-1]) -> Session:
    """A session for forwards of so many tokens, with room for three of them or more."""
    directory = CaptureDirectory.create(work)
    facts = ShardFacts(
        model="none",
        epoch="e",
        boundaries=tuple(range(1, geometry.layers)),
        final_norm="post",
        geometry=geometry,
        seed=(1, 2),
        directory_uuid=directory.uuid,
        writer="0" * 32,
        rank=0,
        versions={},
        server_flags={},
    )
    ring_gib = max(1 / 16, 3 * forward_tokens * (geometry.row_bytes + 256) / 2**30)
    config = CaptureConfig(capture_dir=str(work), capture_ring_gib=ring_gib)
    return Session(config, facts, directory, device="cpu", max_forward_tokens=forward_tokens)


STATES = [torch.zeros(TOKENS[-1], GEOMETRY.hidden, dtype=torch.bfloat16) for _ in range(4)]
IDS = torch.zeros(TOKENS[-1], dtype=torch.int64)


def forward(session: Session, number: int, requests: int, tokens: int) -> float:
    """Seconds that one forward of ``requests`` whole prompts takes on the calling thread."""
    each = tokens // requests
    rids = [f"{number}-{i}" for i in range(requests)]
    kept = [session.admit(rid, np.zeros(each, np.int64)) for rid in rids]
    batch = Batch(rids, [each] * requests, [0] * requests, IDS, IDS, STATES[:3], STATES[3])
    while not session.may_admit():
        time.sleep(1e-3)
    started = time.perf_counter()
    session.capture(batch)
    took = time.perf_counter() - started
    while session.counters()["queue"]:  # so that the writer's threads do not run into the next measurement
        time.sleep(1e-4)
    assert all(tracked.state == "captured" for tracked in kept)
    return took


def key_time() -> float:
    """Seconds a token that the key of an 8,192-token prompt takes."""
    ids = np.arange(8192, dtype=np.int64)
    started = time.perf_counter()
    prompt_key(ids)
    return (time.perf_counter() - started) / len(ids)


def check_that_it_captures() -> None:
    """The gate: the same session, with the reference in the kernel's place, stores the states bit for bit."""
    work = Path(tempfile.mkdtemp(prefix="hot-path-"))
    try:
        session = make_session(work)
        bits = np.random.default_rng(0).integers(0, 1 << 15, (4, 300, GEOMETRY.hidden), dtype=np.uint16)
        layers = [torch.from_numpy(layer.view(np.int16).copy()).view(torch.bfloat16) for layer in bits]
        ids = torch.arange(300)
        kept = session.admit("gate", ids.numpy())
        session.capture(Batch(["gate"], [300], [0], ids, ids, layers[:3], layers[3]))
        session.close()
        found = hashtap.open(work).by_token_ids(ids.numpy()).hidden_states
        if kept.state != "captured" or not np.array_equal(found, bits.transpose(1, 0, 2)):
            raise SystemExit("no figures without right captures: the session stored other states than it was given")
    finally:
        shutil.rmtree(work, ignore_errors=True)
