"""Real SGLang servers on the CPU, started once for all tests that want the same one."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from bench.server import Server
from tests import models
from tests.server.reference import Reference, assert_same_states
from tests.server.waiting import wait_until

from hashtap.identity import prompt_key
from hashtap.reader import Capture, Reader
from hashtap.releases import installed_sglang, predates

CHUNK_TOKENS = 128
# An idle SGLang otherwise keeps a core busy, which the next server needs.
COMMON_FLAGS: tuple[object, ...] = (
    *("--chunked-prefill-size", CHUNK_TOKENS, "--max-total-tokens", 16384, "--sleep-on-idle"),
    # Earlier releases try to capture graphs on a CPU, and fail.
    *(("--disable-prefill-cuda-graph",) if predates(installed_sglang()[0], "0.5.23") else ()),
)


@dataclass(frozen=True, slots=True)
class Served:
    """A running server, the model that it serves and the directory that it captures to."""

    server: Server
    model: Path
    captures: Path
    boundaries: tuple[int, ...]

    def captured(self, *prompts: list[int], timeout_s: float = 30.0) -> list[Capture]:
        """The captures of ``prompts``, as soon as all are sealed."""
        reader = Reader(self.captures)

        def all_sealed() -> bool:
            reader.refresh()
            return all(prompt_key(prompt) in reader for prompt in prompts)

        wait_until(all_sealed, timeout_s, "the prompts to be sealed")
        return [reader.by_token_ids(prompt) for prompt in prompts]

    def check(self, reference: Reference, *prompts: list[int]) -> None:
        """Each prompt is captured, under its own ids and with its own rows."""
        for prompt, capture in zip(prompts, self.captured(*prompts), strict=True):
            assert capture.token_ids.tolist() == prompt
            assert_same_states(capture.tensor(), reference.states(prompt), self.boundaries)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The server's answer, which must be a good one; parsed where it is JSON."""
        answer = httpx.post(self.server.url + path, json=body or {}, timeout=300)
        assert answer.is_success, answer.text
        return answer.json() if answer.headers.get("content-type") == "application/json" else answer.text

    @contextmanager
    def paused(self, mode: str) -> Iterator[None]:
        """Meanwhile it generates nothing."""
        self.post("/pause_generation", {"mode": mode})
        try:
            yield
        finally:
            self.post("/continue_generation")

    def counters(self) -> Counter[str]:
        """What its (first) rank has counted since its start."""
        return Counter(self.server.get("/server_info")["internal_states"][0]["hashtap"]["counters"])


def capture_flags(captures: Path, *boundaries: int) -> tuple[object, ...]:
    """Flags that turn capture on, sealing early so that tests need not wait."""
    layers = ("--capture-layers", *boundaries) if boundaries else ()
    return ("--capture-dir", captures, "--capture-ring-gib", 0.125, "--capture-seal-after-s", 0.3, *layers)


@contextmanager
def served(
    path: Path, *flags: object, model: Path | None = None, environment: dict[str, str] | None = None
) -> Iterator[Served]:
    """A server of one's own: the tiny Llama by default, boundaries 1, 4, 6, captures in ``path / "captures"``."""
    model, boundaries, captures = model or models.llama(), (1, 4, 6), path / "captures"
    flags = (*COMMON_FLAGS, *capture_flags(captures, *boundaries), *flags)
    with Server(model, *flags, threads=1, environment=environment) as server:
        yield Served(server, model, captures, boundaries)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """httpx may leave the socket of a connection that a starting or dying server broke to the garbage collector."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(600))  # the first test of a server also waits for its start
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed .*socket:ResourceWarning"))
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A tiny Llama, boundaries 1, 4, 6, chunks of 128 tokens; most tests share it."""
    with served(tmp_path_factory.mktemp("llama")) as server:
        yield server


@pytest.fixture(scope="session")
def reference() -> Reference:
    """What the states of the tiny Llama must be."""
    return Reference(models.llama(plain=True))
