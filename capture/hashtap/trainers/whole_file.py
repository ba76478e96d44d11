"""Files that are whole as soon as they can be seen under their name."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

__all__ = ["PARTIAL", "write_whole"]

PARTIAL = ".partial"
"""How a file ends that is still being written; no trainer reads such a name."""


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Let ``write`` fill a file, bring it to the disk and give it its name. OSError as files raise it."""
    partial = path.with_name(f".{path.name}{PARTIAL}")
    with partial.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
