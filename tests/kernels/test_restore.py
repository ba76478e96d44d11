"""Planes back to elements, in Triton's interpreter: bit for bit, and nothing around the output is touched."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from batches import MARGIN, SEED, Request, make_batch, make_table, margins_untouched, poisoned
from hypothesis import given, settings
from hypothesis import strategies as st

from hashtap_kernels.gather import gather
from hashtap_kernels.layout import Dtype, Geometry
from hashtap_kernels.restore import restore, restore_reference

Restore = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
RESTORES = [restore, restore_reference]


def planes(elements: np.ndarray, table: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """The two planes of uint16 elements, by the definition."""
    rotated = (elements.astype(np.uint32) << 1 | elements >> 15) & 0xFFFF
    exponents = ((rotated >> 8) - table).astype(np.uint8)
    return torch.from_numpy(exponents), torch.from_numpy((rotated & 0xFF).astype(np.uint8))


def check(function: Restore, elements: np.ndarray, table: np.ndarray, dtype: torch.dtype = torch.bfloat16) -> None:
    whole, out = poisoned(elements.nbytes)
    target = torch.from_numpy(whole)[MARGIN : MARGIN + elements.nbytes].view(dtype).view(elements.shape)
    function(*planes(elements, table), torch.from_numpy(table), target)
    assert margins_untouched(whole)
    assert out.tobytes() == elements.tobytes()


@pytest.mark.parametrize("function", RESTORES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_bit_pattern_comes_back(function: Restore, dtype: torch.dtype) -> None:
    elements = np.arange(1 << 16, dtype=np.uint16).reshape(8, 2, 4096)
    check(function, elements, np.random.default_rng(0).integers(0, 256, (2, 4096), np.uint8), dtype)


@pytest.mark.parametrize("function", RESTORES)
@settings(deadline=None, max_examples=20)
@given(st.integers(1, 9), st.integers(1, 8), st.integers(1, 90).map(lambda n: 8 * n), st.integers(0, 1 << 16))
def test_any_shape(function: Restore, n: int, layers: int, hidden: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    elements = rng.integers(0, 1 << 16, (n, layers, hidden), np.uint16)
    check(function, elements, rng.integers(0, 256, (layers, hidden), np.uint8))


@pytest.mark.parametrize(("layers", "hidden"), [(4, 7168), (1, 576), (3, 2056), (8, 16384)])
def test_long_rows(layers: int, hidden: int) -> None:
    elements = np.random.default_rng(2).integers(0, 1 << 16, (2, layers, hidden), np.uint16)
    check(restore, elements, np.full((layers, hidden), 127, np.uint8))


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.FP16])
def test_what_the_gather_wrote_comes_back(dtype: Dtype) -> None:
    geometry, n = Geometry(3, 40, dtype), 11
    batch = make_batch(geometry, [Request(n)])
    table = make_table(geometry)
    frame = torch.zeros(batch.plan.bytes, dtype=torch.uint8)
    arguments = (batch.sources, batch.input_ids, batch.positions, batch.plan, frame)
    gather(*arguments, geometry=geometry, seed=SEED, table=table, forward=0)
    exponents, rests = frame[128 : 128 + n * geometry.row_bytes].clone().view(2, n, 3, 40)
    out = torch.empty((n, 3, 40), dtype=batch.sources[0].dtype)
    restore(exponents.clone(), rests.clone(), torch.from_numpy(table), out)
    expected = torch.stack([source[:n] for source in batch.sources], dim=1)
    assert torch.equal(out.view(torch.uint16), expected.view(torch.uint16))


@pytest.mark.parametrize("function", RESTORES)
def test_no_rows(function: Restore) -> None:
    nothing = torch.empty((0, 2, 16), dtype=torch.uint8)
    function(nothing, nothing, torch.zeros((2, 16), dtype=torch.uint8), torch.empty((0, 2, 16), dtype=torch.bfloat16))


def u8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


GOOD = {"exponents": u8(3, 2, 16), "rests": u8(3, 2, 16), "table": u8(2, 16), "out": u8(3, 2, 32).view(torch.bfloat16)}


@pytest.mark.parametrize("function", RESTORES)
@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("out", torch.zeros(3, 2, 16), TypeError, "the output is torch.float32"),
        ("out", torch.zeros(3, 32).half(), ValueError, "must be .n, L, H."),
        ("out", torch.zeros(3, 2, 12).half(), ValueError, "H a multiple of 8"),
        ("exponents", u8(3, 2, 24), ValueError, "the exponent plane has shape"),
        ("rests", u8(2, 2, 16), ValueError, "the rest plane has shape"),
        ("rests", u8(3, 2, 16).view(torch.int8), TypeError, "the rest plane is torch.int8"),
        ("table", u8(1, 16), ValueError, "the table has shape"),
        ("rests", u8(3, 2, 32)[..., ::2], ValueError, "the rest plane must be contiguous"),
        ("exponents", u8(104)[8:].view(3, 2, 16), ValueError, "the exponent plane must be contiguous and start at"),
    ],
)
def test_refused(function: Restore, name: str, value: torch.Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        function(**GOOD | {name: value})
