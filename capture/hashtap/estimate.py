"""How much disk an extraction will take, asked before it is begun."""

from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage

from hashtap.errors import UsageError

__all__ = ["MARGIN", "RATIO", "Estimate"]

RATIO = 1.48
"""Compression of bfloat16 states, all overhead included; real ones of two models gave 1.48 to 1.50."""
MARGIN = 1.1
"""So much more than the estimate must be free."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The bytes of ``tokens`` captured tokens of ``layers`` x ``hidden`` elements.

    Args:
        layers: of a token, L: the auxiliary layers and the final state.
        element_bytes: 2 for bfloat16 and float16.
        ratio: of raw to stored bytes.
        directory: where they are to go, or will; None when nobody said.

    Raises:
        UsageError: when a number is out of range.
    """

    tokens: int
    layers: int
    hidden: int
    element_bytes: int = 2
    ratio: float = RATIO
    directory: Path | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "layers", "hidden", "element_bytes", "ratio"):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} is {getattr(self, name)}: give a number above 0")

    @property
    def token_bytes(self) -> int:
        """Of one token, uncompressed."""
        return self.layers * self.hidden * self.element_bytes

    @property
    def raw_bytes(self) -> int:
        """Of all tokens, uncompressed."""
        return self.tokens * self.token_bytes

    @property
    def stored_bytes(self) -> int:
        """Of all tokens, on disk."""
        return int(self.raw_bytes / self.ratio)

    @property
    def free_bytes(self) -> int | None:
        """Free where the directory is or will be made; None without one."""
        if self.directory is None:
            return None
        path = self.directory.absolute()
        while not path.exists():
            path = path.parent
        return disk_usage(path).free

    @property
    def fits(self) -> bool:
        """Whether a tenth more than what is stored is free; true without a directory."""
        free_bytes = self.free_bytes
        return free_bytes is None or free_bytes >= MARGIN * self.stored_bytes

    @property
    def line(self) -> str:
        """What it takes and what there is, in one line."""
        line = f"{self.tokens:,} tokens, about {_size(self.stored_bytes)} on disk at a ratio of {self.ratio:g}"
        return f"{line}; {room}" if (room := self._room()) else line

    def _room(self) -> str:
        free_bytes = self.free_bytes
        if free_bytes is None:
            return ""
        enough = "enough" if self.fits else f"too little: {MARGIN:.0%} of the estimate must be free"
        return f"free in {self.directory}: {_size(free_bytes)}, {enough}"

    def __str__(self) -> str:
        lines = [
            f"a token: {self.layers} x {self.hidden} x {self.element_bytes} = {self.token_bytes:,} bytes",
            f"{self.tokens:,} tokens: {_size(self.raw_bytes)} of states",
            f"on disk: {_size(self.stored_bytes)} at a ratio of {self.ratio:g}",
        ]
        return "\n".join([*lines, *filter(None, [self._room()])])


def _size(count: int) -> str:
    for power, unit in ((12, "TB"), (9, "GB"), (6, "MB")):
        if count >= 10**power:
            return f"{count / 10**power:,.2f} {unit}"
    return f"{count:,} bytes"
