"""Captures as datasets for ``torch.utils.data``: by index, or as a stream of whole batches that can be gone on with.

    dataset = CaptureDataset("captures")
    loader = DataLoader(dataset, batch_size=8, shuffle=True, collate_fn=pad_right)

    stream = CaptureStream(dataset, max_tokens=16_384, collate=pack)
    loader = DataLoader(stream, batch_size=None, num_workers=4)
    for number in range(passes):
        stream.set_pass(number)
        for batch in loader:
            ...
            checkpoint["data"] = batch["state"]    # and later: stream.load_state_dict(checkpoint["data"])

Needs torch, and pyarrow where the directory has a manifest.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import distributed
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hashtap.collate import Batch, Sample, pad_right
from hashtap.errors import UsageError
from hashtap.reader import Capture, Reader

__all__ = ["Batch", "CaptureDataset", "CaptureStream", "Collate", "Sample", "as_sample", "largest_batch", "place"]

Collate = Callable[[Sequence[Sample]], Batch]


class CaptureDataset(Dataset[Sample]):
    """The captured samples of a directory, by index.

    They are those of the manifest, in its order and with its loss masks; those that are not captured are left out and
    counted in :attr:`missing`. Without a manifest they are all captures, each one sample. It may be sent to other
    processes; what is captured meanwhile, with other weights maybe, changes nothing.

    Args:
        directory: the capture directory.
        epoch: captures of these weights only.
        sample_ids: only these samples of the manifest, in this order.

    Raises:
        UsageError: when it is no capture directory, or samples are named and the manifest does not have them.
        MismatchError: when there are captures of several weights, or of several kinds, and none was chosen.
        FormatError: when a shard is damaged.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        epoch: str | None = None,
        sample_ids: Sequence[str] | None = None,
    ) -> None:
        self._reader: Reader | None = Reader(directory, epoch=epoch)
        if self._reader.shards:
            epoch = self._reader.facts.epoch  # raises where captures do not go together
        self._open = (Path(directory), epoch)
        self.missing = 0
        tokens = {entry.key: entry.total_tokens for entry in self._reader.entries}
        self._samples = self._from_manifest(tokens, sample_ids)
        self.lengths = np.array([tokens[key] for _, key, _ in self._samples], np.int64)
        """Tokens of each sample, int64 ``[N]``."""
        self.digest = xxhash.xxh3_64_hexdigest(b"".join(key for _, key, _ in self._samples))
        """Of the samples' keys in their order, 16 hex digits."""

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        """Sample ``index``. FormatError when its frames are damaged."""
        sample_id, key, mask = self._samples[index]
        return as_sample(sample_id, self.reader.by_key(key, self._open[1]), mask)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}

    @property
    def reader(self) -> Reader:
        """What it reads from; opened anew in every process that it is sent to."""
        if self._reader is None:
            path, epoch = self._open
            self._reader = Reader(path, epoch=epoch)
        return self._reader

    def _from_manifest(
        self, tokens: dict[bytes, int], sample_ids: Sequence[str] | None
    ) -> list[tuple[str, bytes, Any]]:
        """``(sample id, key, loss mask)`` of each sample."""
        path = self._open[0]
        if not (path / "manifest.parquet").exists():
            if sample_ids is not None:
                raise UsageError(f"there is no manifest in {path}, so its samples have no names: leave out sample_ids")
            return [(key.hex(), key, None) for key in tokens]
        from hashtap.manifest import Manifest

        manifest = Manifest.load(path)
        names = [row.sample_id for row in manifest] if sample_ids is None else list(sample_ids)
        found = []
        for name in names:
            if name not in manifest:
                raise UsageError(f"the manifest in {path} names no sample {name!r}")
            key = manifest.key_of(name)
            if key in tokens:
                found.append((name, key, manifest.loss_mask_of(name)))
        self.missing = len(names) - len(found)
        return found


class CaptureStream(IterableDataset[Batch]):
    """Whole batches in an order that follows from seed and pass alone.

    Ranks take turns at the batches of a pass, and so do the workers of each rank: with ``DataLoader(stream,
    batch_size=None)`` a rank sees the same batches in the same order whatever the number of workers. So that no rank
    waits for another, the last batches of a pass, fewer than there are ranks, are left out.

    Each batch carries ``batch["state"]``: :meth:`load_state_dict` with it goes on right after that batch, whatever the
    number of workers, in a stream of the same order: of the same samples and ranks, batched and shuffled alike.

    Args:
        dataset: what it takes samples from.
        batch_size: samples of a batch; or
        max_tokens: as many samples as fit, one behind the other. A longer sample is a batch of its own.
        collate: makes a batch of samples.
        shuffle: a new order in each pass, or that of the dataset.
        seed: of the orders.
        rank: of this process, of ``world_size``; ``torch.distributed``'s when it is initialised, else 0 of 1.

    Raises:
        UsageError: when not exactly one of ``batch_size`` and ``max_tokens`` is given, or one is out of range.
    """

    def __init__(
        self,
        dataset: CaptureDataset,
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        collate: Collate = pad_right,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        largest_batch(batch_size, max_tokens)
        self._rank, self._world_size = place(rank, world_size)
        self._dataset = dataset
        self._batch_size, self._max_tokens = batch_size, max_tokens
        self._collate = collate
        self._shuffle, self._seed = shuffle, seed
        # All that decides which batches each rank gets.
        self._order = {
            "samples": len(dataset),
            "digest": dataset.digest,
            "batch_size": batch_size,
            "max_tokens": max_tokens,
            "world_size": self._world_size,
            "shuffle": shuffle,
            "seed": seed if shuffle else None,
        }
        # The pass, and the batches of it that this rank has had. Shared, so that workers that live on see them change.
        self._position = torch.zeros(2, dtype=torch.int64)
        self._position.share_memory_()  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        """Batches that this rank gets in the present pass, from its beginning."""
        return len(self._batches(int(self._position[0]))) // self._world_size

    def __iter__(self) -> Iterator[Batch]:
        number, first = self._position.tolist()
        worker = get_worker_info()
        workers, mine = (1, 0) if worker is None else (worker.num_workers, worker.id)
        batches = self._batches(number)
        rank_batches = range(self._rank, len(batches) // self._world_size * self._world_size, self._world_size)
        for at in range(first + mine, len(rank_batches), workers):
            samples = [self._dataset[index] for index in batches[rank_batches[at]]]
            yield {**self._collate(samples), "state": {"pass": number, "batches": at + 1, **self._order}}

    def set_pass(self, number: int) -> None:
        """Begin pass ``number``; call it before each. The pass that :meth:`load_state_dict` goes on with goes on."""
        if number != int(self._position[0]):
            self._position.copy_(torch.tensor([number, 0]))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind the batch that carried ``state``, until the next pass.

        Raises:
            UsageError: when it is of another order, where it would skip samples and repeat others.
        """
        others = [name for name in self._order if state.get(name) != self._order[name]]
        if others:
            differ = ", ".join(f"{name} {state.get(name)!r}, here {self._order[name]!r}" for name in others)
            raise UsageError(
                f"the state is of another order of batches: {differ}. Make the stream as it was, samples sealed since "
                f"left out with sample_ids=, or begin the next pass with set_pass({state['pass'] + 1})"
            )
        self._position.copy_(torch.tensor([state["pass"], state["batches"]]))

    def _batches(self, number: int) -> list[list[int]]:
        """Indices of the samples of each batch of a pass, of all ranks."""
        count = len(self._dataset)
        order = np.random.default_rng([self._seed, number]).permutation(count) if self._shuffle else np.arange(count)
        if self._batch_size is not None:
            return [order[at : at + self._batch_size].tolist() for at in range(0, count, self._batch_size)]
        assert self._max_tokens is not None
        batches: list[list[int]] = []
        room = 0
        for index in order.tolist():
            length = int(self._dataset.lengths[index])
            if not batches or length > room:
                batches.append([])
                room = self._max_tokens
            batches[-1].append(index)
            room -= length
        return batches


def as_sample(sample_id: str, capture: Capture, mask: npt.NDArray[np.uint8] | None) -> Sample:
    """A capture as a sample; without a mask ``[T]`` all of it counts in the loss. FormatError when it is damaged."""
    return {
        "sample_id": sample_id,
        "input_ids": torch.from_numpy(capture.token_ids),
        "hidden_states": capture.tensor(),
        "loss_mask": torch.ones(len(capture), dtype=torch.bool) if mask is None else torch.from_numpy(mask != 0),
    }


def largest_batch(batch_size: int | None, max_tokens: int | None) -> int:
    """The one of both that is given: no batch has more samples. UsageError when it is not one, or out of range."""
    if (batch_size is None) == (max_tokens is None):
        raise UsageError("give either batch_size or max_tokens, not both")
    size = max_tokens if batch_size is None else batch_size
    if size is None or size < 1:
        raise UsageError(f"a batch of {size} is empty: give at least 1")
    return size


def place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Rank and number of ranks, those of ``torch.distributed`` unless given. UsageError when they do not fit."""
    running = distributed.is_available() and distributed.is_initialized()
    rank = rank if rank is not None else distributed.get_rank() if running else 0
    world_size = world_size if world_size is not None else distributed.get_world_size() if running else 1
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} is not one of {world_size}")
    return rank, world_size
