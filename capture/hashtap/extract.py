"""Captures a file of samples: sends what is missing, checks every receipt, waits until all is sealed.

Several samples may share a prompt; it is sent once. A prompt counts as captured only when its key
stands in a sealed shard, so a run that was stopped anywhere goes on by starting it again.
"""

import asyncio
import itertools
import random
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hashtap.chat import ChatTokenizer
from hashtap.client import Busy, Refused, ServerClient, ServerInfo, TryAgain
from hashtap.errors import HashtapError, MismatchError, ServerLost, UsageError
from hashtap.estimate import RATIO, Estimate
from hashtap.lead import Lead
from hashtap.manifest import Manifest
from hashtap.open_files import allow_connections
from hashtap.progress import Display
from hashtap.quarantine import Quarantine
from hashtap.samples import BadSample, load_samples
from hashtap.sealed import RemoteDirectory, SealedKeys, SharedDirectory
from hashtap.tally import Prompt, Summary, Tally

__all__ = ["FAILED", "ExtractOptions", "Extraction"]

FAILED = "not captured"
"""Why samples were left out whose prompt was tried in vain: they may be captured another time."""

RESENDS = 2
POLL_S = 0.5
LOOK_EVERY_S = 10.0
ASK_EVERY_S = 5.0
LOST_GRACE_S = 10.0
MAX_BACKOFF_S, MAX_DOUBLINGS = 30.0, 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractOptions:
    """How to extract.

    Args:
        server: URL of the server.
        out: the server's capture directory; with ``remote`` a directory of the client's own.
        remote: this machine does not see the capture directory; the server is asked what is sealed.
        layers: boundaries that the server must capture, None for any.
        concurrency: prompts in flight.
        timeout_s: how long one attempt may take.
        attempts: how often a prompt is tried before its samples count as failed; that the server is too busy counts
            only so many times in a row that it captured nothing else meanwhile.
        backoff_s: pause after the first failed attempt; it doubles, with jitter.
        stop_after: give up after so many failed prompts in a row.
        seal_wait_s: send captured prompts again when for so long none of them was sealed.
        ahead_samples: wait while so many prompts are captured that no trainer has taken, see :mod:`hashtap.live`.
        api_key: the server's API key, if it wants one.
        tokenizer: makes ids of messages and text; unless it has a name it is that of the server's model.
    """

    server: str
    out: Path
    remote: bool = False
    layers: tuple[int, ...] | None = None
    concurrency: int = 32
    timeout_s: float = 600.0
    attempts: int = 5
    backoff_s: float = 0.5
    stop_after: int = 20
    seal_wait_s: float = 120.0
    ahead_samples: int | None = None
    api_key: str | None = None
    tokenizer: ChatTokenizer = field(default_factory=ChatTokenizer)


class Extraction:
    """One run over one sample file. :meth:`summary` tells how far it came, also after an error or a cancellation."""

    def __init__(self, samples: str | Path, options: ExtractOptions, display: Display) -> None:
        self._path = Path(samples)
        self._options = options
        self._display = display
        self._summary = Summary()

    def summary(self) -> Summary:
        """What the run achieved; all zero when it never began to send."""
        return self._summary

    async def run(self) -> None:
        """Capture all that is missing.

        Raises:
            UsageError, MismatchError: when options, samples, directory and server do not fit together.
            ServerLost: when the server is gone, or too many prompts failed in a row.
        """
        options, display = self._options, self._display
        connections, timeout_s = options.concurrency, options.timeout_s
        allow_connections(connections)
        async with ServerClient(
            options.server, connections=connections, timeout_s=timeout_s, api_key=options.api_key
        ) as client:
            info = await client.info()
            store = _open_store(options, client, info)
            _check_layers(options.layers, info)
            file = load_samples(self._path, info.limits, options.tokenizer.for_model(info.model))
            for reason, count in file.reasons().items():
                display.say(f"left out before sending: {count:,} of {file.lines:,} lines, {reason}")
            Manifest.merge(options.out, file.samples, epoch=info.epoch, directory_uuid=info.directory)
            tally = Tally(file, info.row_bytes)
            tally.found_sealed(await store.among(list(tally.prompts)))
            if missing := sum(len(prompt.token_ids) for prompt in tally.missing()):
                display.say(f"to capture: {_estimate(missing, info, None if options.remote else options.out).line}")
            with Quarantine(options.out, self._path) as quarantine:
                for bad in file.bad:
                    quarantine.add(bad)
                run = _Run(options, client, info, store, tally, quarantine, display)
                try:
                    await store.begin()
                    await run.capture_missing()
                    await store.finish()
                finally:
                    store.close()
                    self._summary = tally.summary()


class _Run:
    """The part of an extraction that sends: workers, retries, and the wait for the seal."""

    def __init__(
        self,
        options: ExtractOptions,
        client: ServerClient,
        info: ServerInfo,
        store: SealedKeys,
        tally: Tally,
        quarantine: Quarantine,
        display: Display,
    ) -> None:
        self._options, self._client, self._info, self._store = options, client, info, store
        self._tally, self._quarantine, self._display = tally, quarantine, display
        self._failed = False
        self._failures_in_a_row = 0
        self._warned: set[str] = set()
        self._lead = Lead(options.out, info.epoch, tally.prompts, options.ahead_samples)
        self._in_flight = 0

    async def capture_missing(self) -> None:
        ticker = asyncio.create_task(self._tick())
        try:
            missing = self._tally.missing()
            for _ in range(1 + RESENDS):
                await self._send_all(missing)
                missing = await self._await_sealed()
                if not missing:
                    break
            for prompt in missing:
                self._fail(prompt, "captured by the server, but never sealed: its log says why; start it anew")
            if self._failed:
                await self._client.info()  # tells a lost server from bad luck
        finally:
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)
            with suppress(HashtapError):
                await self._look()
            self._display.show(self._tally.snapshot())

    async def _send_all(self, prompts: Sequence[Prompt]) -> None:
        self._tally.phase = "sending"
        queue = deque(prompts)
        workers = [asyncio.create_task(self._work(queue)) for _ in range(min(self._options.concurrency, len(queue)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self, queue: deque[Prompt]) -> None:
        while queue:
            again = queue[0].key in self._tally.acknowledged
            if not again and not self._lead.has_room(self._tally.prompts_captured + self._in_flight):
                self._tally.phase = "waiting for the trainer"
                await asyncio.sleep(POLL_S)
                continue
            self._tally.phase = "sending"
            prompt = queue.popleft()
            self._in_flight += not again
            try:
                await self._send(prompt)
            except Refused as refusal:
                self._leave_out(prompt, "refused by the server", str(refusal))
            except TryAgain as trouble:
                self._fail(prompt, str(trouble))
            else:
                self._tally.acknowledge(prompt)
                self._failures_in_a_row = 0
            finally:
                self._in_flight -= not again

    async def _send(self, prompt: Prompt) -> None:
        failures, stuck, captured = 0, 0, self._tally.prompts_captured
        for attempt in itertools.count():
            self._tally.sent += 1
            try:
                await self._client.capture(prompt.token_ids, prompt.key, self._info)
                return
            except TryAgain as trouble:
                before, captured = captured, self._tally.prompts_captured
                if isinstance(trouble, Busy):
                    # A server that was too busy for this prompt and took others meanwhile will come to it.
                    stuck = 0 if captured > before else stuck + 1
                else:
                    failures += 1
                if self._options.attempts in (failures, stuck):
                    raise
            pause_s = min(self._options.backoff_s * 2 ** min(attempt, MAX_DOUBLINGS), MAX_BACKOFF_S)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))

    async def _await_sealed(self) -> list[Prompt]:
        """Wait while acknowledged prompts are sealed; returns the rest when no more come."""
        self._tally.phase = "sealing"
        acknowledged = self._tally.acknowledged
        lost: ServerLost | None = None
        news_at_s = asked_at_s = time.monotonic()
        while acknowledged:
            waiting = len(acknowledged)
            try:
                await self._look()
                if acknowledged and lost is None and time.monotonic() - asked_at_s > ASK_EVERY_S:
                    asked_at_s = time.monotonic()
                    await self._client.info()
            except ServerLost as error:
                if lost is None:
                    lost, news_at_s = error, time.monotonic()
            if len(acknowledged) < waiting:
                news_at_s = time.monotonic()
            # A server that is being stopped in order still seals what it has.
            elif time.monotonic() - news_at_s > (LOST_GRACE_S if lost else self._options.seal_wait_s):
                break
            await asyncio.sleep(POLL_S)
        if acknowledged and lost is not None:
            raise lost
        return list(acknowledged.values())

    async def _look(self) -> None:
        """Find out what has been sealed since the last look."""
        self._tally.seal(await self._store.among(list(self._tally.acknowledged)))
        self._tally.ratio = self._store.ratio()
        for line in self._store.damaged():
            if line not in self._warned:
                self._warned.add(line)
                self._display.say(f"warning: {line}")

    async def _tick(self) -> None:
        look_at_s = time.monotonic() + LOOK_EVERY_S
        while True:
            self._display.show(self._tally.snapshot())
            await asyncio.sleep(POLL_S)
            if self._tally.phase != "sealing" and time.monotonic() > look_at_s:
                look_at_s = time.monotonic() + LOOK_EVERY_S
                with suppress(ServerLost):
                    await self._look()

    def _fail(self, prompt: Prompt, reason: str) -> None:
        """A failed prompt counts as one, however many attempts it took."""
        self._failed = True
        self._leave_out(prompt, FAILED, reason)
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self._options.stop_after:
            raise ServerLost(f"stopped: {self._failures_in_a_row} samples failed in a row, the last with: {reason}")

    def _leave_out(self, prompt: Prompt, reason: str, detail: str) -> None:
        self._tally.leave_out(prompt, reason)
        for sample in prompt.samples:
            self._quarantine.add(BadSample(sample.line, sample.id, reason, detail))


def _open_store(options: ExtractOptions, client: ServerClient, info: ServerInfo) -> SealedKeys:
    if not options.remote:
        return SharedDirectory(options.out, info)
    if options.ahead_samples is not None:
        raise UsageError(
            "--ahead-samples needs the capture directory, where trainers note what they took: not --remote"
        )
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make --out {options.out}: {error.strerror or error}") from None
    return RemoteDirectory(client)


def _estimate(tokens: int, info: ServerInfo, directory: Path | None) -> Estimate:
    ratio = RATIO if info.element_bytes == 2 else 1.0  # other elements have no planes to compress
    return Estimate(tokens, info.layers, info.hidden, info.element_bytes, ratio, directory)


def _check_layers(asked: tuple[int, ...] | None, info: ServerInfo) -> None:
    if asked is not None and asked != info.boundaries:
        text, has = " ".join(map(str, asked)), " ".join(map(str, info.boundaries))
        raise MismatchError(
            f"--layers {text}, but the server captures the boundaries {has}; "
            f"start it with --capture-layers {text} and another --capture-dir"
        )
