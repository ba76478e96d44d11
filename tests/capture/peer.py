"""A server to extract from: SGLang's ``/generate`` and hashtap's routes over a real session, writer and directory.

Only the model is left out: the states of a token are made from its id, its position and the layer. Prompts are
scheduled as SGLang does: several a forward, long ones in chunks, over HTTP from many connections. As in SGLang on
a CPU, a token id outside the vocabulary ends the server. ``trouble`` lets a test break single answers.

Run as a program, it can be killed: ``python -m tests.capture.peer DIR PORT DELAY_S``; it makes small shards.
"""

import asyncio
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hashtap.config import CaptureConfig
from hashtap.directory import CaptureDirectory
from hashtap.routes import add_routes
from hashtap.session import Batch, Session, Tracked
from hashtap.shard import ShardFacts
from hashtap_kernels.layout import Geometry

__all__ = ["BOUNDARIES", "GEOMETRY", "MAX_PROMPT_TOKENS", "VOCAB_SIZE", "Answer", "Peer", "states"]

GEOMETRY = Geometry(layers=4, hidden=64)
BOUNDARIES = (2, 4, 5)
VOCAB_SIZE = 1000
MAX_PROMPT_TOKENS = 2047
CHUNK_TOKENS = 128

Answer = Response | float | Callable[[dict[str, Any]], dict[str, Any]] | None
"""What ``trouble`` may return: another response, a delay in seconds, a change of the receipt, or nothing."""


def states(token_ids: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
    """Four bfloat16 tensors ``[T, H]``, different for each token, position and layer."""
    channel = torch.arange(GEOMETRY.hidden)
    return [
        (torch.sin(token_ids[:, None] * 0.37 + positions[:, None] * 1.7 + channel * 0.11) * (layer + 1)).bfloat16()
        for layer in range(GEOMETRY.layers)
    ]


@dataclass(slots=True)
class _Request:
    rid: str
    token_ids: list[int]
    tagged: bool
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]
    tracked: Tracked | None = None
    done: int = 0


@dataclass
class Peer:
    """One server on a free port of 127.0.0.1. A context manager."""

    directory: Path
    port: int = 0
    trouble: Callable[[int, dict[str, Any]], Answer] = lambda attempt, body: None
    captures: bool = True
    epoch: str = "weights-1"
    options: dict[str, Any] = field(default_factory=dict)
    received: list[dict[str, Any]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0

    def __enter__(self) -> "Peer":
        directory = CaptureDirectory.create(self.directory)
        options = {"capture_ring_gib": 1 / 64, "capture_seal_after_s": 0.1, "capture_codec": "none", **self.options}
        config = CaptureConfig(capture_dir=str(self.directory), **options)
        facts = ShardFacts(
            model="peer",
            epoch=self.epoch,
            boundaries=BOUNDARIES,
            final_norm="post",
            geometry=GEOMETRY,
            seed=(11, 13),
            directory_uuid=directory.uuid,
            writer=np.random.bytes(16).hex(),
            rank=0,
            versions={},
            server_flags={},
        )
        self._uuid = directory.uuid
        self._session = Session(config, facts, directory, device="cpu", max_forward_tokens=CHUNK_TOKENS)
        self._inbox: SimpleQueue[_Request | str] = SimpleQueue()
        self._waiting: list[_Request] = []
        self._attempts: Counter[str] = Counter()
        self._stop = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", self.port))
        self.port = self._socket.getsockname()[1]
        self._scheduler = threading.Thread(target=self._schedule)
        self._scheduler.start()
        app = FastAPI()
        app.add_route("/generate", self._generate, methods=["POST"])
        if self.captures:
            add_routes(app, self._info(), self._epoch)
        self._uvicorn = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        self._web = threading.Thread(target=self._uvicorn.run, args=([self._socket],))
        self._web.start()
        while not self._uvicorn.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_answering()
        self._stop.set()
        self._scheduler.join()
        self._session.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def rids(self) -> list[str]:
        return [body["rid"] for body in self.received]

    def stop_answering(self) -> None:
        """Close the port; what was captured is still written and sealed."""
        self._uvicorn.should_exit = True
        self._web.join()

    def close_soon(self, after_s: float) -> None:
        """Close the port from a thread, while it answers."""
        threading.Timer(after_s, self.stop_answering).start()

    def update_weights(self, epoch: str) -> None:
        """New weights from the next forward on."""
        self._inbox.put(epoch)

    def _info(self) -> dict[str, Any]:
        facts = self._session.facts
        return {
            "hashtap": "0.1.0",
            "format": 1,
            "directory": self._uuid,
            "path": str(self.directory),
            "model": facts.model,
            "boundaries": list(facts.boundaries),
            "final_norm": facts.final_norm,
            "layers": GEOMETRY.layers,
            "hidden": GEOMETRY.hidden,
            "dtype": "bfloat16",
            "vocab_size": VOCAB_SIZE,
            "max_prompt_tokens": MAX_PROMPT_TOKENS,
            "requests": "tagged",
            "sglang": "0.5.23",
        }

    async def _epoch(self) -> str:
        return self._session.facts.epoch

    async def _generate(self, request: Request) -> Response:
        body = await request.json()
        self.received.append(body)
        identity = str(body["input_ids"])
        self._attempts[identity] += 1
        trouble = self.trouble(self._attempts[identity], body)
        if isinstance(trouble, Response):
            return trouble
        if len(body["input_ids"]) > MAX_PROMPT_TOKENS:
            return JSONResponse({"error": {"message": "The input is longer than the model's context length"}}, 400)
        async with self._counted():
            receipt = await self._capture(body)
            if isinstance(trouble, float):
                await asyncio.sleep(trouble)
        if callable(trouble):
            receipt = trouble(receipt) if receipt is not None else None
        meta = {"id": body["rid"], "finish_reason": {"type": "length", "length": 1}}
        if self.captures and receipt is not None:
            meta["hashtap"] = [receipt]
        return JSONResponse({"text": "", "output_ids": [0], "meta_info": meta})

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            yield
        finally:
            self.in_flight -= 1

    async def _capture(self, body: dict[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        tagged = (body["sampling_params"].get("custom_params") or {}).get("hashtap") is True
        request = _Request(body["rid"], body["input_ids"], tagged and self.captures, loop, loop.create_future())
        self._inbox.put(request)
        return await request.answer

    def _schedule(self) -> None:
        while not self._stop.is_set():
            while not self._inbox.empty():
                self._take(self._inbox.get())
            if self._waiting and self._session.may_admit():
                self._forward()
            else:
                time.sleep(0.001)

    def _take(self, news: "_Request | str") -> None:
        if isinstance(news, str):
            self._session.end_epoch()
            self._session.begin_epoch(news, cache_is_empty=True)
            return
        if news.tagged:
            news.tracked = self._session.admit(news.rid, news.token_ids)
        self._waiting.append(news)

    def _forward(self) -> None:
        """One prefill forward: as many waiting prompts as fit a chunk, the last one maybe cut."""
        room, batch, lens = CHUNK_TOKENS, list[_Request](), list[int]()
        for request in self._waiting:
            if room:
                lens.append(min(room, len(request.token_ids) - request.done))
                batch.append(request)
                room -= lens[-1]
        pairs = list(zip(batch, lens, strict=True))
        ids = torch.tensor([i for request, n in pairs for i in request.token_ids[request.done : request.done + n]])
        positions = torch.cat([torch.arange(request.done, request.done + n) for request, n in pairs])
        assert int(ids.max()) < VOCAB_SIZE, "a token id outside the vocabulary ends the server"
        *aux, final = states(ids, positions)
        rids, prefixes = [request.rid for request in batch], [request.done for request in batch]
        receipts = self._session.capture(Batch(rids, lens, prefixes, ids, positions, aux, final))
        for index, (request, n) in enumerate(pairs):
            request.done += n
            if request.done == len(request.token_ids):
                self._waiting.remove(request)
                receipt = receipts[index] if receipts else None
                request.loop.call_soon_threadsafe(_settle, request.answer, receipt)


def _settle(answer: asyncio.Future[Any], receipt: Any) -> None:
    if not answer.done():
        answer.set_result(receipt)


if __name__ == "__main__":
    delay_s = float(sys.argv[3])
    small_shards = {"capture_shard_gib": 1 / 1024}
    with Peer(Path(sys.argv[1]), int(sys.argv[2]), lambda attempt, body: delay_s, options=small_shards) as peer:
        print(peer.url, flush=True)
        threading.Event().wait()
