"""Takes a sealed shard apart and seals it again with something changed and every checksum right.

What a bug in a writer could have done; a flipped byte on a disk is simpler.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from hashtap_kernels.layout import HEADER, HEADER_BYTES
from hashtap_kernels.proof import header_check


class Tampered:
    """The parts of a shard, to be changed in place, then :meth:`reseal`.

    Attributes:
        header: the JSON header.
        frames: the stored frames.
        index: uint64 ``[F, 8]``; offsets, sizes and sums are recomputed.
        records: uint64 ``[R, 12]``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        data = path.read_bytes()
        self.header_bytes = int.from_bytes(data[:8], "little")
        self.header = json.loads(data[8 : 8 + self.header_bytes])
        body = data[8 + self.header_bytes :]
        parts = {
            name: np.frombuffer(body[slice(*self.header[name]["data_offsets"])], np.uint8).copy()
            for name in ("frames", "index", "records")
        }
        self.index = parts["index"].view("<u8").reshape(-1, 8)
        self.records = parts["records"].view("<u8").reshape(-1, 12)
        self.frames = [parts["frames"][offset : offset + size].copy() for offset, size in self.index[:, :2].tolist()]

    def fields(self, frame: int) -> npt.NDArray[np.void]:
        """A frame's header, to be changed in place."""
        return self.frames[frame][:HEADER_BYTES].view(HEADER)[0:1]

    def of_serial(self, serial: int) -> list[int]:
        """The frames of a pass."""
        return [int(row) for row in np.flatnonzero(self.index[:, 3] == serial)]

    def token_ids(self, frame: int) -> npt.NDArray[np.int64]:
        """A frame's token ids, to be changed in place. The frame must be RAW and not compressed, or end unpadded."""
        fields = self.fields(frame)[0]
        n, layers, hidden = int(fields["tokens"]), int(fields["layers"]), int(fields["hidden"])
        rest = n * layers * hidden if fields["payload"] == 1 else 0
        start = HEADER_BYTES + int(fields["coded_bytes"]) + rest + 8 * n
        ids: npt.NDArray[np.int64] = self.frames[frame][start : start + 8 * n].view("<i8")
        return ids

    def reseal(self, *, checks: Iterable[str] = ("header", "size", "sum", "trailer")) -> None:
        """Write it back, with the ``checks`` recomputed."""
        checks = set(checks)
        offset = 0
        for row, frame in enumerate(self.frames):
            fields = self.fields(row)
            if "header" in checks:
                fields["self_check"] = header_check(frame[:HEADER_BYTES].view("<u8"))
            if "size" in checks:
                fields["stored_bytes"] = len(frame)
            if "sum" in checks:
                fields["stored_sum"] = 0
                fields["stored_sum"] = xxhash.xxh3_64_intdigest(frame.tobytes())
                self.index[row, 2] = fields["stored_sum"][0]
            self.index[row, :2] = offset, len(frame)
            offset += len(frame)
        index, records = self.index.tobytes(), self.records.tobytes()
        begin = 0
        shapes = {"frames": [offset], "index": [len(self.index), 8], "records": [len(self.records), 12]}
        for name, size in (("frames", offset), ("index", len(index)), ("records", len(records)), ("trailer", 16)):
            self.header[name]["data_offsets"] = [begin, begin + size]
            self.header[name]["shape"] = shapes.get(name, [2])
            begin += size
        text = json.dumps(self.header).encode().ljust(self.header_bytes)
        header = len(text).to_bytes(8, "little") + text
        trailer = xxhash.xxh3_128_intdigest(header + index + records).to_bytes(16, "little")
        if "trailer" not in checks:
            trailer = self.path.read_bytes()[-16:]
        frames = b"".join(frame.tobytes() for frame in self.frames)
        self.path.write_bytes(header + frames + index + records + trailer)
