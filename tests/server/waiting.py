"""Wait for something that another process does."""

import os
import time
from collections.abc import Callable

__all__ = ["group_ended", "wait_until"]


def wait_until(happened: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll until ``happened()``; fails after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not happened():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s in vain for {what}")
        time.sleep(0.05)


def group_ended(leader: int) -> bool:
    """Whether no process of the group of this leader is left."""
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return True
    return False
