"""speculators' Arrow directory: token ids and loss masks as a saved Hugging Face dataset, and counts of the tokens.

Written with pyarrow alone, last of an export: the directory can be loaded once everything is there. The columns are cut
into record batches, because the offsets of an Arrow list have 32 bits.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from hashtap.directory import whole_file

__all__ = ["write_arrow"]

Ids = npt.NDArray[np.int64]

_BATCH_TOKENS = 1 << 20
_DATA, _INFO, _STATE = "data-00000-of-00001.arrow", "dataset_info.json", "state.json"
# "Sequence" is read by every release of datasets; "List" only from 4 on.
_LIST = {"feature": {"dtype": "int64", "_type": "Value"}, "_type": "Sequence"}
_FEATURES = {"input_ids": _LIST, "loss_mask": _LIST, "seq_len": {"dtype": "int64", "_type": "Value"}}
_SCHEMA = pa.schema(
    [("input_ids", pa.list_(pa.int64())), ("loss_mask", pa.list_(pa.int64())), ("seq_len", pa.int64())],
    {"huggingface": json.dumps({"info": {"features": _FEATURES}})},
)


def write_arrow(rows: Iterable[tuple[Ids, Ids]], out: Path, fingerprint: str) -> None:
    """Write ``(input_ids, loss_mask)`` rows, each int64 ``[T]``, into ``out``, unless that was done."""
    if (out / _STATE).exists():
        return
    counts = np.zeros(0, np.int64)
    with pa.OSFile(str(out / _DATA), "wb") as file, pa.ipc.new_stream(file, _SCHEMA) as stream:
        for batch in _batches(rows):
            ids, masks = (np.concatenate(column) for column in zip(*batch, strict=True))
            counted = np.bincount(ids[masks != 0])
            counts, counted = sorted((counts, counted), key=len)
            counted[: len(counts)] += counts
            counts = counted
            stream.write_batch(_record_batch(ids, masks, [len(row) for row, _ in batch]))
    frequencies = {int(token): int(counts[token]) for token in np.flatnonzero(counts)}
    with whole_file(out / "token_freq.pt") as file:
        torch.save(frequencies, file)
    info = {"citation": "", "description": "", "features": _FEATURES, "homepage": "", "license": ""}
    _write_json(out / _INFO, info)
    state: dict[str, Any] = {
        "_data_files": [{"filename": _DATA}],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": "torch",
        "_output_all_columns": False,
        "_split": None,
    }
    _write_json(out / _STATE, state)


def _batches(rows: Iterable[tuple[Ids, Ids]]) -> Iterator[list[tuple[Ids, Ids]]]:
    """Rows in lists of at most ``_BATCH_TOKENS`` tokens, or one row."""
    batch: list[tuple[Ids, Ids]] = []
    tokens = 0
    for row in rows:
        if batch and tokens + len(row[0]) > _BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(row)
        tokens += len(row[0])
    if batch:
        yield batch


def _record_batch(ids: Ids, masks: Ids, lengths: list[int]) -> pa.RecordBatch:
    offsets = pa.array(np.cumsum([0, *lengths]), pa.int32())
    columns = [pa.ListArray.from_arrays(offsets, pa.array(values)) for values in (ids, masks)]
    return pa.RecordBatch.from_arrays([*columns, pa.array(lengths, pa.int64())], schema=_SCHEMA)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with whole_file(path) as file:
        file.write(json.dumps(content, indent=1).encode())
