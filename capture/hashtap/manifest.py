"""The sample manifest: which sample id stands for which prompt, in ``manifest.parquet``.

It maps names to keys and keeps the loss masks. What is captured is not in it: the sealed shards are
the only truth of that. Columns: ``sample_id`` string, ``key`` string (32 hex digits), ``epoch``
string, ``tokens`` int32, ``loss_mask`` list<uint8> or null; rows in the order of the sample files.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from hashtap.directory import drop_drafts, locked, open_regular, whole_file
from hashtap.errors import FormatError, MismatchError, UsageError
from hashtap.samples import Sample

__all__ = ["MANIFEST_NAME", "Manifest", "ManifestRow"]

MANIFEST_NAME = "manifest.parquet"
_DIRECTORY = b"hashtap.directory"
_LIMIT_BYTES = 1 << 40
_FOOTER_LIMIT_BYTES = 1 << 27
"""Its reader allocates what the file says that the footer has: 600 bytes for 1,024 samples."""
_LIST_LIMIT = 1 << 17
"""As it does for the footer's lists, of which the longest has an entry for 1,024 samples."""
_DECODED_LIMIT = 1 << 13
"""So much is decoded of a byte of the file at most: masks of 175,000 tokens, all ones, take 22 bytes."""
_LEAST_LIMIT_BYTES = 1 << 22
_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("epoch", pa.string(), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("loss_mask", pa.list_(pa.uint8())),
    ]
)
_STRINGS = ["sample_id", "key", "epoch"]


@dataclass(frozen=True, slots=True)
class ManifestRow:
    """One sample: its prompt's key (16 bytes), the epoch it was asked for in, its length in tokens."""

    sample_id: str
    key: bytes
    epoch: str
    tokens: int


class Manifest:
    """The manifest of one directory, as it was when loaded. Iteration is in file order."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table.select(_SCHEMA.names).combine_chunks()
        self._directory_uuid: str = (table.schema.metadata or {}).get(_DIRECTORY, b"").decode()
        self._ids: list[str] = self._table["sample_id"].to_pylist()
        self._keys: list[bytes] = [bytes.fromhex(key) for key in self._table["key"].to_pylist()]
        self._row = {sample_id: row for row, sample_id in enumerate(self._ids)}
        self._rows_of: dict[bytes, list[int]] = {}
        for row, key in enumerate(self._keys):
            self._rows_of.setdefault(key, []).append(row)

    @classmethod
    def load(cls, directory: str | Path) -> "Manifest":
        """The manifest in ``directory``; an empty one when there is none.

        Raises:
            FormatError: when the file is not a manifest, or one that decodes to far more than any sample file makes.
        """
        path = Path(directory) / MANIFEST_NAME
        try:
            with open_regular(path, _LIMIT_BYTES) as file:
                return cls(_read(file))
        except FileNotFoundError:
            return cls(_SCHEMA.empty_table())
        except (OSError, ValueError, IndexError, FormatError) as error:
            why = " ".join(str(error).split())  # arrow ends some of its errors with a line break
            raise FormatError(f"cannot read the manifest {path}: {why}; remove it and extract again") from None

    @classmethod
    def merge(cls, directory: str | Path, samples: Sequence[Sample], *, epoch: str, directory_uuid: str) -> "Manifest":
        """Add ``samples`` to the manifest in ``directory`` and write it, atomically; several clients may do so at once.

        A sample id that is there already keeps its place and takes the new epoch and loss mask.

        Raises:
            UsageError: when an id is there already with another prompt, or the manifest cannot be written.
            MismatchError: when the manifest belongs to another capture directory.
        """
        try:
            with locked(Path(directory)):
                manifest = cls.load(directory)._with(samples, epoch, directory_uuid)
                manifest._write(Path(directory))
        except OSError as error:
            raise UsageError(f"cannot write the manifest in {directory}: {error.strerror or error}") from None
        return manifest

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._row

    def __iter__(self) -> Iterator[ManifestRow]:
        epochs, tokens = self._table["epoch"].to_pylist(), self._table["tokens"].to_pylist()
        for row in zip(self._ids, self._keys, epochs, tokens, strict=True):
            yield ManifestRow(*row)

    @property
    def directory_uuid(self) -> str:
        """Of the capture directory that the samples were captured into; empty for an empty manifest."""
        return self._directory_uuid

    def key_of(self, sample_id: str) -> bytes:
        """The key of a sample's prompt. KeyError when the id is unknown."""
        return self._keys[self._row[sample_id]]

    def epoch_of(self, sample_id: str) -> str:
        """The epoch a sample was last asked for in. KeyError when the id is unknown."""
        epoch: str = self._table["epoch"][self._row[sample_id]].as_py()
        return epoch

    def loss_mask_of(self, sample_id: str) -> npt.NDArray[np.uint8] | None:
        """A sample's loss mask, uint8 ``[T]`` of 0 and 1, or None. KeyError when the id is unknown."""
        mask = self._table["loss_mask"][self._row[sample_id]]
        return mask.values.to_numpy() if mask.is_valid else None

    def sample_ids_of(self, key: bytes) -> list[str]:
        """The ids of all samples that share a prompt, in file order; empty when there is none."""
        return [self._ids[row] for row in self._rows_of.get(key, [])]

    def _with(self, samples: Sequence[Sample], epoch: str, directory_uuid: str) -> "Manifest":
        if self._directory_uuid not in ("", directory_uuid):
            raise MismatchError(
                f"the manifest belongs to the capture directory {self._directory_uuid}, the server writes to "
                f"{directory_uuid}; give --out of its own to each capture directory"
            )
        new = {sample.id: sample for sample in samples}
        for sample_id, sample in new.items():
            if sample_id in self and self.key_of(sample_id) != sample.key:
                raise UsageError(
                    f"sample id {sample_id!r} (line {sample.line}) stands for another prompt in the manifest; "
                    "give the sample an id of its own, take the tokenizer and chat template that were used before, "
                    "or use another directory"
                )
        kept = self._table.filter(pa.array([sample_id not in new for sample_id in self._ids], pa.bool_()))
        merged = pa.concat_tables([kept, _table(list(new.values()), epoch)])
        order = {sample_id: row for row, sample_id in enumerate(self._ids)}
        places = [order.setdefault(sample_id, len(order)) for sample_id in merged["sample_id"].to_pylist()]
        if places != sorted(places):
            merged = merged.take(pa.array(np.argsort(places, kind="stable")))
        return Manifest(merged.replace_schema_metadata({_DIRECTORY: directory_uuid.encode()}))

    def _write(self, directory: Path) -> None:
        table = self._table.replace_schema_metadata({_DIRECTORY: self._directory_uuid.encode()})
        drop_drafts(directory, MANIFEST_NAME)
        with whole_file(directory / MANIFEST_NAME) as file:
            # Small row groups bound what the writer holds of the masks.
            pq.write_table(table, file, compression="zstd", row_group_size=1024)


def _read(file: BinaryIO) -> pa.Table:
    """The table in a file that may be hostile. ValueError, IndexError or OSError when it is none, or far too large."""
    file_bytes = file.seek(0, os.SEEK_END)
    limit = max(_LEAST_LIMIT_BYTES, file_bytes * _DECODED_LIMIT)
    file.seek(max(file_bytes - 8, 0))
    if (footer_bytes := int.from_bytes(file.read(4), "little")) > _FOOTER_LIMIT_BYTES:
        raise ValueError(f"its footer has {footer_bytes} bytes, over the limit of {_FOOTER_LIMIT_BYTES}")
    found = pq.ParquetFile(file, thrift_container_size_limit=_LIST_LIMIT)
    if not found.schema_arrow.equals(_SCHEMA):
        raise ValueError(f"it is not a hashtap manifest: its columns are {found.schema_arrow.names}")
    groups = [found.metadata.row_group(number) for number in range(found.num_row_groups)]
    rows = sum(group.num_rows for group in groups)
    sizes = [size for group in groups for size in (group.total_byte_size, group.column(len(_SCHEMA) - 1).num_values)]
    if rows > file_bytes or sum(sizes) > limit or min(sizes, default=0) < 0:
        raise ValueError(f"its {rows} rows would be {sum(sizes)} bytes, of a file of {file_bytes}")
    # Strings as dictionaries, since few bytes may name a long one many times.
    table = pq.read_table(file, partitioning=None, read_dictionary=_STRINGS, thrift_container_size_limit=_LIST_LIMIT)
    chunks = [chunk for name in _STRINGS for chunk in table[name].chunks]
    named = sum(pc.sum(pc.binary_length(chunk.dictionary).take(chunk.indices)).as_py() or 0 for chunk in chunks)
    if named > limit:
        raise ValueError(f"its ids would be {named} bytes, of a file of {file_bytes}")
    return table.cast(_SCHEMA.with_metadata(table.schema.metadata))


def _table(samples: Sequence[Sample], epoch: str) -> pa.Table:
    columns = [
        [sample.id for sample in samples],
        [sample.key.hex() for sample in samples],
        [epoch] * len(samples),
        [sample.tokens for sample in samples],
        [sample.loss_mask for sample in samples],
    ]
    return pa.table([pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)], _SCHEMA)
