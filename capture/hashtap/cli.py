"""The command line: ``hashtap extract``, ``verify``, ``show``, ``recover``, ``plan``,
``export``, ``bench``.

Answers go to standard output, progress and errors to standard error. Exit codes: 0 all is well, 1 something is
missing, left out or wrong, 2 bad usage or a mismatch, 3 the server is lost, 130 stopped by Ctrl-C.
"""

import asyncio
import json
import math
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hashtap import __version__
from hashtap.bench.command import bench
from hashtap.chat import ChatTokenizer
from hashtap.config import parse_boundaries
from hashtap.directory import CaptureDirectory
from hashtap.errors import HashtapError, UsageError
from hashtap.estimate import RATIO, Estimate
from hashtap.extract import FAILED, Extraction, ExtractOptions
from hashtap.forecast import Forecast, Rates
from hashtap.model_config import ModelShape
from hashtap.progress import Snapshot, bar_or_lines
from hashtap.quarantine import QUARANTINE_NAME
from hashtap.reader import Reader
from hashtap.recover import describe, recover
from hashtap.samples import load_samples
from hashtap.set_aside import SET_ASIDE_NAME, add_set_aside
from hashtap.show import describe_capture, describe_directory, fact_lines, find_capture
from hashtap.tally import Summary
from hashtap.verify import verify

__all__ = ["app", "run"]

INTERRUPTED = 130
RATES = Rates()

app = typer.Typer(
    help="Capture the hidden states of a running SGLang server, matched to their prompts by hash.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")

Json = Annotated[bool, typer.Option("--json", help="Answer with one JSON object.")]
Epoch = Annotated[str | None, typer.Option(help="Captures of these weights only.", show_default=False)]
Tokenizer = Annotated[
    str | None,
    typer.Option(help="Tokenizer of messages and text; the served model's if not given.", show_default=False),
]
Template = Annotated[
    Path | None,
    typer.Option("--chat-template", help="A template file in place of the tokenizer's.", show_default=False),
]
RemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the tokenizer or model, as Kimi's needs.")
]
Directory = Annotated[Path, typer.Argument(metavar="DIR", help="Capture directory.", show_default=False)]


def run() -> None:
    """Run the command line and exit; an error of hashtap's own is one line on standard error."""
    try:
        app()
    except HashtapError as error:
        print(f"hashtap: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"hashtap {__version__}")
        raise typer.Exit


@app.command("extract")
def _extract(
    samples: Annotated[
        Path,
        typer.Argument(
            help="Samples with ids, chats or text: .jsonl, .jsonl.zst, .json, .parquet, .arrow, or a saved dataset.",
            show_default=False,
        ),
    ],
    server: Annotated[str, typer.Option(help="URL of the server.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The server's capture directory.", show_default=False)],
    remote: Annotated[
        bool,
        typer.Option("--remote", help="The capture directory is not seen from here: --out keeps the manifest only."),
    ] = False,
    layers: Annotated[
        str | None, typer.Option(help="Boundaries that the server must capture, e.g. 2,15,27.", show_default=False)
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Prompts in flight.")] = 32,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="How long one attempt may take.")] = 600.0,
    attempts: Annotated[int, typer.Option(min=1, help="How often a prompt is tried.")] = 5,
    seal_wait_s: Annotated[
        float, typer.Option(min=1, help="Send again what for so long was not sealed after its capture.")
    ] = 120.0,
    ahead_samples: Annotated[
        int | None,
        typer.Option(min=1, help="Wait when so many are captured that no trainer has taken.", show_default=False),
    ] = None,
    max_bad_fraction: Annotated[
        float, typer.Option(min=0, max=1, help="Exit with 1 when a larger part of the samples was left out.")
    ] = 0.0,
    api_key: Annotated[
        str | None, typer.Option(envvar="HASHTAP_API_KEY", help="The server's API key.", show_default=False)
    ] = None,
    tokenizer: Tokenizer = None,
    chat_template: Template = None,
    trust_remote_code: RemoteCode = False,
    as_json: Json = False,
) -> None:
    """Send the samples that are not captured yet, wait until they are sealed.

    Exit status: 0 all are captured, 1 some were left out, 2 bad usage or a server that does not fit, 3 the server is
    lost or 20 prompts failed in a row, as while it restarts or its disk is full: start it again, it goes on.
    """
    options = ExtractOptions(
        server=server,
        out=out,
        remote=remote,
        layers=_boundaries(layers),
        concurrency=concurrency,
        timeout_s=timeout_s,
        attempts=attempts,
        seal_wait_s=seal_wait_s,
        ahead_samples=ahead_samples,
        api_key=api_key,
        tokenizer=ChatTokenizer(tokenizer, chat_template=chat_template, trust_remote_code=trust_remote_code),
    )
    display = bar_or_lines(sys.stderr)
    extraction = Extraction(samples, options, display)
    trouble: HashtapError | None = None
    code = 0
    try:
        asyncio.run(extraction.run())
    except HashtapError as error:
        trouble, code = error, error.exit_code
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        display.close()
    summary = extraction.summary()
    if code == 0 and summary.bad_fraction > max_bad_fraction:
        code = 1
    if as_json:
        print(json.dumps({**asdict(summary), "tokens_per_s": summary.tokens_per_s, "exit_code": code}))
    elif summary.samples:
        for line in _summary_lines(summary, options):
            print(line)
    if summary.pending or FAILED in summary.left_out:
        again = [part.replace(api_key, "KEY") if api_key else part for part in sys.argv[1:]]
        print(f"to capture the rest: {shlex.join(['hashtap', *again])}", file=sys.stderr)
    if trouble is not None:
        raise trouble
    raise typer.Exit(code)


@app.command("verify")
def _verify(
    directory: Directory,
    samples: Annotated[Path | None, typer.Option(help="The samples that must be there.", show_default=False)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Stored checksums, lengths and keys only.")] = False,
    set_aside: Annotated[
        bool,
        typer.Option(
            "--set-aside", help="Take what is wrong out of use: trainers go on without, extract captures it anew."
        ),
    ] = False,
    recompute: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL_DIR",
            help="The served model: compute some prompts once more with transformers, in one shot, and compare.",
            show_default=False,
        ),
    ] = None,
    recompute_records: Annotated[int, typer.Option(min=1, help="How many of them, spread over the records.")] = 8,
    epoch: Epoch = None,
    tokenizer: Tokenizer = None,
    chat_template: Template = None,
    trust_remote_code: RemoteCode = False,
    as_json: Json = False,
) -> None:
    """Check every record, and that every sample has one; messages and text are tokenised once more for it."""
    file = None
    if samples is not None:
        chats = ChatTokenizer(tokenizer, chat_template=chat_template, trust_remote_code=trust_remote_code)
        shards = Reader(directory, epoch=epoch, strict=False).shards if tokenizer is None else []
        file = load_samples(samples, tokenizer=chats.for_model(shards[0].facts.model) if shards else chats)
    expected = ((sample.id, sample.token_ids, b"") for sample in file.samples) if file is not None else None
    report = verify(
        directory,
        samples=expected,
        quick=quick,
        epoch=epoch,
        recompute=recompute,
        recompute_records=recompute_records,
        trust_remote_code=trust_remote_code,
    )
    unusable = file.bad if file is not None else []
    aside = add_set_aside(directory, report.problems) if set_aside else 0
    if as_json:
        print(json.dumps({**report.to_json(), "unusable": [asdict(bad) for bad in unusable]}))
    else:
        for problem in report.problems:
            print(problem)
        for bad in unusable:
            print(f"unusable: line {bad.line} of {samples}: {bad.reason}: {bad.detail}")
        for difference in report.recomputed:
            print(f"compared: {difference}")
        for warning in report.warnings:
            print(f"warning: {warning}")
        print(report.summary())
        if set_aside:
            print(f"{aside} records set aside in {directory / SET_ASIDE_NAME}")
    if aside:
        print("to capture them anew: start the server anew, then say hashtap extract once more", file=sys.stderr)
    raise typer.Exit(0 if report.ok and not unusable else 1)


@app.command("show")
def _show(
    directory: Directory,
    which: Annotated[
        str | None, typer.Argument(metavar="[KEY|SAMPLE_ID]", help="One record.", show_default=False)
    ] = None,
    epoch: Epoch = None,
    as_json: Json = False,
) -> None:
    """Describe a capture directory, or one record in it."""
    reader = Reader(directory, epoch=epoch, strict=False)
    facts = describe_directory(reader) if which is None else describe_capture(find_capture(reader, which))
    for line in [json.dumps(facts)] if as_json else fact_lines(facts):
        print(line)


@app.command("recover")
def _recover(
    directory: Directory,
    other_hosts: Annotated[
        bool,
        typer.Option("--other-hosts", help="Also files of servers on other hosts, which must be known to be dead."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Seal what servers that died had written; a server does so at its start for those of its own host."""
    found = recover(CaptureDirectory.open(directory), other_hosts=other_hosts)
    if as_json:
        print(json.dumps([asdict(recovery) for recovery in found]))
    else:
        for recovery in found:
            print(f"{recovery.partial}: {describe(recovery)}")
        recovered = sum(recovery.records for recovery in found)
        print(f"{len(found)} unfinished files, {recovered} records recovered")
    raise typer.Exit(any(recovery.state == "failed" for recovery in found))


@app.command("plan")
def _plan(
    tokens: Annotated[float, typer.Option(help="Prompt tokens to capture, e.g. 87.8e6.", show_default=False)],
    layers: Annotated[int, typer.Option(help="Layers of a token, the final state included.")] = 4,
    hidden: Annotated[int | None, typer.Option(help="The model's hidden size.", show_default=False)] = None,
    model_config: Annotated[
        Path | None, typer.Option(help="The model's config.json, in place of --hidden.", show_default=False)
    ] = None,
    ratio: Annotated[float, typer.Option(help="Compression to reckon with.")] = RATIO,
    gpus: Annotated[
        int | None, typer.Option(help="Reckon with time, disk and writers on so many GPUs too.", show_default=False)
    ] = None,
    ranks: Annotated[int, typer.Option(help="Ranks that write: data-parallel ones.")] = 1,
    writers: Annotated[int, typer.Option(help="Writers of a rank, --capture-writers.")] = 2,
    prompt_tokens: Annotated[int, typer.Option(help="Of a prompt, on average.")] = 1000,
    prefill_tokens_per_s: Annotated[float, typer.Option(min=1, help="Of one GPU.")] = RATES.prefill_tokens_per_s,
    writer_gb_per_s: Annotated[float, typer.Option(min=0.001, help="States that one writer takes.")] = RATES.writer
    / 1e9,
    disk_gb_per_s: Annotated[float, typer.Option(min=0.001, help="What the disk takes.")] = RATES.disk / 1e9,
    pcie_gb_per_s: Annotated[float, typer.Option(min=0.001, help="From a GPU to the host.")] = RATES.pcie / 1e9,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="Where the captures will go.", show_default=False)
    ] = None,
    anyway: Annotated[bool, typer.Option("--anyway", help="Exit with 0 although the disk is too small.")] = False,
    as_json: Json = False,
) -> None:
    """Reckon how much disk and time an extraction takes; exit with 1 where --dir has less than 110 % of it free."""
    if not math.isfinite(tokens):
        raise UsageError(f"--tokens {tokens}: give a number of tokens, like 87.8e6")
    if (hidden is None) == (model_config is None):
        raise UsageError("give either --hidden or --model-config, which says how wide a state is")
    width = ModelShape.read(model_config).hidden if model_config is not None else hidden
    estimate = Estimate(int(tokens), layers, width or 0, ratio=ratio, directory=directory)
    forecast = None
    if gpus is not None:
        rates = Rates(prefill_tokens_per_s, writer_gb_per_s * 1e9, disk=disk_gb_per_s * 1e9, pcie=pcie_gb_per_s * 1e9)
        forecast = Forecast(estimate, gpus, ranks, writers, prompt_tokens, rates)
    if as_json:
        numbers = {name: getattr(estimate, name) for name in ("token_bytes", "raw_bytes", "stored_bytes", "free_bytes")}
        print(json.dumps({**numbers, "fits": estimate.fits, "forecast": forecast and forecast.to_json()}))
    else:
        print(estimate if forecast is None else f"{estimate}\n{forecast}")
    raise typer.Exit(0 if estimate.fits or anyway else 1)


@app.command("export")
def _export(
    directory: Directory,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the trainer's files.", show_default=False)],
    to: Annotated[
        str, typer.Option(help="specforge, speculators, modelopt, angelslim or safetensors.", show_default=False)
    ],
    model: Annotated[
        Path | None,
        typer.Option(help="The served model, to undo its final norm where the trainer wants that.", show_default=False),
    ] = None,
    samples: Annotated[
        Path | None,
        typer.Option(help="Samples and masks as extract takes them, for the manifest's.", show_default=False),
    ] = None,
    epoch: Epoch = None,
    layers: Annotated[
        str | None, typer.Option(help="Only these boundaries of those captured, e.g. 2,15,27.", show_default=False)
    ] = None,
    loss_on_all: Annotated[
        bool, typer.Option("--loss-on-all", help="Count all tokens of samples that have no loss mask.")
    ] = False,
    skip_missing: Annotated[
        bool, typer.Option("--skip-missing", help="Leave out samples that are not captured.")
    ] = False,
    no_states: Annotated[
        bool, typer.Option("--no-states", help="Only what the trainer needs besides; states are read from DIR.")
    ] = False,
    threads: Annotated[int, typer.Option(min=1, max=256, help="Samples read and written at a time.")] = 2,
    tokenizer: Tokenizer = None,
    chat_template: Template = None,
    trust_remote_code: RemoteCode = False,
    as_json: Json = False,
) -> None:
    """Write captures as the files that a trainer reads; started again, it writes only what is missing."""
    try:
        from hashtap.trainers.export import export
        from hashtap.trainers.source import Choice, TrainerSource
    except ModuleNotFoundError as error:
        raise UsageError(f"hashtap export needs {error.name}: pip install {error.name}") from None
    choice = Choice(
        model=model,
        samples=samples,
        epoch=epoch,
        layers=_boundaries(layers),
        loss_on_all=loss_on_all,
        skip_missing=skip_missing,
        tokenizer=tokenizer,
        chat_template=chat_template,
        trust_remote_code=trust_remote_code,
    )
    source = TrainerSource(directory, to, choice)
    row_bytes, all_tokens, display = source.facts.geometry.row_bytes, sum(source.lengths), bar_or_lines(sys.stderr)

    def progress(done: int, samples: int, tokens: int, seconds: float) -> None:
        raw_bytes = tokens * row_bytes
        display.show(Snapshot(samples, done, 0, all_tokens, tokens, raw_bytes, None, seconds, "exporting"))

    try:
        exported = export(source, out, threads=threads, states=not no_states, progress=progress)
    finally:
        display.close()
    if as_json:
        print(json.dumps(asdict(exported)))
        return
    print(f"{exported.samples:,} samples, {exported.tokens:,} tokens for {to} in {out}")
    if exported.skipped:
        print(f"  written before: {exported.skipped:,}")
    if exported.missing:
        print(f"  left out, not captured: {exported.missing:,}")
    print(f"  layer ids {exported.layer_ids}; what they mean, and the norm: {exported.notes}")


def _boundaries(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return parse_boundaries(text)
    except ValueError:
        raise UsageError(f"--layers {text!r} are no boundaries; give whole numbers like 2,15,27") from None


def _summary_lines(summary: Summary, options: ExtractOptions) -> list[str]:
    where = f"by {options.server}" if options.remote else f"in {options.out}"
    lines = [f"{summary.captured:,}/{summary.samples:,} samples captured {where}"]
    if summary.already_captured:
        lines[0] += f", {summary.already_captured:,} of them before this run"
    lines += [f"  left out: {count:,} x {reason}" for reason, count in summary.left_out.items()]
    if summary.left_out:
        lines.append(f"  named in {options.out / QUARANTINE_NAME}")
    if summary.pending:
        lines.append(f"  not captured yet: {summary.pending:,}")
    if summary.sent:
        ratio = f", ratio {summary.ratio:.3f}" if summary.ratio else ""
        lines.append(
            f"  {summary.tokens:,} tokens, {_size(summary.raw_bytes)} of states{ratio}, "
            f"{summary.sent:,} requests, {summary.seconds:.1f} s, {summary.tokens_per_s:,.0f} tokens/s"
        )
    return lines


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:,.2f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"
