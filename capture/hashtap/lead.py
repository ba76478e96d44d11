"""How far an extraction is ahead of the trainer that follows its directory, so that it waits for one that lags."""

import time
from collections.abc import Container
from pathlib import Path

from hashtap.order import SealingOrder

__all__ = ["Lead"]

_LOOK_EVERY_S = 0.25


class Lead:
    """Counts what trainers have taken of this run's prompts.

    What they wait for counts as taken, so that a client never waits for a trainer that waits for it: it may be
    ``limit`` prompts ahead of what the trainer wants next, however large a batch that is.

    Args:
        directory: the capture directory.
        epoch: of the run.
        prompts: keys of the run's prompts.
        limit: so many prompts may be captured that no trainer has taken; None for any number.
    """

    def __init__(self, directory: Path, epoch: str, prompts: Container[bytes], limit: int | None) -> None:
        self._order = SealingOrder(directory, epoch)
        self._prompts, self._limit = prompts, limit
        self._row = self._mine = self._taken = 0
        self._looked_at_s = float("-inf")

    def has_room(self, captured: int) -> bool:
        """Whether one more prompt may be sent when ``captured`` are captured or on their way.

        Raises:
            FormatError, UsageError: when the order of the directory cannot be read.
        """
        if self._limit is None or captured - self._taken < self._limit:
            return True
        if time.monotonic() - self._looked_at_s > _LOOK_EVERY_S:
            self._looked_at_s = time.monotonic()
            self._taken = self._count()
        return captured - self._taken < self._limit

    def _count(self) -> int:
        order = self._order
        order.look()
        while self._row < min(order.asked, len(order)):
            self._mine += order.key(self._row) in self._prompts
            self._row += 1
        return self._mine + max(0, order.asked - len(order))
