"""``hashtap bench``: the part of the command line that measures."""

import json
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hashtap.config import parse_boundaries
from hashtap.errors import UsageError
from hashtap.model_config import ModelShape

__all__ = ["bench"]

TERMINATED = 143

bench = typer.Typer(help="Measure what capture costs.", no_args_is_help=True)


@bench.callback()
def _bench() -> None:
    """Measure what capture costs."""


@bench.command("server")
def _server(
    model: Annotated[str, typer.Argument(help="Model directory.", show_default=False)],
    flags: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- FLAGS]",
            help="SGLang's flags for every server, after --; those that begin with --capture- go to the capturing one.",
            show_default=False,
        ),
    ] = None,
    against: Annotated[
        str, typer.Option(help="Peers to measure too: http, dump, transformers.", show_default=False)
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, at least.")] = 5,
    max_rounds: Annotated[int, typer.Option(min=1, help="Rounds, at most.")] = 15,
    precision: Annotated[
        float, typer.Option(min=0, help="Enough once half the 95 % intervals of the ratios are no wider.")
    ] = 0.01,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts a round.")] = 40,
    tokens: Annotated[str, typer.Option(help="Tokens of a prompt, LOW-HIGH.")] = "50-900",
    samples: Annotated[
        Path | None, typer.Option(help="Prompts of your own, with input_ids.", show_default=False)
    ] = None,
    random_ids: Annotated[bool, typer.Option("--random-ids", help="Random token ids in place of text.")] = False,
    in_flight: Annotated[int, typer.Option(min=1, max=4096, help="Prompts in flight.")] = 8,
    decode_tokens: Annotated[int, typer.Option(help="Tokens that time the decode steps; 0 leaves them out.")] = 32,
    layers: Annotated[str | None, typer.Option(help="Boundaries to capture, e.g. 2,15,27.", show_default=False)] = None,
    one_at_a_time: Annotated[
        bool, typer.Option("--one-at-a-time", help="Start each server anew for its turn, where only one fits.")
    ] = False,
    boot_s: Annotated[float, typer.Option(min=1, help="How long a server may take to start.")] = 600.0,
    work_dir: Annotated[Path | None, typer.Option(help="Where captures go meanwhile.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="Of the prompts' lengths and random ids.")] = 0,
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write the record to a file, or to - .", show_default=False)
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a plot, as .png and .svg.", show_default=False)] = None,
) -> None:
    """Compare a server with capture to the same server without it, and with SGLang's own auxiliary layers on."""
    try:
        from hashtap.bench.prompts import Lengths, random_prompts, sample_prompts, text_prompts
        from hashtap.bench.rounds import Plan
        from hashtap.bench.server_cost import Options, measure_server
        from hashtap.bench.sides import Case, split_flags
        from hashtap.bench.table import show
    except ModuleNotFoundError as error:
        raise UsageError(f"hashtap bench needs {error.name}: pip install 'hashtap[bench]'") from None
    if decode_tokens and decode_tokens < 2:
        raise UsageError("--decode-tokens 1 has no step between tokens: give 0, or 2 and more")
    try:
        boundaries = parse_boundaries(layers) if layers else None
    except ValueError:
        raise UsageError(f"--layers {layers!r} are no boundaries; give whole numbers like 2,15,27") from None
    for option, file in (("--json", as_json), ("--plot", plot)):
        if file is not None and not file.parent.is_dir():
            raise UsageError(f"{option} {file}: there is no folder {file.parent}: make it first")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))  # so that servers are stopped
    path = Path(model)
    model = str(path.absolute()) if path.exists() else model
    most = max(rounds, max_rounds)
    if samples is not None:
        everything = sample_prompts(samples)
    else:
        lengths, count = Lengths(*_range(tokens), seed), (most + 1) * prompts
        shape = ModelShape.read(path) if random_ids else None
        everything = random_prompts(shape.vocab_size, count, lengths) if shape else text_prompts(path, count, lengths)
    parts = [everything[start : start + prompts] for start in range(0, len(everything) - prompts + 1, prompts)]
    if len(parts) < rounds + 1:
        raise UsageError(
            f"{len(everything)} distinct prompts make {len(parts)} rounds of {prompts}, and {rounds + 1} are needed, "
            "one to warm up: give more --samples, or fewer --prompts or --rounds"
        )
    common, capture = split_flags(tuple(flags or ()))
    record = measure_server(
        Case(model, Path(), common, capture, boundaries),
        parts[0],
        parts[1:],
        Plan(rounds=rounds, precision=precision, in_flight=in_flight, decode_tokens=decode_tokens),
        Options(
            against=tuple(against.replace(",", " ").split()),
            one_at_a_time=one_at_a_time,
            boot_s=boot_s,
            work=work_dir,
        ),
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    text = json.dumps(record, indent=1)
    if as_json == Path("-"):
        print(text)
    else:
        show(record, Console())
        if as_json is not None:
            as_json.write_text(text + "\n")
    if plot is not None:
        from hashtap.bench.plot import draw

        for written in draw(record, plot):
            print(f"plot: {written}", file=sys.stderr)


def _range(text: str) -> tuple[int, int]:
    try:
        low, _, high = text.partition("-")
        return int(low), int(high or low)
    except ValueError:
        raise UsageError(f"--tokens {text!r} is no range: give one like 50-900") from None
