"""Opens what holds samples and hands out its rows: JSON lines, a JSON list, Parquet, Arrow, or a directory of tables.

A directory is a saved Hugging Face dataset (``save_to_disk``; speculators' prepared data is one), or any other of
Parquet or Arrow files, read in the order of their names. A few rows are in memory at a time.
"""

import io
import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from hashtap.errors import UsageError

__all__ = ["COLUMNS", "Row", "read_rows"]

COLUMNS = ("id", "input_ids", "loss_mask", "messages", "conversations", "text", "tools")
"""What is taken from a table; other columns are not read."""

Row = bytes | dict[str, Any]
"""A line that is not parsed yet, or the fields of a table's row."""

MAX_LINE_BYTES = 256 << 20
ROWS_AT_A_TIME = 64


def read_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """The rows of ``path``, each with its number from 1. Blank lines are counted and left out.

    Raises:
        UsageError: when it cannot be read to its end, or is nothing that holds samples.
    """
    try:
        if path.is_dir() or path.suffix in (".parquet", ".arrow"):
            yield from zip(count(1), _table_rows(path))
        elif path.suffix == ".json" and _begins_a_list(path):
            yield from zip(count(1), _elements(path))
        else:
            yield from _lines(path)
    except (OSError, ValueError, KeyError, RecursionError, pa.ArrowException) as error:
        reason = error.strerror or error if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        raise UsageError(f"cannot read the samples in {path}: {reason}") from None


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with _open(path) as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES):
            number += 1
            if len(line) == MAX_LINE_BYTES:
                raise UsageError(f"line {number} of {path} is longer than {MAX_LINE_BYTES} bytes; is it JSON lines?")
            if not line.isspace():
                yield number, line


def _begins_a_list(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(1 << 12).lstrip().startswith(b"[")


def _elements(path: Path) -> Iterator[Row]:
    """Of a JSON list, as ShareGPT's files are; all of it is in memory."""
    for element in json.loads(path.read_bytes()):
        yield element if isinstance(element, dict) else json.dumps(element).encode()


def _open(path: Path) -> BinaryIO:
    if path.suffix != ".zst":
        return path.open("rb")
    # Unlike zstandard's own reader, pyarrow's raises when the stream is cut short.
    stream = pa.input_stream(str(path), compression="zstd")
    return cast("BinaryIO", io.BufferedReader(stream, buffer_size=1 << 20))


def _table_rows(path: Path) -> Iterator[dict[str, Any]]:
    for file in _tables(path) if path.is_dir() else [path]:
        for batch in _batches(file):
            known = [name for name in COLUMNS if name in batch.schema.names]
            if not {"input_ids", "messages", "conversations", "text"}.intersection(known):
                names = ", ".join(batch.schema.names)
                raise UsageError(
                    f"{file} has the columns {names}; samples have input_ids, messages, conversations or text"
                )
            for first in range(0, batch.num_rows, ROWS_AT_A_TIME):
                for row in batch.select(known).slice(first, ROWS_AT_A_TIME).to_pylist():
                    yield _without_nulls(row)


def _tables(directory: Path) -> list[Path]:
    splits = directory / "dataset_dict.json"
    if splits.exists():
        names = " or ".join(str(directory / name) for name in json.loads(splits.read_bytes())["splits"])
        raise UsageError(f"{directory} is a dataset of several splits: give {names}")
    state = directory / "state.json"
    if state.exists():
        return [directory / file["filename"] for file in json.loads(state.read_bytes())["_data_files"]]
    for kind in ("*.parquet", "*.arrow"):
        if found := sorted(directory.glob(kind)):
            return found
    raise UsageError(f"the directory {directory} holds no Parquet or Arrow file: give a sample file or a saved dataset")


def _batches(file: Path) -> Iterator[pa.RecordBatch]:
    if file.suffix == ".parquet":
        with pq.ParquetFile(file) as table:
            wanted = [name for name in table.schema_arrow.names if name in COLUMNS]
            yield from table.iter_batches(ROWS_AT_A_TIME, columns=wanted or None)
        return
    with pa.memory_map(str(file)) as source:
        # Datasets are saved as streams; the Feather way is a file with this beginning.
        if source.read(6) == b"ARROW1":
            reader = pa.ipc.open_file(source)
            yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        else:
            source.seek(0)
            yield from pa.ipc.open_stream(source)


def _without_nulls(value: Any) -> Any:
    """``value`` without null fields: a table gives every field to every row, and templates ask whether one is there."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        return [_without_nulls(item) for item in value]
    return value
