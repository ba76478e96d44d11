"""The main job, start to end, on this machine: ``make demo`` (``make demo DEMO=--short`` for a small one).

A real SGLang server on the CPU serves SmolLM2-135M-Instruct with ``--capture-dir``; the standard library's sources are
the samples. They are extracted over HTTP and verified, then one byte is flipped in a copy to show that it is found.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.server import Server, ServerFailed  # noqa: E402
from bench.smollm2 import make_smollm2  # noqa: E402
from bench.text import standard_library_tokens  # noqa: E402

CHUNK_TOKENS = 512
IN_FLIGHT = 16
# Little memory is enough: SGLang would take most of the machine's for its cache.
SERVER_FLAGS = ("--chunked-prefill-size", CHUNK_TOKENS, "--max-total-tokens", 32768, "--capture-ring-gib", 0.25)


@dataclass(frozen=True, slots=True)
class Size:
    """How many samples: ``short_ones`` of 5 to 640 tokens, ``long_ones`` that are chunked, ``repeated`` ones."""

    short_ones: int
    long_ones: int
    repeated: int


FULL = Size(short_ones=225, long_ones=60, repeated=15)
SHORT = Size(short_ones=24, long_ones=10, repeated=6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="40 samples instead of 300")
    parser.add_argument("--keep", action="store_true", help="keep the captures to look at them")
    options = parser.parse_args()
    started = time.monotonic()

    say("model", "SmolLM2-135M-Instruct, bfloat16 (converted once, half a minute)")
    model = make_smollm2(ROOT / ".cache" / "models" / "smollm2-v1")
    home = ROOT / ".cache" / "demo"
    home.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="run-", dir=home))
    try:
        run(model, work, SHORT if options.short else FULL)
        look = f"; look around: hashtap show {work / 'captures'}" if options.keep else ""
        say("done", f"in {time.monotonic() - started:.0f} s{look}")
    except ServerFailed as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    finally:
        if not options.keep:
            shutil.rmtree(work, ignore_errors=True)


def run(model: Path, work: Path, size: Size) -> None:
    """Capture, verify and damage; ends the program when anything is not as it must be."""
    captures, samples = work / "captures", work / "samples.jsonl"
    write_samples(samples, model, size)
    started = time.monotonic()
    with Server(model, "--capture-dir", captures, *SERVER_FLAGS, log=work / "server.log") as server:
        info = server.get("/hashtap/info")
        layers = " ".join(map(str, info["boundaries"]))
        ready_s = time.monotonic() - started
        say("server", f"SGLang {info['sglang']}, ready after {ready_s:.0f} s; boundaries {layers} and the final state")
        command = ["extract", samples, "--server", server.url, "--out", captures, "--concurrency", IN_FLIGHT]
        extracted = json.loads(hashtap(*command, "--json"))
    say("captured", f"{extracted['tokens']:,} tokens, {extracted['tokens_per_s']:,.0f} tokens/s, {IN_FLIGHT} in flight")
    say("verified", hashtap("verify", captures, "--samples", samples))
    show_damage(captures, work / "damaged", samples)


def write_samples(path: Path, model: Path, size: Size) -> None:
    """Consecutive pieces of the standard library's sources, tokenised; a few of them twice, with loss masks."""
    random = np.random.default_rng(0)
    lengths = [*random.integers(5, 640, size.short_ones), *random.integers(CHUNK_TOKENS + 1, 900, size.long_ones)]
    random.shuffle(lengths)
    ids = standard_library_tokens(model, sum(lengths))
    ends = np.cumsum(lengths)
    prompts = [ids[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    distinct = len({tuple(prompt) for prompt in prompts})
    prompts += [prompts[index] for index in random.integers(0, len(prompts), size.repeated)]
    order = random.permutation(len(prompts))
    with path.open("w") as file:
        for number in order.tolist():
            prompt = prompts[number]
            mask = [0] * (len(prompt) // 2) + [1] * (len(prompt) - len(prompt) // 2)
            file.write(json.dumps({"id": f"piece-{number}", "input_ids": prompt, "loss_mask": mask}) + "\n")
    chunked = sum(len(prompt) > CHUNK_TOKENS for prompt in prompts)
    say(
        "samples",
        f"{len(prompts)} pieces of the standard library, {distinct} distinct, {chunked} longer than a chunk of "
        f"{CHUNK_TOKENS}; {sum(map(len, prompts)):,} tokens",
    )


def show_damage(captures: Path, copy: Path, samples: Path) -> None:
    """Flip one bit in the middle of the largest shard of a copy: verify must name it and exit with 1."""
    shutil.copytree(captures, copy)
    shard = max(copy.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    place = shard.stat().st_size // 2
    with shard.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1]))
    say("damage", f"one bit flipped at byte {place:,} of {shard.name}, in a copy; verify says")
    answer = hashtap("verify", copy, "--samples", samples, status=1)
    for line in answer.splitlines():
        say("", line.replace(f"{copy}/", ""))
    if shard.name not in answer:
        raise SystemExit("verify did not name the damaged shard")
    shutil.rmtree(copy)


def hashtap(*arguments: object, status: int = 0) -> str:
    """What a command of the installed program prints; ends this program when it does not exit with ``status``."""
    command = [sys.executable, "-m", "hashtap", *map(str, arguments)]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if answer.returncode != status:
        raise SystemExit(f"{answer.stdout}hashtap {arguments[0]} ended with {answer.returncode}, not {status}")
    return answer.stdout.strip()


def say(step: str, text: str) -> None:
    print(f"{step:>10}   {text}", flush=True)


if __name__ == "__main__":
    main()
