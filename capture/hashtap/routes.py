"""hashtap's two routes on SGLang's own HTTP server: what is captured, and what is sealed."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hashtap.identity import parse_key
from hashtap.reader import Reader

__all__ = ["add_routes"]

Epoch = Callable[[], Awaitable[str]]


def add_routes(app: Any, info: Mapping[str, Any], epoch: Epoch) -> None:
    """Add ``GET /hashtap/info`` and ``POST /hashtap/sealed`` to a FastAPI app.

    Args:
        app: SGLang's app, before it serves.
        info: what does not change while the server runs.
        epoch: gives the epoch that rows are captured under now.
    """
    from fastapi import HTTPException
    from fastapi.responses import JSONResponse
    from starlette.requests import Request
    from starlette.responses import Response

    shards = _Shards(Path(info["path"]))

    async def get_info() -> Response:
        return JSONResponse({**info, "epoch": await epoch()})

    async def post_sealed(request: Request) -> Response:
        try:
            keys = [parse_key(text) for text in (await request.json())["keys"]]
        except (ValueError, KeyError, TypeError) as error:
            raise HTTPException(400, 'send {"keys": ["<32 hex digits>", …]}') from error
        if None in keys:
            raise HTTPException(400, "a key is 32 hex digits")
        current = await epoch()
        sealed = await asyncio.to_thread(shards.among, [key for key in keys if key is not None], current)
        return JSONResponse({"sealed": [key.hex() for key in sealed], "epoch": current})

    app.add_api_route("/hashtap/info", get_info, methods=["GET"], response_model=None)
    app.add_api_route("/hashtap/sealed", post_sealed, methods=["POST"], response_model=None)


class _Shards:
    """The sealed shards of the capture directory, opened at the first question."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reader: Reader | None = None
        self._lock = threading.Lock()

    def among(self, keys: Sequence[bytes], epoch: str) -> list[bytes]:
        """Those of ``keys`` that are sealed under ``epoch``."""
        with self._lock:
            if self._reader is None:
                self._reader = Reader(self._path, strict=False)
            else:
                self._reader.refresh()
            return [key for key in keys if self._reader.has(key, epoch)]
