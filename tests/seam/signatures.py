"""Writes down what SGLang releases have of hashtap's targets, so that tests need not have the releases.

    python tests/seam/signatures.py [FOLDER ...]

Each FOLDER is the package ``sglang`` of an installed or unpacked wheel (``pip download --no-deps sglang==X``, then
``python -m zipfile -e``); without any it is the installed one. To be run with all tested releases when a target is
added.
"""

import json
import sys
from importlib.metadata import distributions
from pathlib import Path

from hashtap.releases import Signatures, installed_sglang, read_signatures
from hashtap.targets import TESTED_VERSIONS

__all__ = ["read_committed"]

FILE = Path(__file__).with_suffix(".json")


def read_committed() -> dict[str, Signatures]:
    """The signatures of every tested release, by version."""
    return dict(json.loads(FILE.read_text()))


def main(folders: list[Path]) -> None:
    """Bring the file up to date for the releases in ``folders``."""
    committed = read_committed() if FILE.exists() else {}
    for folder in folders:
        (distribution,) = distributions(path=[str(folder.parent)], name="sglang")
        committed[distribution.version] = read_signatures(folder)
    # One target a line, so that a difference shows what changed.
    releases = (
        f'"{version}": {{\n'
        + ",\n".join(f"  {json.dumps(path)}: {json.dumps(names)}" for path, names in committed[version].items())
        + "\n}"
        for version in TESTED_VERSIONS
    )
    FILE.write_text("{\n" + ",\n".join(releases) + "\n}\n")


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]] or [installed_sglang()[1]])
