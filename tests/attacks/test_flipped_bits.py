"""No bit of a shard can change without being noticed."""

from pathlib import Path

import numpy as np
import pytest
from tests.capture.build import Host

from hashtap.errors import FormatError
from hashtap.reader import Reader
from hashtap.verify import verify
from hashtap_kernels.layout import Geometry

GEOMETRY = Geometry(2, 16)


def read_all(path: Path) -> None:
    reader = Reader(path)
    for shard in reader.shards:
        for row in range(len(shard.index)):
            reader.frame(shard, row)


@pytest.mark.parametrize("table", [None, np.full((2, 16), 120, np.uint8)], ids=["raw", "planes"])
def test_a_flipped_bit_at_every_byte(tmp_path: Path, table: object) -> None:
    """One bit of every byte of the file: header, its padding, frames, index, records, trailer."""
    with Host(tmp_path, GEOMETRY, threads=1, table=table) as host:  # type: ignore[arg-type]
        host.capture([[1, 2, 3], [4] * 60])
    (path,) = host.directory.shards()
    size = path.stat().st_size
    found = set()
    with path.open("r+b", buffering=0) as file:

        def flip(position: int) -> None:
            file.seek(position)
            (byte,) = file.read(1)
            file.seek(position)
            file.write(bytes([byte ^ 1 << position * 5 % 8]))

        for position in range(size):
            flip(position)
            try:
                read_all(tmp_path)
            except FormatError:
                found.add(position)
            flip(position)
    assert size > 5000
    assert set(range(size)) - found == set()
    assert verify(tmp_path).ok
