"""Where each prompt of a sample file stands during an extraction, and the counts of it."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hashtap.progress import Snapshot
from hashtap.samples import Sample, SampleFile

__all__ = ["Prompt", "Summary", "Tally"]


@dataclass(slots=True)
class Prompt:
    """A distinct prompt, int32 ``[T]``, and the samples that share it."""

    key: bytes
    token_ids: npt.NDArray[np.int32]
    samples: list[Sample] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Summary:
    """What became of a sample file. ``prompts`` and ``sent`` count prompts, everything else of a number counts samples.

    ``tokens`` and ``raw_bytes`` are those of the prompts that this run captured, ``ratio`` that of the whole directory.
    """

    samples: int = 0
    captured: int = 0
    already_captured: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    pending: int = 0
    prompts: int = 0
    sent: int = 0
    tokens: int = 0
    raw_bytes: int = 0
    ratio: float | None = None
    seconds: float = 0.0

    @property
    def bad_fraction(self) -> float:
        """Samples that were left out, as a fraction of all."""
        return sum(self.left_out.values()) / self.samples if self.samples else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens that this run captured, over its time."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Tally:
    """A prompt goes from missing to acknowledged (its receipt is here) to sealed, or is left out.

    Args:
        file: the samples; its bad lines count as left out.
        sealed: keys that were in sealed shards before the run.
        row_bytes: bytes of one captured token row.
    """

    def __init__(self, file: SampleFile, row_bytes: int) -> None:
        self.prompts: dict[bytes, Prompt] = {}
        for sample in file.samples:
            self.prompts.setdefault(sample.key, Prompt(sample.key, sample.token_ids)).samples.append(sample)
        self.acknowledged: dict[bytes, Prompt] = {}
        self.sent = 0
        self.phase = "sending"
        self.ratio: float | None = None
        self._row_bytes = row_bytes
        self._lines = file.lines
        self._left_out = Counter(file.reasons())
        self._sealed: set[bytes] = set()
        self._already_captured = self._captured = self._done = 0
        self._tokens = sum(len(prompt.token_ids) for prompt in self.prompts.values())
        self._tokens_done = self._tokens_sealed = 0
        self._started_s = time.monotonic()

    @property
    def prompts_captured(self) -> int:
        """Prompts that are acknowledged or sealed, those of earlier runs included."""
        return len(self._sealed) + len(self.acknowledged)

    def missing(self) -> list[Prompt]:
        """Prompts that are not in a sealed shard, in the order of the file."""
        return [prompt for key, prompt in self.prompts.items() if key not in self._sealed]

    def found_sealed(self, keys: Iterable[bytes]) -> None:
        """These stood in sealed shards before anything was sent."""
        for key in keys:
            prompt = self.prompts[key]
            self._sealed.add(key)
            self._already_captured += len(prompt.samples)
            self._done += len(prompt.samples)
            self._captured += len(prompt.samples)
            self._tokens -= len(prompt.token_ids)

    def acknowledge(self, prompt: Prompt) -> None:
        """Its receipt says captured. Said again after a second sending, it changes nothing."""
        if prompt.key not in self.acknowledged:
            self.acknowledged[prompt.key] = prompt
            self._done += len(prompt.samples)
            self._tokens_done += len(prompt.token_ids)

    def seal(self, keys: Iterable[bytes]) -> None:
        """These acknowledged prompts stand in sealed shards now."""
        for key in keys:
            if prompt := self.acknowledged.pop(key, None):
                self._sealed.add(key)
                self._captured += len(prompt.samples)
                self._tokens_sealed += len(prompt.token_ids)

    def leave_out(self, prompt: Prompt, reason: str) -> None:
        """No record will come of it in this run."""
        self._left_out[reason] += len(prompt.samples)
        if self.acknowledged.pop(prompt.key, None):
            self._done -= len(prompt.samples)
            self._tokens_done -= len(prompt.token_ids)

    def snapshot(self) -> Snapshot:
        """How far the run is now; acknowledged counts as done."""
        return Snapshot(
            samples=self._lines,
            done=self._done,
            bad=sum(self._left_out.values()),
            tokens=self._tokens,
            tokens_done=self._tokens_done,
            raw_bytes=self._tokens_done * self._row_bytes,
            ratio=self.ratio,
            seconds=time.monotonic() - self._started_s,
            phase=self.phase,
        )

    def summary(self) -> Summary:
        """What the run has achieved so far; only sealed counts as captured."""
        return Summary(
            samples=self._lines,
            captured=self._captured,
            already_captured=self._already_captured,
            left_out=dict(self._left_out.most_common()),
            pending=self._lines - self._captured - sum(self._left_out.values()),
            prompts=len(self.prompts),
            sent=self.sent,
            tokens=self._tokens_sealed,
            raw_bytes=self._tokens_sealed * self._row_bytes,
            ratio=self.ratio,
            seconds=time.monotonic() - self._started_s,
        )
