"""What capture costs a real server on this CPU: ``hashtap bench server`` on SmolLM2-135M-Instruct, and memory.

The same server plain, with SGLang's own auxiliary layers on and with capture, on the same prompts in turn. Figures
count only if every prompt that was sent to the capturing one is then found and verified in its directory.
"""

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench.figures import Figure, Measured
from bench.plan import OFF
from bench.server import Server
from bench.smollm2 import make_smollm2

from hashtap.bench.load import send
from hashtap.bench.prompts import Lengths, text_prompts
from hashtap.bench.rounds import Plan
from hashtap.bench.server_cost import Options, measure_server
from hashtap.bench.sides import Case
from hashtap.estimate import Estimate
from hashtap.forecast import Forecast, Rates
from hashtap.verify import verify

ROOT = Path(__file__).parents[1]
ROUNDS = 10  # with fewer prompts the ratio on disk is too low: 1.467 of 60, 1.473 of 100
PROMPTS = 10  # a round: short turns, since the machine's own speed wanders from minute to minute
LENGTHS = Lengths(50, 900)
IN_FLIGHT = 4
DECODE_TOKENS = 16
SHORT_REQUESTS = (500, 2000)  # the memory of the first is compared with that of the second
# All of one length: torch keeps memory for every new number of rows, a plain server 335 MB over prompts of 8 to 63.
SHORT_TOKENS = 8
SEAL_AFTER_S = 5
# A small cache, which the first requests touch as a whole: otherwise its pages would count as growth.
FLAGS = ("--device", "cpu", "--chunked-prefill-size", "2048", "--max-total-tokens", "8192")
CAPTURE_FLAGS = ("--capture-ring-gib", "0.25")


def measure() -> Measured:
    """Throughput, latency and the ratio on disk; then memory."""
    model = make_smollm2(ROOT / ".cache" / "models" / "smollm2-v1")
    prompts = text_prompts(model, (ROUNDS + 1) * PROMPTS, LENGTHS)
    parts = [prompts[start : start + PROMPTS] for start in range(0, len(prompts), PROMPTS)]
    case = Case(str(model), Path(), FLAGS, CAPTURE_FLAGS)
    plan = Plan(rounds=ROUNDS, in_flight=IN_FLIGHT, decode_tokens=DECODE_TOKENS)
    record = measure_server(case, parts[0], parts[1:], plan, Options(), print)
    memory = growth(model)
    aux, capturing, asked = record["against"]["aux"], record["sides"]["hashtap"], record["asked"]
    rates = Rates(prefill_tokens_per_s=record["sides"]["plain"]["tokens_per_s"]["median"])
    forecast = Forecast(Estimate(asked["rows"], asked["layers"], asked["hidden"]), rates=rates)
    seconds = asked["rows"] / capturing["tokens_per_s"]["median"]
    return Measured(
        [
            _ratio("server.tokens_per_s.ratio", record["tokens_per_s"], 0.98, at_least=True),
            _ratio("server.tokens_per_s.ratio_to_aux", aux["tokens_per_s"], 0.98, at_least=True),
            _ratio("server.ttft_p50.ratio", record["ttft_p50_s"], 1.05, at_least=False),
            _ratio("server.decode_step.ratio", record["step_s"], 1.02, at_least=False),
            Figure("server.lossless_ratio", record["verified"]["ratio"], 1.47, at_least=True),
            Figure("plan.server_seconds_off", abs(forecast.seconds / seconds - 1), OFF, at_least=False),
            Figure(
                "plan.server_bytes_off",
                abs(forecast.estimate.stored_bytes / capturing["bytes"] - 1),
                OFF,
                at_least=False,
            ),
            Figure("server.pss_growth_mb", memory["growth_bytes"] / 1e6, 10.0, at_least=False, unit="MB"),
        ],
        {"server": record, "memory": memory},
    )


def _ratio(name: str, ratio: dict[str, Any], bar: float, *, at_least: bool) -> Figure:
    end = ratio["ratio_high" if at_least else "ratio_low"]
    return Figure(name, ratio["ratio_median"], bar, at_least, interval_end=end)


def growth(model: Path) -> dict[str, int]:
    """PSS of a capturing server after 500 and after 2,000 short requests, all of which must then be verified."""
    random = np.random.default_rng(1)
    requests = random.integers(0, 49_000, (SHORT_REQUESTS[1], SHORT_TOKENS)).tolist()
    captures = Path(tempfile.mkdtemp(prefix="capture-cost-"))
    at: dict[int, int] = {}
    done = 0
    try:
        with Server(model, *FLAGS, "--disable-radix-cache", "--capture-dir", captures, *CAPTURE_FLAGS) as server:
            for target in SHORT_REQUESTS:
                send(server.url, requests[done:target], {}, in_flight=IN_FLIGHT)
                done = target
                time.sleep(SEAL_AFTER_S + 1)
                at[target] = server.pss_bytes()
        report = verify(captures, samples=((str(i), ids, b"") for i, ids in enumerate(requests)))
        if not report.ok:
            raise SystemExit(f"no figures without right captures: {report.to_json()}")
    finally:
        shutil.rmtree(captures, ignore_errors=True)
    first, last = (at[target] for target in SHORT_REQUESTS)
    return {"after_500_bytes": first, "after_2000_bytes": last, "growth_bytes": last - first}
