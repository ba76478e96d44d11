"""What capture costs a real server on this CPU: tokens/s with and without, memory, and the ratio on disk.

Two servers of SmolLM2-135M-Instruct stand side by side, one plain and one that captures; they take turns
on the same prompts, the other one's processes stopped meanwhile. Figures count only if every prompt that
was sent to the capturing one is then found and verified in its directory.
"""

import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from bench.figures import Figure, Measured
from bench.server import Server
from bench.smollm2 import make_smollm2
from bench.text import standard_library_tokens

import hashtap
from hashtap.verify import verify

ROOT = Path(__file__).parents[1]
ROUNDS = 7
PROMPTS = 40  # a round
IN_FLIGHT = 8
CHUNK_TOKENS = 2048
SHORT_REQUESTS = (500, 2000)  # the memory of the first is compared with that of the second
# All of one length: torch keeps memory for every new number of rows, a plain server 335 MB over prompts of 8 to 63.
SHORT_TOKENS = 32
SEAL_AFTER_S = 5
# A small cache, which the first requests touch as a whole: otherwise its pages would count as growth.
FLAGS = ("--chunked-prefill-size", CHUNK_TOKENS, "--disable-radix-cache", "--max-total-tokens", 8192)


def measure() -> Measured:
    """Throughput and memory in one go, gated by the verification of everything captured."""
    model = make_smollm2(ROOT / ".cache" / "models" / "smollm2-v1")
    work = Path(tempfile.mkdtemp(prefix="capture-cost-"))
    captures = work / "captures"
    capture_flags = ("--capture-dir", captures, "--capture-ring-gib", 0.25)
    try:
        with Server(model, *FLAGS) as plain:
            plain.pause()
            with Server(model, *FLAGS, *capture_flags) as tapped:
                sent, rounds = take_turns(plain, tapped, model)
                plain.terminate()
                tapped.resume()
                raw, stored = sizes(captures)
                memory = growth(tapped, sent)
        report = verify(captures, samples=((str(i), ids, b"") for i, ids in enumerate(sent)))
        if not report.ok:
            raise SystemExit(f"no figures without right captures: {report.to_json()}")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    ratios = [round_["tapped"] / round_["plain"] for round_ in rounds]
    return Measured(
        [
            Figure("server.tokens_per_s.ratio", statistics.median(ratios), 0.97, at_least=True),
            Figure("server.lossless_ratio", raw / stored, 1.47, at_least=True),
            Figure("server.pss_growth_mb", memory["growth_bytes"] / 1e6, 10.0, at_least=False, unit="MB"),
        ],
        {"rounds_tokens_per_s": rounds, "ratios": ratios, "memory": memory, "prompts_verified": len(sent)},
    )


def take_turns(plain: Server, tapped: Server, model: Path) -> tuple[list[list[int]], list[dict[str, float]]]:
    """Rounds of fresh prompts, each sent to both servers in turn; the order changes from round to round."""
    random = np.random.default_rng(0)
    lengths = random.integers(50, 900, (ROUNDS + 1) * PROMPTS)
    tokens = standard_library_tokens(model, int(lengths.sum()))
    prompts = [part.tolist() for part in np.split(np.array(tokens), np.cumsum(lengths)[:-1])]
    sent: list[list[int]] = []
    rounds: list[dict[str, float]] = []
    for number in range(ROUNDS + 1):
        part = prompts[number * PROMPTS : (number + 1) * PROMPTS]
        order = [("plain", plain), ("tapped", tapped)][:: 1 if number % 2 else -1]
        speed = {}
        for name, server in order:
            server.resume()
            speed[name] = sum(map(len, part)) / send(server, part)
            server.pause()
        sent += part
        if number:  # the first one warms up
            rounds.append(speed)
            print(f"round {number}: {speed['tapped']:.0f} / {speed['plain']:.0f} tokens/s", flush=True)
    return sent, rounds


def send(server: Server, prompts: list[list[int]]) -> float:
    """Send prompts with a bounded number in flight; seconds until the last answer."""
    with httpx.Client(base_url=server.url, timeout=300.0) as client, ThreadPoolExecutor(IN_FLIGHT) as pool:
        started = time.perf_counter()
        for answer in pool.map(lambda ids: client.post("/generate", json=body(ids)), prompts):
            answer.raise_for_status()
        return time.perf_counter() - started


def body(input_ids: list[int]) -> dict[str, Any]:
    sampling = {"max_new_tokens": 1, "temperature": 0, "custom_params": {"hashtap": True}}
    return {"input_ids": input_ids, "sampling_params": sampling}


def growth(server: Server, sent: list[list[int]]) -> dict[str, int]:
    """PSS of the capturing server after 500 and after 2,000 short requests."""
    random = np.random.default_rng(1)
    requests = random.integers(0, 49_000, (SHORT_REQUESTS[1], SHORT_TOKENS)).tolist()
    at: dict[int, int] = {}
    done = 0
    for target in SHORT_REQUESTS:
        send(server, requests[done:target])
        done = target
        time.sleep(SEAL_AFTER_S + 1)
        at[target] = server.pss_bytes()
    sent += requests
    first, last = (at[target] for target in SHORT_REQUESTS)
    return {"after_500_bytes": first, "after_2000_bytes": last, "growth_bytes": last - first}


def sizes(captures: Path) -> tuple[int, int]:
    """Bytes of the values captured so far, and of the sealed files that hold them."""
    time.sleep(SEAL_AFTER_S + 1)
    reader = hashtap.open(captures)
    raw = sum(len(capture) for capture in reader) * reader.facts.geometry.row_bytes
    return raw, sum(path.stat().st_size for path in captures.glob("*.safetensors"))
