"""How long a large extraction will take, how busy disk, PCIe and writers will be, and which of them limits it.

Prefill sets the pace; every other part is given what it must carry a second as a share of what it can, its duty. A duty
above 1 holds the prefill back, and the largest one says by how much.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

from hashtap.errors import UsageError
from hashtap.estimate import Estimate
from hashtap_kernels.layout import MAX_FRAME_TOKENS

__all__ = ["Forecast", "Rates"]

ROW_SUM_BYTES = 8
"""That the kernel adds to a row."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What the machine can do; in bytes a second where nothing else is said.

    Attributes:
        prefill_tokens_per_s: of one GPU.
        writer: raw bytes that one writer checks, compresses and writes; about what ``plan`` in
            bench/results/figures.json has of a core of a server, with real states.
        frame_s: seconds that it spends on each frame besides, from there too.
        disk: sequential writes, of one NVMe drive.
        pcie: from one GPU to pinned host memory, of a PCIe 5.0 x16 slot.
    """

    prefill_tokens_per_s: float = 5_000.0
    writer: float = 0.9e9
    frame_s: float = 0.15e-3
    disk: float = 2.0e9
    pcie: float = 50e9

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} is {getattr(self, name)}: give a number above 0")


@dataclass(frozen=True, slots=True)
class Forecast:
    """The run of ``estimate`` on ``gpus`` GPUs.

    Args:
        ranks: that write: the data-parallel ones, as tensor-parallel ranks hold the same rows and only one writes.
        writers: processes that write for each of them (``--capture-writers``).
        prompt_tokens: of a prompt, on average; a frame holds up to 256.

    Raises:
        UsageError: when a number is out of range.
    """

    estimate: Estimate
    gpus: int = 1
    ranks: int = 1
    writers: int = 2
    prompt_tokens: int = 1000
    rates: Rates = Rates()

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= self.gpus:
            raise UsageError(f"{self.ranks} ranks cannot write on {self.gpus} GPUs: give 1 to {self.gpus}")
        if self.writers < 1 or self.prompt_tokens < 1:
            raise UsageError(f"{self.writers} writers, prompts of {self.prompt_tokens} tokens: give 1 or more of both")

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of all GPUs together, with nothing in their way."""
        return self.gpus * self.rates.prefill_tokens_per_s

    @property
    def raw_bytes_per_s(self) -> float:
        """States at that pace."""
        return self.prefill_tokens_per_s * self.estimate.token_bytes

    @property
    def writer_bytes_per_s(self) -> float:
        """What one writer takes of such prompts: frames that are not full take it longer for their bytes."""
        frames_per_token = math.ceil(self.prompt_tokens / MAX_FRAME_TOKENS) / self.prompt_tokens
        return 1 / (1 / self.rates.writer + self.rates.frame_s * frames_per_token / self.estimate.token_bytes)

    @property
    def duties(self) -> dict[str, float]:
        """The share that each part is busy at the pace of the prefill: above 1, it cannot keep up."""
        framed = 1 + ROW_SUM_BYTES / self.estimate.token_bytes
        return {
            "writers": self.raw_bytes_per_s / (self.ranks * self.writers * self.writer_bytes_per_s),
            "disk": self.raw_bytes_per_s / self.estimate.ratio / self.rates.disk,
            "PCIe": self.raw_bytes_per_s * framed / self.ranks / self.rates.pcie,
        }

    @property
    def bottleneck(self) -> str:
        """What sets the pace: ``prefill`` where all others keep up."""
        name, duty = max(self.duties.items(), key=lambda part: part[1])
        return name if duty > 1 else "prefill"

    @property
    def tokens_per_s(self) -> float:
        """The pace with everything in the way."""
        return self.prefill_tokens_per_s / max(1.0, *self.duties.values())

    @property
    def seconds(self) -> float:
        """Of the whole run."""
        return self.estimate.tokens / self.tokens_per_s

    @property
    def writers_needed(self) -> int:
        """For each rank, so that they keep up with the prefill."""
        return math.ceil(self.raw_bytes_per_s / self.ranks / self.writer_bytes_per_s)

    def to_json(self) -> dict[str, Any]:
        """The figures, as JSON takes them."""
        names = ("seconds", "tokens_per_s", "prefill_tokens_per_s", "raw_bytes_per_s", "duties", "writers_needed")
        return {name: getattr(self, name) for name in (*names, "bottleneck")} | {"rates": asdict(self.rates)}

    def __str__(self) -> str:
        rates, estimate, raw = self.rates, self.estimate, self.raw_bytes_per_s / 1e6
        slow = "" if self.bottleneck == "prefill" else f", which cannot keep up with {self.prefill_tokens_per_s:,.0f}"
        overhead = f"{rates.frame_s * 1e3:g} ms a frame besides"
        assumed = [
            f"{self.gpus} GPUs of {rates.prefill_tokens_per_s:,.0f} prompt tokens/s each",
            f"{self.writers} writers a writing rank, each of {rates.writer / 1e9:g} GB/s and {overhead}",
            f"the disk takes {rates.disk / 1e9:g} GB/s, PCIe {rates.pcie / 1e9:g} GB/s a GPU",
            f"ratio {estimate.ratio:g}",
            f"prompts of {self.prompt_tokens:,} tokens, each computed once and whole",
        ]
        lines = [
            f"time: {_time(self.seconds)} at {self.tokens_per_s:,.0f} tokens/s",
            f"states: {raw:,.0f} MB/s, {raw / estimate.ratio:,.0f} MB/s on disk, at the pace of the prefill",
            f"busy at that pace: {', '.join(f'{name} {duty:.1%}' for name, duty in self.duties.items())}",
            f"writers needed: {self.writers_needed} for each writing rank, of which there are {self.ranks}",
            f"bottleneck: {self.bottleneck}{slow}",
            f"assumed: {'; '.join(assumed)}",
        ]
        return "\n".join(lines)


def _time(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.1f} s"
    return f"{minutes // 60:,} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min"
