"""``hashtap bench server`` itself: starts the sides, measures them, verifies what was captured, makes the record."""

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from hashtap.bench.counted import Got
from hashtap.bench.load import UNCOUNTED, send
from hashtap.bench.outcome import Asked, outcome
from hashtap.bench.rounds import Fleet, Plan, Turn, decode_prompts, run_rounds
from hashtap.bench.servers import Server, ServerFailed, cpu_environment
from hashtap.bench.sides import Case, Side, make_sides
from hashtap.bench.surroundings import surroundings
from hashtap.errors import HashtapError, ServerLost
from hashtap.reader import Reader
from hashtap.verify import verify

__all__ = ["Options", "measure_server"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How it is measured; :class:`hashtap.bench.rounds.Plan` says how much.

    Attributes:
        against: peers besides the three sides that are always measured.
        one_at_a_time: start each server anew for its turn.
        boot_s: how long a start may take.
        work: where captures and dumps go and are deleted again; a new folder for temporary files if None.
    """

    against: tuple[str, ...] = ()
    one_at_a_time: bool = False
    boot_s: float = 600.0
    work: Path | None = None


def measure_server(
    case: Case,
    warm_up: list[list[int]],
    prompts: Sequence[list[list[int]]],
    plan: Plan,
    options: Options,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure the sides on the same prompts.

    Args:
        case: the model and flags; its ``work`` is not used.
        warm_up: sent to every server after its start.
        prompts: of each round; all of them must be different.
        say: told what goes on, a line at a time.

    Returns:
        The record: surroundings, setting, figures (:func:`hashtap.bench.outcome.outcome`).

    Raises:
        HashtapError: when not everything that was sent is captured and verified; there are no figures then.
        ServerLost: when a server does not start or answer.
    """
    with _folder(options.work) as work, _losing_servers(options.one_at_a_time):
        sides = make_sides(replace(case, work=work), options.against)
        environment = cpu_environment() if {"cpu", "--device=cpu"} & {*case.flags} else {}

        def make(side: Side) -> Server:
            return Server(side.command, environment=environment, boot_s=options.boot_s)

        def ready(side: Side, server: Server) -> None:
            say(f"{side.name} is up: {side.title}")
            send(server.url, warm_up, side.request, in_flight=plan.in_flight, rids=UNCOUNTED)

        with Fleet(sides, make, ready, one_at_a_time=options.one_at_a_time) as fleet:
            turns = run_rounds(fleet, sides, prompts, plan, say)
        done = prompts[: len(turns["hashtap"])]
        sent = [prompt for part in done for prompt in part]
        captures = next(side.folder for side in sides if side.name == "hashtap")
        assert captures is not None
        verified = _verified(captures, [*warm_up, *sent, *(p for part in done for p in decode_prompts(part, plan))])
        got = {side.name: _count(side, turns[side.name], sent) for side in sides}
        facts = Reader(captures).facts
    geometry = facts.geometry
    asked = Asked(sum(map(len, sent)), geometry.layers, geometry.hidden, geometry.dtype.element_bytes)
    return {
        "benchmark": "server",
        **surroundings(["hashtap", *sys.argv[1:]]),
        "model": Path(case.model).name,
        "flags": [*case.flags, *case.capture_flags],
        "boundaries": facts.boundaries,
        "rounds": len(done),
        "prompts_a_round": len(done[0]),
        "in_flight": plan.in_flight,
        "one_at_a_time": options.one_at_a_time,
        "verified": verified,
        **outcome(sides, turns, got, asked),
    }


@contextmanager
def _folder(parent: Path | None) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="hashtap-bench-", dir=parent)).absolute()  # servers run elsewhere
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _losing_servers(one_at_a_time: bool) -> Iterator[None]:
    try:
        yield
    except ServerFailed as failure:
        remedy = "" if one_at_a_time else "; where only one server has room, give --one-at-a-time"
        raise ServerLost(f"{failure}{remedy}") from failure
    except httpx.HTTPError as error:
        raise ServerLost(f"a server stopped answering: {type(error).__name__}: {error}") from error


def _verified(captures: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """The gate: every prompt that the capturing server was sent is there, and right to the last row."""
    report = verify(captures, samples=((str(number), ids, b"") for number, ids in enumerate(prompts)))
    if not report.ok:
        problems = "; ".join(map(str, report.problems[:3]))
        raise HashtapError(f"no figures without right captures: {report.summary()}: {problems}")
    return {"prompts": report.verified, "tokens": report.tokens, "ratio": report.ratio}


def _count(side: Side, turns: Sequence[Turn], sent: list[list[int]]) -> Got:
    if side.counts_folder is not None and side.folder is not None:
        return side.counts_folder(side.folder, sent)
    return sum((turn.got for turn in turns), Got())
