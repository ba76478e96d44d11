"""Prompts of real states through a session as it runs on a CPU server: reference gather, ring and writer."""

import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from bench.clock import cpu_s
from bench.feed import HIDDEN, Feed
from bench.hot_path import TOKENS, make_session

import hashtap
from hashtap.exponents import TABLE_ROWS
from hashtap.session import Batch, Session
from hashtap.shard import INDEX_COLUMNS, RECORD_COLUMNS
from hashtap.verify import verify
from hashtap.writer_process import STATE_EVERY_S
from hashtap_kernels.layout import MAX_FRAME_TOKENS, Geometry

__all__ = ["FORWARD", "captured"]

FORWARD = TOKENS[-1]  # the most rows of a forward


def captured(geometry: Geometry, length: int, prompts: int, *, check: bool) -> tuple[float, float]:
    """CPU seconds and stored bytes of so many prompts through session, reference gather and writer.

    The bytes are those of frames and of the rows of index and records; prompts are forwarded one by one.
    """
    rows = max(TABLE_ROWS, min(length, FORWARD))
    states = real_states(geometry, rows)
    with tempfile.TemporaryDirectory(prefix="growth-") as work:
        session = make_session(Path(work), geometry, rows)
        prefill(session, states, TABLE_ROWS, 0)
        settle(session)  # from here on there is a table of exponents
        pids = session._writers.pids
        stored, cpu = session.counters()["stored_bytes"], cpu_s(pids)
        for number in range(1, prompts + 1):
            prefill(session, states, length, number)
        settle(session)
        cpu = cpu_s(pids) - cpu
        frames = prompts * -(-length // MAX_FRAME_TOKENS)
        stored = session.counters()["stored_bytes"] - stored
        stored += 8 * (frames * len(INDEX_COLUMNS) + prompts * len(RECORD_COLUMNS))
        session.close()
        if check:
            compare(Path(work), states, prompts + 1)
    return cpu, stored


def prefill(session: Session, states: Sequence[torch.Tensor], length: int, number: int) -> None:
    """Forward one prompt, in chunks of at most ``FORWARD`` rows."""
    ids, rid = torch.arange(length), str(number)
    tracked = session.admit(rid, ids.numpy(), salt=rid.encode())
    for start in range(0, length, FORWARD):
        chunk = ids[start : start + FORWARD]
        while not session.may_admit():
            time.sleep(1e-3)
        session.capture(Batch([rid], [len(chunk)], [start], chunk, chunk, states[:-1], states[-1]))
    if tracked.state != "captured":
        raise SystemExit(f"no figures without right captures: {tracked.state}, {tracked.reason}")


def settle(session: Session) -> None:
    """Wait until all is written, and counted."""
    while session.counters()["queue"]:
        time.sleep(1e-3)
    time.sleep(2 * STATE_EVERY_S)


def compare(work: Path, states: Sequence[torch.Tensor], count: int) -> None:
    """The gate: everything is there and verified, and its bits are those that were sent."""
    sent = np.stack([layer.view(torch.int16).numpy().view(np.uint16) for layer in states], axis=1)
    report, reader = verify(work), hashtap.open(work)
    same = all(np.array_equal(capture.hidden_states, sent[np.arange(len(capture)) % FORWARD]) for capture in reader)
    if not report.ok or not same or len(reader) != count:
        raise SystemExit(f"no figures without right captures: {report.to_json()}")


@cache
def real_states(geometry: Geometry, rows: int) -> list[torch.Tensor]:
    """Real states of a small model side by side, one above the other and again: L tensors bfloat16 ``[rows, H]``."""
    bits = Feed(MAX_FRAME_TOKENS, -(-geometry.hidden // HIDDEN)).rows
    bits = np.concatenate([bits, np.roll(bits, 101, axis=0)], axis=1)  # for layers 5 to 8
    bits = bits[np.arange(rows) % len(bits), :, : geometry.hidden]
    return [
        torch.from_numpy(bits[:, layer].view(np.int16).copy()).view(torch.bfloat16) for layer in range(geometry.layers)
    ]
