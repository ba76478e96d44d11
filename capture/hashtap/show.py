"""What ``hashtap show`` says of a capture directory and of one record, as plain facts."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hashtap.errors import HashtapError
from hashtap.identity import parse_key
from hashtap.manifest import Manifest
from hashtap.reader import Capture, NotCaptured, Reader

__all__ = ["describe_capture", "describe_directory", "fact_lines", "find_capture"]

VALUES_SHOWN = 4
IDS_SHOWN = 12


def describe_directory(reader: Reader) -> dict[str, Any]:
    """Counts, sizes and origin of all that is sealed; no payload is read.

    Raises:
        MismatchError: when the shards differ in model, layers or weights.
        FormatError: when the manifest is damaged.
    """
    shards = reader.shards
    facts: dict[str, Any] = {"directory": str(reader.directory.path), "uuid": reader.directory.uuid}
    facts |= {"records": len(reader), "samples named": len(Manifest.load(reader.directory.path))}
    if shards:
        common = reader.facts
        rows = sum(map(len, reader))
        facts |= {
            "model": common.model,
            "weights": common.epoch,
            "layers": [common.layer_name(layer) for layer in range(common.geometry.layers)],
            "row": f"{common.geometry.layers} x {common.geometry.hidden} {next(iter(reader)).dtype}" if rows else None,
            "rows": rows,
            "raw bytes": rows * common.geometry.row_bytes,
            "stored bytes": sum(shard.file_bytes for shard in shards),
            "ratio": round(reader.ratio, 4) if reader.ratio else None,
            "versions": ", ".join(f"{name} {version}" for name, version in sorted(common.versions.items())),
        }
    return facts | {
        "shards": len(shards),
        "open shards": len(reader.directory.partials()),
        "damaged shards": [str(error) for error in reader.bad_shards.values()],
        "duplicates": len(reader.duplicates),
        "set aside": len(reader.set_aside),
        "incomplete": [f"{one.entry.key.hex()}: {one.reason}" for one in reader.incomplete],
    }


def find_capture(reader: Reader, which: str) -> Capture:
    """The record of a key (32 hex digits) or of a sample id.

    Raises:
        HashtapError: when there is none.
        MismatchError: when it was captured with several weights and the reader does not choose.
    """
    key = parse_key(which)
    if key is not None and key in reader:
        return reader.by_key(key)
    try:
        return reader.by_sample_id(which) if key is None else reader.by_key(key)
    except NotCaptured as error:
        raise HashtapError(str(error)) from None


def describe_capture(capture: Capture) -> dict[str, Any]:
    """One record: whose it is, its first ids, and of each layer the mean L2 norm of its rows and the first values.

    Raises:
        FormatError: when its frames are damaged.
    """
    states = _as_float(capture)
    facts: dict[str, Any] = {
        "key": capture.key.hex(),
        "samples": Manifest.load(capture.shard.parent).sample_ids_of(capture.key),
        "weights": capture.epoch,
        "tokens": len(capture),
        "shard": capture.shard.name,
        "token ids": " ".join(map(str, capture.token_ids[:IDS_SHOWN])) + (" …" if len(capture) > IDS_SHOWN else ""),
    }
    for layer in range(states.shape[1]):
        values = " ".join(f"{value:.4g}" for value in states[0, layer, :VALUES_SHOWN])
        norm = float(np.linalg.norm(states[:, layer], axis=1).mean())
        facts[capture.facts.layer_name(layer)] = f"mean norm {norm:.4g}, first values {values} …"
    return facts


def fact_lines(facts: dict[str, Any]) -> Iterator[str]:
    """The facts as aligned lines; empty ones are left out, lists take a line an element."""
    width = max(map(len, facts))
    for name, value in facts.items():
        if value in (None, "", []):
            continue
        for number, element in enumerate(value if isinstance(value, list) else [value]):
            text = f"{element:,}" if isinstance(element, int) else str(element)
            yield f"{'' if number else name:<{width}}   {text}"


def _as_float(capture: Capture) -> npt.NDArray[np.float32]:
    """The states ``[T, L, H]`` as float32, for looking at."""
    states = capture.hidden_states
    if capture.dtype == "bfloat16":
        return (states.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if capture.dtype in ("float16", "float32"):
        return states.astype(np.float32)
    import torch

    return np.asarray(capture.tensor().to(torch.float32).numpy())
