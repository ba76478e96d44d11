"""One captured prompt, as a reader hands it out."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hashtap.catalog import Entry, Piece
from hashtap.errors import FormatError
from hashtap.facts import DTYPE_NAME
from hashtap.frame import NUMPY_DTYPE, StoredFrame
from hashtap.restored import Restorer

if TYPE_CHECKING:
    import torch

    from hashtap.reader import Reader

__all__ = ["Capture"]


class Capture:
    """One captured prompt. Its arrays are read when they are first asked for, and kept.

    Attributes:
        key: the prompt's key, 16 bytes.
        epoch: which weights made it.
        facts: of the shard that lists it.
        shard: that shard's path.
        serial: the pass of its writer that made it; it grows in the order of arrival.
    """

    def __init__(self, reader: "Reader", entry: Entry) -> None:
        self._reader = reader
        self._entry = entry
        self.key = entry.key
        self.epoch = entry.epoch
        self.facts = entry.shard.facts
        self.shard = entry.shard.path
        self.serial = entry.serial
        # Not functools.cached_property: Python 3.11's holds a lock, one for all captures, while it reads.
        self._token_ids: npt.NDArray[np.int64] | None = None
        self._hidden_states: npt.NDArray[Any] | None = None

    def __repr__(self) -> str:
        layers, hidden = self.facts.geometry.layers, self.facts.geometry.hidden
        return f"<Capture {self.key.hex()}: {self.dtype} [{len(self)}, {layers}, {hidden}]>"

    def __len__(self) -> int:
        """Tokens of the prompt, T."""
        return self._entry.total_tokens

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Boundaries of the auxiliary layers, in the order of the layer axis; the final state comes after them."""
        return self.facts.boundaries

    @property
    def final_norm(self) -> str:
        """Whether the final state was taken after ("post") or before ("pre") the final norm."""
        return self.facts.final_norm

    @property
    def dtype(self) -> str:
        """The element type: bfloat16, float16, float32 or float8_e4m3fn."""
        return DTYPE_NAME[self.facts.geometry.dtype]

    @property
    def token_ids(self) -> npt.NDArray[np.int64]:
        """The prompt's token ids, int64 ``[T]``.

        Raises:
            FormatError: when frames are damaged, or it does not fit this machine's memory.
        """
        if self._token_ids is None:
            ids = self._room((len(self),), np.int64)
            for piece, frame in self._frames():
                ids[piece.start : piece.stop] = frame.token_ids[: piece.stop - piece.start]
            self._token_ids = ids
        return self._token_ids

    @property
    def hidden_states(self) -> npt.NDArray[Any]:
        """The states ``[T, L, H]``: position, layer (the boundaries, then the final state), channel.

        NumPy has no bfloat16 and no float8: those are bit patterns, uint16 and uint8. See :attr:`dtype`.

        Raises:
            FormatError: when frames are damaged, or it does not fit this machine's memory.
        """
        if self._hidden_states is None:
            geometry = self.facts.geometry
            states = self._room((len(self), geometry.layers, geometry.hidden), NUMPY_DTYPE[geometry.dtype])
            self.read_into(states)
            self._hidden_states = states
        return self._hidden_states

    def read_into(self, out: npt.NDArray[Any]) -> None:
        """Write :attr:`hidden_states` to ``out``, of their shape and dtype; nothing is kept. Raises as they do."""
        for piece, frame in self._frames():
            table = self._reader.table(piece.shard, frame.header.table) if frame.header.table else None
            rows = piece.stop - piece.start
            try:
                if rows == frame.header.tokens:
                    frame.values(out[piece.start : piece.stop], table)
                else:
                    whole = np.empty((frame.header.tokens, *out.shape[1:]), out.dtype)
                    frame.values(whole, table)
                    out[piece.start : piece.stop] = whole[:rows]
            except FormatError as error:
                raise self._reader.damage(piece.shard, piece.row, error) from None

    def restore_into(self, out: "torch.Tensor") -> None:
        """Write the states to ``out`` ``[T, L, H]``, contiguous, of their own dtype; the work is done on its device.

        Raises:
            FormatError: when frames are damaged.
            ValueError: when ``out`` lies on the CPU, the states in planes, and Triton compiles its kernels.
        """
        restorer = Restorer(out, self.facts.geometry)
        for piece, frame in self._frames():
            table = self._reader.table(piece.shard, frame.header.table) if frame.header.table else None
            try:
                restorer.put(frame, piece.start, piece.stop - piece.start, table)
            except FormatError as error:
                raise self._reader.damage(piece.shard, piece.row, error) from None

    def tensor(self, device: "str | torch.device" = "cpu") -> "torch.Tensor":
        """The states as a torch tensor ``[T, L, H]`` of their own dtype. Needs torch, and triton for a CUDA device.

        On a CUDA device they are put together there, :attr:`hidden_states` are neither made nor kept.

        Raises:
            FormatError: when frames are damaged.
        """
        import torch

        geometry, dtype = self.facts.geometry, getattr(torch, self.dtype)
        if torch.device(device).type == "cuda":
            states = torch.empty((len(self), geometry.layers, geometry.hidden), dtype=dtype, device=device)
            self.restore_into(states)
            return states
        bits = {1: np.uint8, 2: np.int16, 4: np.int32}[geometry.dtype.element_bytes]
        return torch.from_numpy(self.hidden_states.view(bits)).view(dtype).to(device)

    def _room(self, shape: tuple[int, ...], dtype: type[np.generic]) -> npt.NDArray[Any]:
        try:
            return np.empty(shape, dtype)
        except MemoryError:
            raise FormatError(f"{self!r} in {self.shard} does not fit this machine's memory") from None

    def _frames(self) -> Iterator[tuple[Piece, StoredFrame]]:
        for piece in self._reader.pieces(self._entry):
            frame = self._reader.frame(piece.shard, piece.row)
            owner = frame.header.key == self.key and frame.header.total_tokens == len(self)
            if not owner and piece.start >= self._entry.shared_tokens:
                error = FormatError(f"a frame of {frame.header.key.hex()} lies where {self.key.hex()} belongs")
                raise self._reader.damage(piece.shard, piece.row, error)
            yield piece, frame
