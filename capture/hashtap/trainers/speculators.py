"""speculators' hidden states, served from shards: a backend of its released command line.

hashtap export captures data --to speculators --no-states       # ids and masks only
python -m hashtap.trainers.speculators train --hidden-states-backend hashtap --data-path data ...
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from hs_connectors import HiddenStatesTransfer
from hs_connectors.transfer import HiddenStatesBackend
from torch import Tensor

from hashtap.errors import UsageError
from hashtap.trainers.notes import source_of
from hashtap.trainers.source import TrainerSource

__all__ = ["CapturedBackend", "CapturedStates", "main"]


class CapturedStates(HiddenStatesTransfer):
    """Reads sample i of the exported dataset from the capture directory; ``source`` is for ``speculators``."""

    def __init__(self, source: TrainerSource) -> None:
        self._source = source

    def get_cached(self, file_idx: int) -> dict[str, Any] | None:
        """``hidden_states`` ``[T, 4, H]`` and ``token_ids`` int64 ``[T]`` of row ``file_idx``."""
        return dict(self._source[file_idx]) if file_idx < len(self._source) else None

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, Tensor] | None:
        """Captures are made before: UsageError."""
        raise UsageError("states are captured with hashtap before training: give --on-missing raise")


@HiddenStatesBackend.register("hashtap")
class CapturedBackend(HiddenStatesBackend):
    """``--hidden-states-backend hashtap``."""

    @staticmethod
    def add_train_args(parser: ArgumentParser) -> None:
        """``--captures``: where the capture directory lies now."""
        parser.add_argument("--captures", type=str, default=None, help="The capture directory, where it was moved.")

    @staticmethod
    def add_launch_args(parser: ArgumentParser) -> None:
        """The server is SGLang's: no argument."""

    @staticmethod
    def from_train_args(args: Namespace, data_path: str) -> CapturedStates:
        """The states of the samples that ``data_path`` was exported from."""
        return CapturedStates(source_of(Path(data_path), Path(args.captures) if args.captures else None))

    @staticmethod
    def build_kv_transfer_config(args: Namespace) -> dict[str, Any]:
        """The server is SGLang's: UsageError."""
        raise UsageError("hashtap captures on SGLang, not on vLLM")


def main() -> None:
    """speculators' own command line, with this backend known to it."""
    from speculators.cli import app

    app()


if __name__ == "__main__":
    main()
