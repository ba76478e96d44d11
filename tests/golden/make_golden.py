"""Writes the golden files: ``python -m tests.golden.make_golden`` from the root of the repository.

    captures/        bfloat16: RAW and PLANES frames, chunks, a record over two shards, waste, two epochs, a salt
    types/           one shard for each other element type
    shared/          a record that shares its beginning with another
    expected.json    what a reader must find in each

Everything follows from the numbers here, so that a second run gives the same files (where libzstd is the same version;
the contents are the same in any case).
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tests.capture.build import Host, States
from tests.capture.tamper import Tampered

from hashtap.identity import prompt_key
from hashtap_kernels.layout import Dtype, Geometry
from hashtap_kernels.proof import mix64

HERE = Path(__file__).parent
SALT = b'{"lora":"ad1"}'
GEOMETRY = Geometry(4, 24)


def states(token_ids: Sequence[int], geometry: Geometry = GEOMETRY) -> States:
    """Made-up states ``[T, L, H]``: bits that follow from position, layer, channel and token."""
    shape = (len(token_ids), geometry.layers, geometry.hidden)
    position, layer, channel = np.indices(shape, np.uint64)
    token = np.array(token_ids, np.uint64).reshape(-1, 1, 1)
    noise = mix64(((token * np.uint64(4096) + position) * np.uint64(8) + layer) * np.uint64(65536) + channel)
    if geometry.dtype is Dtype.FP32:
        return noise.astype(np.uint32).view(np.float32)
    if geometry.dtype is Dtype.FP8_E4M3:
        return noise.astype(np.uint8)
    # An exponent near the channel's own, as real states have it; mantissa and sign are noise.
    exponent = np.uint64(120) + channel % np.uint64(7) + (noise >> np.uint64(60)) // np.uint64(5)
    bits = (noise & np.uint64(0x807F) | exponent << np.uint64(7)).astype(np.uint16)
    return bits.view(np.float16) if geometry.dtype is Dtype.FP16 else bits


def send(host: Host, prompts: Sequence[Sequence[int]], chunk: int = 1 << 30, salt: bytes = b"") -> None:
    """Capture prompts one after the other, each in chunks."""
    for ids in prompts:
        record, rows = host.record(ids, salt), states(ids, host.geometry)
        for first in range(0, len(ids), chunk):
            host.forward([(record, rows, first, min(chunk, len(ids) - first))])


def host(
    path: Path, geometry: Geometry = GEOMETRY, *, epoch: str = "weights-1", writer: int = 1, **options: Any
) -> Host:
    changes = {"epoch": epoch, "writer": f"{writer:08x}" + "0" * 24, "model": "golden"}
    return Host(path, geometry, changes=changes, threads=1, **options)


def begin(name: str, number: int) -> Path:
    """An empty capture directory with a uuid of its own."""
    path = HERE / name
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    facts = {"format": 1, "uuid": f"00000000-0000-4000-8000-{number:012d}", "created": "2026-01-01T00:00:00+00:00"}
    (path / "hashtap.json").write_text(json.dumps(facts) + "\n")
    return path


def end(path: Path) -> None:
    """Give the shards names without this machine's host and process id."""
    for shard in sorted(path.glob("*.safetensors")):
        *_, rank, run, number = shard.stem.split("-")
        shard.rename(path / f"hashtap-golden-1-{rank}-{run}-{number}.safetensors")


def captures() -> dict[str, Any]:
    path = begin("captures", 1)
    first = [[1, 2, 3], list(range(300)), [7]]
    later = [list(range(100, 140)), [5] * 257]
    table = ((states(range(300)) >> 7) & 0xFF).min(axis=0).astype(np.uint8)
    with host(path) as raw:
        send(raw, first)
    with host(path, writer=2, table=table, shard_bytes=24_000) as planes:
        send(planes, later, chunk=100)
        aborted = planes.record(list(range(50)))
        planes.forward([(aborted, states(range(50)), 0, 20)])
        send(planes, [[1, 2, 3], [9, 9]])
    with host(path, writer=3, epoch="weights-2") as second:
        send(second, [[1, 2, 3]])
        send(second, [[1, 2, 3]], salt=SALT)
    end(path)
    found = [expected(ids) for ids in (*first, *later, [9, 9])]
    return {"records": [*found, expected([1, 2, 3], "weights-2"), expected([1, 2, 3], "weights-2", SALT)]}


def types() -> dict[str, Any]:
    path = begin("types", 2)
    records = []
    for number, dtype in enumerate((Dtype.FP16, Dtype.FP32, Dtype.FP8_E4M3)):
        geometry = Geometry(2, 16, dtype)
        ids = [number, 1, 2, 3, 4]
        table = np.full((2, 16), 240, np.uint8) if dtype is Dtype.FP16 else None
        with host(path, geometry, writer=number + 1, table=table) as writer:
            send(writer, [ids])
        records.append(expected(ids, geometry=geometry))
    end(path)
    return {"records": records}


def shared() -> dict[str, Any]:
    """No writer makes this: the second record's own copy of the shared rows is taken out of its shard."""
    path = begin("shared", 3)
    donor, heir = list(range(300)), [*range(280), 9, 9]
    rows = np.concatenate([states(donor)[:280], states(heir)[280:]])
    with host(path, codec="none") as writer:
        send(writer, [donor])
        writer.writer.drain()
        record = writer.record(heir)
        writer.forward([(record, rows, 0, 280)])
        writer.forward([(record, rows, 280, 2)])
    end(path)
    tampered = Tampered(sorted(path.glob("*.safetensors"))[1])
    tampered.frames, tampered.index = tampered.frames[2:], tampered.index[2:]
    tampered.records[0, 6] = 280
    tampered.records[0, 7:9] = np.frombuffer(prompt_key(donor), "<u8")
    tampered.reseal()
    return {"records": [expected(donor), {**expected(heir), "sha256": hashlib.sha256(rows.tobytes()).hexdigest()}]}


def expected(
    token_ids: Sequence[int], epoch: str = "weights-1", salt: bytes = b"", geometry: Geometry = GEOMETRY
) -> dict[str, Any]:
    rows = states(token_ids, geometry)
    return {
        "key": prompt_key(token_ids, salt).hex(),
        "epoch": epoch,
        "salt": salt.decode(),
        "token_ids": list(token_ids),
        "shape": list(rows.shape),
        "sha256": hashlib.sha256(rows.tobytes()).hexdigest(),
    }


def main() -> None:
    found = {"captures": captures(), "types": types(), "shared": shared()}
    (HERE / "expected.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
