"""One SGLang server with hashtap, seen over HTTP: what it captures, and one prompt sent and acknowledged.

An answer is judged here: :class:`TryAgain` when the next attempt may do better, :class:`Refused` when the
server will never take this prompt, and an error that ends the run when client and server do not agree.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx
import numpy as np
import numpy.typing as npt

from hashtap.errors import MismatchError, ServerLost, UsageError
from hashtap.identity import NEEDS_RECOMPUTE, PAST_THE_CACHE
from hashtap.sample_fields import Limits

__all__ = ["Busy", "NeedsRecompute", "Refused", "ServerClient", "ServerInfo", "TryAgain"]

FORMAT_VERSION = 1
KEYS_PER_QUESTION = 4096
_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1}


class TryAgain(Exception):
    """The prompt was not captured this time: a time-out, a lost connection, an abort, a full ring."""


class Busy(TryAgain):
    """The server takes no more at present: its queue is full, or the prompt stood in it for too long."""


class NeedsRecompute(TryAgain):
    """The server's prefix cache held rows of the prompt that no capture has."""


class Refused(Exception):
    """The server will not capture this prompt, now or later; the message is its reason."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What the server says of itself at ``/hashtap/info``. ``layers`` and ``hidden`` are L and H of a captured row."""

    directory: str
    path: str
    model: str
    epoch: str
    boundaries: tuple[int, ...]
    final_norm: str
    layers: int
    hidden: int
    dtype: str
    vocab_size: int
    max_prompt_tokens: int

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return _ELEMENT_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one captured token row, L x H elements."""
        return self.layers * self.hidden * self.element_bytes

    @property
    def limits(self) -> Limits:
        """What a sample must keep to."""
        return Limits(self.vocab_size, self.max_prompt_tokens)


class ServerClient:
    """Talks to one server; an async context manager.

    Args:
        url: where it listens, ``http://host:port``.
        connections: most requests at a time.
        timeout_s: how long one prompt may take.
        api_key: sent as a bearer token when given.
    """

    def __init__(self, url: str, *, connections: int, timeout_s: float, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s, connect=min(10.0, timeout_s)),
            # Servers close idle connections after some seconds; a request on a closing one would fail.
            limits=httpx.Limits(max_connections=connections + 2, keepalive_expiry=2.0),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def info(self) -> ServerInfo:
        """What the server captures and where to.

        Raises:
            ServerLost: when it cannot be reached.
            UsageError: when it runs without hashtap, or the URL cannot be used.
            MismatchError: when it speaks another version.
        """
        response = await self._ask("GET", "/hashtap/info")
        try:
            facts = response.json()
            version = facts["format"]
            if version == FORMAT_VERSION:
                fields = {name: facts[name] for name in ServerInfo.__dataclass_fields__}
                info = ServerInfo(**{**fields, "boundaries": tuple(fields["boundaries"])})
                info.row_bytes  # noqa: B018 - an unknown dtype is found here
                return info
        except (ValueError, KeyError, TypeError) as error:
            raise MismatchError(
                f"cannot understand what {self.url} answers to /hashtap/info ({type(error).__name__}: {error}); "
                "install the same hashtap on both sides"
            ) from None
        raise MismatchError(
            f"the server writes format {version!r}, this hashtap reads {FORMAT_VERSION}; "
            "install the same hashtap on both sides"
        )

    async def sealed(self, keys: Sequence[bytes]) -> set[bytes]:
        """Which of ``keys`` the server has in sealed shards, under its present epoch.

        Raises:
            ServerLost, UsageError, MismatchError: as :meth:`info`.
        """
        found: set[bytes] = set()
        for start in range(0, len(keys), KEYS_PER_QUESTION):
            question = {"keys": [key.hex() for key in keys[start : start + KEYS_PER_QUESTION]]}
            response = await self._ask("POST", "/hashtap/sealed", question)
            try:
                found.update(bytes.fromhex(key) for key in response.json()["sealed"])
            except (ValueError, KeyError, TypeError):
                raise MismatchError(f"cannot understand what {self.url} answers to /hashtap/sealed") from None
        return found

    async def capture(self, token_ids: npt.NDArray[np.integer[Any]], key: bytes, info: ServerInfo) -> None:
        """Send one prompt ``[T]``; returns when its receipt says that all T rows are captured.

        What needs to be computed past the server's prefix cache is sent a second time at once.

        Raises:
            TryAgain, Refused: see the classes.
            MismatchError: when there is no receipt, or it names another key, directory or epoch.
            UsageError: when the server wants an API key, or has no ``/generate``.
        """
        try:
            await self._send(token_ids, key, info)
        except NeedsRecompute:
            await self._send(token_ids, key, info, extra_key=PAST_THE_CACHE + uuid.uuid4().hex)

    async def _send(self, token_ids: npt.NDArray[np.integer[Any]], key: bytes, info: ServerInfo, **more: str) -> None:
        request = {
            **more,
            "input_ids": token_ids.tolist(),
            # SGLang aborts by prefix, so ids have one width; and a second attempt must not meet the first.
            "rid": uuid.uuid4().hex,
            # A request for no token at all brings no receipt.
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "custom_params": {"hashtap": True}},
        }
        try:
            response = await self._http.post(f"{self.url}/generate", json=request)
        except httpx.TransportError as error:
            raise TryAgain(_describe(error)) from None
        if response.status_code in (400, 413, 422):
            raise Refused(_message(response))
        if response.status_code in (429, 503):
            raise Busy(f"status {response.status_code}: {_message(response)}")
        if response.status_code == 408 or response.status_code >= 500:
            raise TryAgain(f"status {response.status_code}: {_message(response)}")
        self._demand_ok(response, "/generate")
        try:
            meta = response.json()["meta_info"]
            receipts = [receipt for receipt in meta.get("hashtap") or [] if receipt]
            finish = meta.get("finish_reason") or {}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise TryAgain(f"an answer that is not SGLang's: {response.text[:80]!r}") from None
        if finish.get("type") == "abort":
            raise TryAgain(f"aborted by the server: {finish.get('message', 'no reason given')}")
        if not receipts:
            raise MismatchError(
                f"{self.url} answered without a receipt, so nothing was captured; start that server with --capture-dir"
            )
        _check_receipt(receipts[-1], key, len(token_ids), info)

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            response = await self._http.request(method, self.url + path, json=body)
        except (httpx.UnsupportedProtocol, httpx.InvalidURL):
            raise UsageError(f"--server {self.url!r} is no URL; give one like http://127.0.0.1:30000") from None
        except httpx.TransportError as error:
            raise ServerLost(f"cannot reach the server at {self.url}: {_describe(error)}; is it up?") from None
        if response.status_code == 404:
            raise UsageError(
                f"the server at {self.url} runs without hashtap (no {path}); "
                "install hashtap beside SGLang and start it with --capture-dir"
            )
        if response.status_code >= 500:
            raise ServerLost(f"{self.url}{path} answers {response.status_code}: {_message(response)}")
        self._demand_ok(response, path)
        return response

    def _demand_ok(self, response: httpx.Response, path: str) -> None:
        if response.status_code in (401, 403):
            raise UsageError(f"the server at {self.url} wants an API key; give --api-key")
        if response.status_code != 200:
            raise UsageError(f"{self.url}{path} answers {response.status_code}: {_message(response)}")


def _check_receipt(receipt: dict[str, Any], key: bytes, tokens: int, info: ServerInfo) -> None:
    try:
        got = {name: receipt[name] for name in ("key", "directory", "epoch", "state", "rows")}
    except (KeyError, TypeError):
        raise MismatchError(
            f"cannot understand the receipt {receipt!r}; install the same hashtap on both sides"
        ) from None
    if got["key"] != key.hex():
        raise MismatchError(
            f"the server captured the prompt {got['key']} where {key.hex()} was sent: "
            "something between client and server changes token ids"
        )
    if got["directory"] != info.directory:
        raise MismatchError(
            f"a receipt names the capture directory {got['directory']}, not {info.directory}; "
            "all servers behind one URL must share one --capture-dir"
        )
    reason = receipt.get("reason") or "no reason given"
    if got["state"] == "refused":
        raise Refused(str(reason))
    if got["state"] == NEEDS_RECOMPUTE:
        raise NeedsRecompute(f"{got['state']}: {reason}")
    if got["state"] != "captured":
        raise TryAgain(f"{got['state']}: {reason}")
    if got["epoch"] != info.epoch:
        raise MismatchError(
            f"the server's weights changed during the run (epoch {info.epoch}, now {got['epoch']}); "
            "what is captured stays under its epoch: start again to capture the rest under the new one"
        )
    if got["rows"] != tokens:
        raise MismatchError(f"the server captured {got['rows']} rows of a prompt of {tokens} tokens")


def _message(response: httpx.Response) -> str:
    """The server's own words: SGLang says ``{"error": {"message": …}}`` or ``{"detail": …}``."""
    try:
        body = response.json()
    except ValueError:
        return response.text[:200]
    if isinstance(body, dict):
        error = body.get("error", body.get("detail", body))
        return str(error.get("message", error) if isinstance(error, dict) else error)
    return str(body)


def _describe(error: httpx.TransportError) -> str:
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    return str(error) or type(error).__name__
