"""How far an extraction is, as a bar in a terminal and as a line now and then in a log."""

import time
from dataclasses import dataclass
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

__all__ = ["Display", "Snapshot", "bar_or_lines", "progress_line"]

LINE_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a run at one moment. Tokens are those of distinct prompts, sent by this run."""

    samples: int
    done: int
    bad: int
    tokens: int
    tokens_done: int
    raw_bytes: int
    ratio: float | None
    seconds: float
    phase: str


class Display(Protocol):
    """Shows snapshots."""

    def show(self, snapshot: Snapshot) -> None:
        """Show the newest state; may be called often."""

    def say(self, text: str) -> None:
        """Show a line that stays."""

    def close(self) -> None:
        """Leave the terminal as it was."""


def progress_line(now: Snapshot) -> str:
    """One line: samples, speed, ratio and time left.

    >>> progress_line(Snapshot(300, 75, 0, 100_000, 25_000, 172_800_000, 1.49, 10.0, "sending"))
    'sending 75/300 samples, 2,500 tokens/s, 0.017 GB/s, ratio 1.49, 0:00:30 left'
    """
    parts = [f"{now.phase} {now.done:,}/{now.samples:,} samples"]
    if now.bad:
        parts[0] += f" ({now.bad:,} left out)"
    if now.tokens_done and now.seconds > 0:
        parts.append(f"{now.tokens_done / now.seconds:,.0f} tokens/s")
        parts.append(f"{now.raw_bytes / now.seconds / 1e9:.3f} GB/s")
    if now.ratio is not None:
        parts.append(f"ratio {now.ratio:.2f}")
    if 0 < now.tokens_done < now.tokens:
        left = (now.tokens - now.tokens_done) * now.seconds / now.tokens_done
        parts.append(f"{int(left) // 3600}:{int(left) // 60 % 60:02}:{int(left) % 60:02} left")
    return ", ".join(parts)


def bar_or_lines(stream: TextIO) -> Display:
    """A bar where ``stream`` is a terminal, else at most one line every ten seconds."""
    console = Console(file=stream)
    return _Bar(console) if console.is_terminal else _Lines(stream)


class _Bar:
    def __init__(self, console: Console) -> None:
        self._progress = Progress(BarColumn(), TextColumn("{task.description}"), console=console)
        self._task = self._progress.add_task("", total=None)
        self._progress.start()

    def show(self, snapshot: Snapshot) -> None:
        description = progress_line(snapshot)
        self._progress.update(self._task, total=snapshot.samples, completed=snapshot.done, description=description)

    def say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._progress.stop()


class _Lines:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._next_s = time.monotonic() + LINE_EVERY_S

    def show(self, snapshot: Snapshot) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + LINE_EVERY_S
            self.say(progress_line(snapshot))

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """A log has nothing to clean up."""
