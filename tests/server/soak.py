"""Many short requests of all kinds, with aborts, retries and restarts, each drawn from a seed.

    python -m tests.server.soak --requests 20000

It ends with an error when a tagged prompt is missing or wrong, when somebody else's is stored, when the server's
counters do not add up, or when its memory grows.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import httpx
from bench.server import Server
from tests import models
from tests.server.conftest import COMMON_FLAGS, capture_flags
from tests.server.reference import Reference, assert_same_states
from tests.server.waiting import wait_until

from hashtap.bench.servers import pss_bytes
from hashtap.identity import prompt_key
from hashtap.reader import Reader
from hashtap.verify import verify

__all__ = ["soak"]

BOUNDARIES = (1, 4, 6)
CONCURRENCY = 16
KINDS = {"plain": 40, "again": 10, "others": 15, "abort": 12, "retry": 8, "batch": 5, "several": 4, "refused": 6}
MAX_WRITERS_GROWTH_BYTES = 32 << 20
MAX_GROWTH_BYTES = 96 << 20
"""Of the server's own processes: SGLang on a CPU grows by itself, for each shape of a batch that is new."""
KEEP_LITTLE = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0:glibc.malloc.mmap_threshold=65536:glibc.malloc.trim_threshold=131072",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
}
"""So that memory which is free, and what oneDNN keeps for such shapes, does not look like growth."""
Prompt = tuple[int, ...]


@dataclass(slots=True)
class Order:
    """Something that a client does; ``prompts`` are all that it sends."""

    kind: str
    prompts: list[Prompt]
    patience_s: float  # until it aborts, or gives up and sends again


class Memory(NamedTuple):
    """What a server takes: its own processes, and its writers."""

    server_bytes: int
    writers_bytes: int

    @classmethod
    def of(cls, server: Server) -> "Memory":
        processes = server.processes()
        writers = [each for each in processes if "hashtap.writer_process" in each.cmdline()]
        others = [each for each in processes if each not in writers]
        return cls(pss_bytes(others), pss_bytes(writers))


@dataclass
class Soak:
    """What was sent, what must be there in the end, and what was seen on the way."""

    captures: Path
    wanted: set[Prompt] = field(default_factory=set)  # receipts said captured
    untagged: set[Prompt] = field(default_factory=set)
    done: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)  # of all servers that ended in peace
    growth_bytes: int = 0
    writers_growth_bytes: int = 0

    async def serve(self, orders: list[Order], *, kill_after: int | None) -> list[Order]:
        """One life of a server: it does the orders and is told to stop, or is killed after some. Returns those left."""
        left, unfinished, early = orders[::-1], list[Order](), Memory(0, 0)
        flags = (*COMMON_FLAGS, *capture_flags(self.captures, *BOUNDARIES))
        with Server(models.llama(), *flags, threads=1, environment=KEEP_LITTLE) as server:
            limits = httpx.Limits(max_connections=4 * CONCURRENCY)
            async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as http:

                async def work() -> None:
                    nonlocal early
                    while left:
                        order = left.pop()
                        try:
                            await self._do(http, order)
                            self.done[order.kind] += 1
                        except httpx.TransportError:
                            assert kill_after is not None, f"the server ended: {server.log_tail()}"
                            unfinished.append(order)
                        begun = len(orders) - len(left)
                        if kill_after is not None and begun >= kill_after:
                            unfinished.extend(left)
                            left.clear()
                            server.kill()
                        if not early.server_bytes and begun >= len(orders) // 4 and left:
                            early = Memory.of(server)

                async with asyncio.TaskGroup() as clients:
                    for _ in range(CONCURRENCY):
                        clients.create_task(work())
            if kill_after is None:
                self._at_rest(server, early)
                assert server.terminate() == 0
        return unfinished

    def _at_rest(self, server: Server, early: Memory) -> None:
        """Nothing is sent any more: everything that was seen must have ended in one way that is counted."""

        def counters() -> Counter[str]:
            return Counter(server.get("/server_info")["internal_states"][0]["hashtap"]["counters"])

        def quiet() -> bool:
            now = counters()
            return now["admitted"] == sum(now[end] for end in ("captured", "refused", "aborted")) and now["queue"] == 0

        wait_until(quiet, 30, f"the counters to add up: {dict(counters())}")
        wait_until(lambda: not list(self.captures.glob("*.partial")), 30, "all to be sealed")

        def sealed() -> bool:
            now = counters()
            return now["captured"] == now["records"] + now["duplicates"]

        wait_until(sealed, 30, f"all that was captured to be counted as sealed: {dict(counters())}")
        now = counters()
        for trouble in ("incomplete", "dropped", "needs_recompute", "failed_proofs", "bad_frames", "write_errors"):
            assert now[trouble] == 0, now
        assert now["ring_used_bytes"] == 0
        self.counts += now
        late = Memory.of(server)
        grown, writers_grown = late.server_bytes - early.server_bytes, late.writers_bytes - early.writers_bytes
        self.growth_bytes = max(self.growth_bytes, grown)
        self.writers_growth_bytes = max(self.writers_growth_bytes, writers_grown)
        assert grown < MAX_GROWTH_BYTES, f"the server's memory grew by {grown >> 20} MiB"
        assert writers_grown < MAX_WRITERS_GROWTH_BYTES, f"the writers' memory grew by {writers_grown >> 20} MiB"

    async def _do(self, http: httpx.AsyncClient, order: Order) -> None:
        prompts, rid = order.prompts, uuid4().hex
        match order.kind:
            case "others":
                self.untagged.update(prompts)
                answer = await _generate(http, list(prompts[0]), tag=None)
                assert not any(answer["meta_info"].get("hashtap") or ())  # null beside tagged ones in a batch
            case "refused":
                answer = await _generate(http, list(prompts[0]), extra_key="mine")
                assert _receipt(answer)["state"] == "refused"
            case "batch":
                for prompt, answer in zip(prompts, await _generate(http, [list(p) for p in prompts]), strict=True):
                    self._check(prompt, answer)
            case "several":
                for answer in await _generate(http, list(prompts[0]), n=2):
                    self._check(prompts[0], answer)
            case "abort":
                answer, _ = await asyncio.gather(_generate(http, list(prompts[0]), rid=rid), _abort(http, rid, order))
                if answer["meta_info"]["finish_reason"]["type"] != "abort":
                    self._check(prompts[0], answer)
                else:
                    self.done["aborted"] += 1
            case _:
                if order.kind == "retry":
                    with suppress(httpx.TimeoutException):
                        await _generate(http, list(prompts[0]), timeout=order.patience_s)
                self._check(prompts[0], await _generate(http, list(prompts[0])))

    def _check(self, prompt: Prompt, answer: dict[str, Any]) -> None:
        receipt = _receipt(answer)
        assert (receipt["state"], receipt["rows"]) == ("captured", len(prompt)), receipt
        assert receipt["key"] == prompt_key(prompt).hex()
        self.wanted.add(prompt)

    def lost(self) -> list[Order]:
        """Prompts whose server died before it had sealed them: to be sent again, as ``hashtap extract`` does."""
        reader = Reader(self.captures)
        return [Order("plain", [prompt], 0.0) for prompt in self.wanted if prompt_key(prompt) not in reader]

    def verify(self, sample: int, seed: int) -> None:
        """All that was acknowledged is there and right; a sample is compared with transformers."""
        report = verify(self.captures, samples=((str(i), ids, b"") for i, ids in enumerate(sorted(self.wanted))))
        assert report.ok, report.to_json()
        assert report.verified == len(self.wanted)
        reader, reference = Reader(self.captures), Reference(models.llama(plain=True))
        stored = {tuple(capture.token_ids.tolist()) for capture in reader}
        assert not stored & (self.untagged - self.wanted), "somebody else's prompt is stored"
        for prompt in random.Random(seed).sample(sorted(self.wanted), min(sample, len(self.wanted))):
            assert_same_states(reader.by_token_ids(prompt).tensor(), reference.states(prompt), BOUNDARIES)


def make_orders(requests: int, seed: int) -> list[Order]:
    """What the clients will do, the same for the same seed."""
    draw = random.Random(seed)
    orders: list[Order] = []
    earlier: list[Prompt] = []
    for kind in draw.choices(list(KINDS), list(KINDS.values()), k=requests):
        size = draw.randint(130, 900) if kind in ("abort", "retry") or draw.random() < 0.05 else draw.randint(1, 120)
        prompts = [tuple(draw.randint(3, 511) for _ in range(size)) for _ in range(3 if kind == "batch" else 1)]
        if kind == "again" and earlier:
            prompts = [draw.choice(earlier)]
        elif kind not in ("others", "refused"):
            earlier += prompts
        orders.append(Order(kind, prompts, draw.uniform(0.0, 0.25)))
    return orders


def soak(captures: Path, *, requests: int, restarts: int, seed: int, sample: int = 300) -> dict[str, Any]:
    """Run it; the figures.

    Args:
        captures: the capture directory, new.
        requests: how many orders the clients get.
        restarts: how often a server ends and another begins; every second one is killed, the first among them.
        seed: of everything that is drawn.
        sample: how many captures are compared with transformers.
    """
    started = time.monotonic()
    run, orders = Soak(captures), make_orders(requests, seed)
    share = -(-len(orders) // (restarts + 1))
    carried: list[Order] = []
    for life in range(restarts + 1):
        killed = life < restarts and life % 2 == 0
        todo = carried + orders[life * share : (life + 1) * share]
        carried = asyncio.run(run.serve(todo, kill_after=len(todo) * 4 // 5 if killed else None))
        carried += run.lost() if killed else []
    assert not carried
    assert not run.lost()
    run.verify(sample, seed)
    reader = Reader(captures)
    return {
        "requests": requests,
        "restarts": restarts,
        "seed": seed,
        "done": dict(run.done),
        "prompts_acknowledged": len(run.wanted),
        "records": len(reader),
        "wrong": 0,
        "lost": 0,
        "compared_with_transformers": min(sample, len(run.wanted)),
        "counters_of_servers_told_to_stop": {name: run.counts[name] for name in COUNTED},
        "memory_growth_mib": round(run.growth_bytes / 2**20, 1),
        "writers_memory_growth_mib": round(run.writers_growth_bytes / 2**20, 1),
        "seconds": round(time.monotonic() - started, 1),
    }


COUNTED = ("admitted", "captured", "records", "duplicates", "refused", "aborted", "restarted")


async def _generate(
    http: httpx.AsyncClient,
    input_ids: list[int] | list[list[int]],
    *,
    tag: bool | None = True,
    n: int = 1,
    timeout: float = 300.0,
    **more: str,
) -> Any:
    params: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0.0 if n == 1 else 1.0, "n": n}
    params["custom_params"] = None if tag is None else {"hashtap": tag}
    body = {"input_ids": input_ids, "sampling_params": params, **more}
    answer = await http.post("/generate", json=body, timeout=timeout)
    return answer.raise_for_status().json()


async def _abort(http: httpx.AsyncClient, rid: str, order: Order) -> None:
    await asyncio.sleep(order.patience_s)
    (await http.post("/abort_request", json={"rid": rid})).raise_for_status()


def _receipt(answer: dict[str, Any]) -> dict[str, Any]:
    return dict([found for found in answer["meta_info"]["hashtap"] if found is not None][-1])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--restarts", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        figures = soak(
            Path(folder) / "captures", requests=options.requests, restarts=options.restarts, seed=options.seed
        )
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
