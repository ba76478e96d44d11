"""Arguments that a kernel would read or write wrongly are refused before anything is touched."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from batches import POISON, Request, make_batch, make_table

from hashtap_kernels.layout import Dtype, Geometry
from hashtap_kernels.reference import gather_reference

GEOMETRY = Geometry(2, 16)


def arguments(geometry: Geometry = GEOMETRY) -> dict[str, Any]:
    batch = make_batch(geometry, [Request(3), Request(4)], pad_rows=0)
    return {
        "sources": batch.sources,
        "input_ids": batch.input_ids,
        "positions": batch.positions,
        "plan": batch.plan,
        "out": np.full(batch.plan.bytes, POISON, np.uint8),
        "geometry": geometry,
        "seed": (1, 2),
        "table": None,
        "forward": 0,
    }


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


GOOD = arguments()
SIZE = GOOD["plan"].bytes

CASES: dict[str, tuple[str, Any, type[Exception], str]] = {
    "layer missing": ("sources", [bf16(7, 16)], ValueError, "1 sources for 2 layers"),
    "other dtype": ("sources", [bf16(7, 16), bf16(7, 16).half()], TypeError, "source 1 is torch.float16"),
    "other hidden size": ("sources", [bf16(7, 16), bf16(7, 24)], ValueError, "source 1 has shape (7, 24)"),
    "not a matrix": ("sources", [bf16(7, 16), bf16(7 * 16)], ValueError, "source 1 has shape (112,)"),
    "stride along a row": ("sources", [bf16(16, 7).T, bf16(7, 16)], ValueError, "stride 1 along a row"),
    "row stride": ("sources", [bf16(7, 20)[:, :16], bf16(7, 16)], ValueError, "multiples of 16"),
    "address": ("sources", [bf16(7, 24)[:, 4:20], bf16(7, 16)], ValueError, "multiples of 16"),
    "too few rows": ("sources", [bf16(7, 16), bf16(6, 16)], ValueError, "source 1 has 6 rows, the plan reads 7"),
    "int32 ids": ("input_ids", torch.zeros(7, dtype=torch.int32), TypeError, "input_ids are torch.int32"),
    "strided ids": ("input_ids", torch.zeros(14, dtype=torch.int64)[::2], ValueError, "contiguous"),
    "too few ids": ("input_ids", torch.zeros(6, dtype=torch.int64), ValueError, "6 entries, the plan reads 7"),
    "rope positions": ("positions", torch.zeros(3, 7, dtype=torch.int64), ValueError, "one-dimensional"),
    "int32 positions": ("positions", torch.zeros(7, dtype=torch.int32), TypeError, "positions are torch.int32"),
    "short output": ("out", np.empty(SIZE - 1, np.uint8), ValueError, f"{SIZE - 1} bytes, the plan writes {SIZE}"),
    "output of words": ("out", np.empty(SIZE, np.int64), TypeError, "must be uint8"),
    "output of rows": ("out", np.empty((2, SIZE), np.uint8), ValueError, "one-dimensional"),
    "strided output": ("out", np.empty(2 * SIZE, np.uint8)[::2], ValueError, "contiguous"),
    "misplaced output": ("out", np.empty(SIZE + 8, np.uint8)[8:], ValueError, "multiple of 16"),
    "read-only output": ("out", np.frombuffer(bytes(SIZE + 64), np.uint8), ValueError, "read-only|multiple of 16"),
    "table of words": ("table", np.zeros((2, 16), np.int64), TypeError, "must be uint8"),
    "table of another shape": ("table", np.zeros((16, 2), np.uint8), ValueError, "shape (16, 2), not (2, 16)"),
    "plan of another geometry": ("geometry", Geometry(2, 24), ValueError, "not laid out for"),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_untouched(case: str) -> None:
    name, value, error, message = CASES[case]
    given = arguments() | {name: value}
    pattern = message if "|" in message else re.escape(message)
    with pytest.raises(error, match=pattern):
        gather_reference(**given)
    assert name == "out" or (given["out"] == POISON).all()


@pytest.mark.parametrize("dtype", [Dtype.FP32, Dtype.FP8_E4M3])
def test_wide_and_narrow_elements_have_no_planes(dtype: Dtype) -> None:
    geometry = Geometry(2, 16, dtype)
    with pytest.raises(TypeError, match=f"{dtype.name} has no planes"):
        gather_reference(**arguments(geometry) | {"table": make_table(geometry)})


def test_tensors_of_different_devices_are_refused() -> None:
    given = arguments()
    with pytest.raises(ValueError, match="different devices"):
        gather_reference(**given | {"positions": given["positions"].to("meta")})
    with pytest.raises(ValueError, match="the output lies on meta, the sources on cpu"):
        gather_reference(**given | {"out": torch.empty(SIZE, dtype=torch.uint8, device="meta")})


def test_a_device_cannot_write_to_pageable_memory() -> None:
    given = arguments()
    elsewhere = {name: given[name].to("meta") for name in ("input_ids", "positions")}
    elsewhere["sources"] = [source.to("meta") for source in given["sources"]]
    for out in (given["out"], torch.from_numpy(given["out"])):
        with pytest.raises(ValueError, match="pageable memory: pin it, or gather into a tensor on meta"):
            gather_reference(**given | elsewhere | {"out": out})


def test_the_good_arguments_are_good() -> None:
    gather_reference(**GOOD)
    assert not (GOOD["out"] == POISON).all()
