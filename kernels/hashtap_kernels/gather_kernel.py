"""The gather on the device: layer tensors of a batch in, finished frames out. ``gather`` launches it.

Nothing but pointers and compile-time constants is in the kernel's signature: every size, offset and address
comes from one small array on the device, the control array, so that no launch compiles anew and a
captured graph replays over moved frames. Elements move as 64-bit words, never as numbers.
"""

# Triton gives its own meaning to annotations.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from hashtap_kernels import layout, plan, proof
from hashtap_kernels.lanes import minus_bytes, pack_low_bytes, rotate_left

__all__ = ["gather_kernel"]

# The control array, int64: sizes and the facts of the launch, addresses, then one descriptor a frame.
FRAMES = tl.constexpr(0)
ROWS = tl.constexpr(1)
SEED0 = tl.constexpr(2)
SEED1 = tl.constexpr(3)
TABLE = tl.constexpr(4)
FORWARD = tl.constexpr(5)
INPUT_IDS = tl.constexpr(6)
POSITIONS = tl.constexpr(7)
SOURCES = tl.constexpr(8)  # addresses of up to 8 layers
STRIDES = tl.constexpr(16)  # their row strides in 8-byte words
DESCRIPTORS = tl.constexpr(24)

M0 = tl.constexpr(proof.M0)
M1 = tl.constexpr(proof.M1)
P0 = tl.constexpr(proof.P0)
P1 = tl.constexpr(proof.P1)
MAGIC = tl.constexpr(layout.MAGIC)
VERSION_WORD = tl.constexpr(layout.FRAME_VERSION | layout.HEADER_BYTES << 16)
HEADER_BYTES = tl.constexpr(layout.HEADER_BYTES)
HEADER_WORDS = tl.constexpr(layout.HEADER_BYTES // 8)
CHECKED_WORDS = tl.constexpr(layout.CHECKED_WORDS)
FRAME_TOKENS = tl.constexpr(layout.MAX_FRAME_TOKENS)
FRAME_WORDS_ALIGN = tl.constexpr(layout.FRAME_ALIGN // 8)
COLUMNS = tl.constexpr(plan.COLUMNS)
D_ROW = tl.constexpr(plan.ROW)
D_TOKENS = tl.constexpr(plan.TOKENS)
D_ROWS_BEFORE = tl.constexpr(plan.ROWS_BEFORE)
D_OFFSET = tl.constexpr(plan.OFFSET)
D_POSITIONS = tl.constexpr(plan.POSITIONS)
D_SERIAL = tl.constexpr(plan.SERIAL)
D_KEY0 = tl.constexpr(plan.KEY0)
D_KEY1 = tl.constexpr(plan.KEY1)


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 30)) * M0
    x = (x ^ (x >> 27)) * M1
    return x ^ (x >> 31)


@triton.jit
def _load_u64(pointer):
    return tl.load(pointer).to(tl.uint64, bitcast=True)


@triton.jit
def _frame_of(control, row, frames):
    """The last frame with no more than ``row`` captured rows before it."""
    low = row * 0
    high = low + frames
    while high - low > 1:
        middle = (low + high) // 2
        inside = tl.load(control + DESCRIPTORS + middle * COLUMNS + D_ROWS_BEFORE) <= row
        low = tl.where(inside, middle, low)
        high = tl.where(inside, high, middle)
    return low


@triton.jit
def _write_ends(control, out, frame, L: tl.constexpr, W: tl.constexpr, SHAPE_WORD: tl.constexpr, H: tl.constexpr):
    """Write a frame's header, its proof in it, and the padding behind its row sums."""
    descriptor = control + DESCRIPTORS + frame * COLUMNS
    row = tl.load(descriptor + D_ROW)
    tokens = tl.load(descriptor + D_TOKENS)
    header = tl.multiple_of((out + tl.load(descriptor + D_OFFSET)).to(tl.pointer_type(tl.uint64)), 16)

    input_ids = tl.load(control + INPUT_IDS).to(tl.pointer_type(tl.int64))
    positions = tl.load(control + POSITIONS).to(tl.pointer_type(tl.int64))
    token = tl.arange(0, FRAME_TOKENS)
    here = token < tokens
    token_id = tl.load(input_ids + row + token, mask=here, other=0).to(tl.uint64, bitcast=True)
    position = tl.load(positions + row + token, mask=here, other=0).to(tl.uint64, bitcast=True)
    x = (position << 32) | (token_id & 0xFFFFFFFF)
    nothing = tl.zeros((FRAME_TOKENS,), tl.uint64)
    proof0 = tl.sum(tl.where(here, _mix64(x + _load_u64(control + SEED0)), nothing), axis=0)
    proof1 = tl.sum(tl.where(here, _mix64((x * P1) ^ _load_u64(control + SEED1)), nothing), axis=0)

    word = tl.arange(0, HEADER_WORDS)
    values = tl.zeros((HEADER_WORDS,), tl.uint64)
    values = tl.where(word == 0, values + MAGIC, values)
    values = tl.where(word == 1, values + SHAPE_WORD, values)
    values = tl.where(word == 2, values + ((tokens.to(tl.uint64) << 32) | H), values)
    values = tl.where(word == 3, values + _load_u64(descriptor + D_POSITIONS), values)
    values = tl.where(word == 4, values + _load_u64(descriptor + D_SERIAL), values)
    values = tl.where(word == 5, values + _load_u64(descriptor + D_KEY0), values)
    values = tl.where(word == 6, values + _load_u64(descriptor + D_KEY1), values)
    values = tl.where(word == 7, values + proof0, values)
    values = tl.where(word == 8, values + proof1, values)
    values = tl.where(word == 9, values + _load_u64(control + TABLE), values)
    values = tl.where(word == 10, values + _load_u64(control + FORWARD), values)
    mixed = _mix64(values + word.to(tl.uint64) * P0 + 1)
    self_check = tl.sum(tl.where(word < CHECKED_WORDS, mixed, tl.zeros((HEADER_WORDS,), tl.uint64)), axis=0)
    values = tl.where(word == HEADER_WORDS - 1, values + self_check, values)
    tl.store(header + word, values)

    used = HEADER_WORDS + tokens * (L * W + 1)
    padding = used + tl.arange(0, FRAME_WORDS_ALIGN)
    size = (used + FRAME_WORDS_ALIGN - 1) // FRAME_WORDS_ALIGN * FRAME_WORDS_ALIGN
    tl.store(header + padding, tl.zeros((FRAME_WORDS_ALIGN,), tl.uint64), mask=padding < size)


@triton.jit
def gather_kernel(
    control,
    table,
    out,
    L: tl.constexpr,  # layers
    LP: tl.constexpr,  # next power of two of L
    W: tl.constexpr,  # 8-byte words of one layer's row
    H: tl.constexpr,
    SHAPE_WORD: tl.constexpr,  # header word 1
    PLANES: tl.constexpr,
    SOURCE_ALIGN: tl.constexpr,  # bytes that divide the address of every source row
    BW: tl.constexpr,  # words of each layer loaded at once
):
    """Write the frames that ``control`` describes into ``out``. Any number of programs may run it."""
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0)
    frames = tl.load(control + FRAMES)
    rows = tl.load(control + ROWS)

    frame = program
    while frame < frames:
        _write_ends(control, out, frame, L, W, SHAPE_WORD, H)
        frame += programs

    layer = tl.arange(0, LP)
    is_layer = layer < L
    source = tl.load(control + SOURCES + layer, mask=is_layer, other=0).to(tl.pointer_type(tl.uint64))
    stride = tl.load(control + STRIDES + layer, mask=is_layer, other=0)
    ROW_ALIGN: tl.constexpr = 16 if (L * W) % (4 if PLANES else 2) == 0 else 8

    row = program
    while row < rows:
        descriptor = control + DESCRIPTORS + _frame_of(control, row, frames) * COLUMNS
        tokens = tl.load(descriptor + D_TOKENS)
        i = row - tl.load(descriptor + D_ROWS_BEFORE)
        payload = out + tl.multiple_of(tl.load(descriptor + D_OFFSET), 16) + HEADER_BYTES
        values = tl.multiple_of(source + (tl.load(descriptor + D_ROW) + i) * stride, SOURCE_ALIGN)
        sums = tl.zeros((LP, BW), tl.uint64)
        for start in range(0, W, BW):
            word = start + tl.arange(0, BW)
            inside = is_layer[:, None] & (word < W)[None, :]
            at = layer[:, None] * W + word[None, :]
            x = tl.load(values[:, None] + word[None, :], mask=inside, other=0)
            sums += x
            if PLANES:
                rotated = rotate_left(x)
                reference = tl.load(table.to(tl.pointer_type(tl.uint32)) + at, mask=inside, other=0)
                exponents = tl.multiple_of(payload + i * (L * H), ROW_ALIGN)
                rests = tl.multiple_of(payload + (tokens + i) * (L * H), ROW_ALIGN)
                centred = minus_bytes(pack_low_bytes(rotated >> 8), reference)
                tl.store(exponents.to(tl.pointer_type(tl.uint32)) + at, centred, mask=inside)
                tl.store(rests.to(tl.pointer_type(tl.uint32)) + at, pack_low_bytes(rotated), mask=inside)
            else:
                elements = tl.multiple_of(payload + i * (L * W * 8), ROW_ALIGN)
                tl.store(elements.to(tl.pointer_type(tl.uint64)) + at, x, mask=inside)
        position = (_load_u64(descriptor + D_POSITIONS) & 0xFFFFFFFF) + i.to(tl.uint64)
        place = position * 8 + layer.to(tl.uint64) + 1
        mixed = _mix64(tl.sum(sums, axis=1) ^ (place * P0))
        row_sum = tl.sum(tl.where(is_layer, mixed, tl.zeros((LP,), tl.uint64)), axis=0)
        tl.store((payload + tokens * (L * W * 8)).to(tl.pointer_type(tl.uint64)) + i, row_sum)
        row += programs
