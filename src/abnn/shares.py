"""Every process's share of the training data: the rows of every batch that are its own."""

from __future__ import annotations

import copy
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from abnn.artifact import tensor_bytes
from abnn.batches import split
from abnn.order import random_states, samplers, seed_all, set_random_states

# A batch of this process, and what must be the same on all of them: a checksum of the whole batch.
Piece = tuple[Any, int]


def share(loader: Iterable[Any], rank: int, size: int) -> Iterable[Piece]:
    """The share of a loader that belongs to one of `size` processes.

    A `DataLoader` of a map-style dataset loads only the rows that are its own; one with a
    `DistributedSampler` is a share already; anything else is iterated by all, and its rows cut.

    >>> batches = [(torch.arange(5.0), torch.arange(5))]
    >>> [batch for batch, _ in share(batches, rank=1, size=2)]
    [(tensor([2., 3., 4.]), tensor([2, 3, 4]))]
    """
    if size == 1 or is_share(loader):
        return _Whole(loader)
    if _loads_by_index(loader):
        return _Loaded(loader, rank, size)
    return _Cut(loader, rank, size)


def is_share(loader: Iterable[Any]) -> bool:
    """Whether a loader gives every process other data by itself.

    >>> is_share([])
    False
    """
    return any(isinstance(sampler, DistributedSampler) for sampler in samplers(loader))


def bounds(rows: int, rank: int, size: int) -> slice:
    """The rows of a batch that belong to one process.

    >>> [bounds(5, rank, 2) for rank in range(2)]
    [slice(0, 2, None), slice(2, 5, None)]
    """
    if rows < size:
        raise ValueError(
            f"A batch has {rows} {'row' if rows == 1 else 'rows'}, fewer than the {size} "
            "processes that share it; use larger batches, DataLoader(..., drop_last=True), or "
            "split='modes'."
        )
    return slice(rows * rank // size, rows * (rank + 1) // size)


def check_last_batch(loader: Iterable[Any], size: int) -> None:
    """Say at the start of a fit that the last batch of an epoch will be too small to share."""
    rows, data = getattr(loader, "batch_size", None), getattr(loader, "dataset", None)
    if size == 1 or is_share(loader) or not isinstance(rows, int) or not isinstance(data, Sized):
        return
    rest = len(data) % rows
    bounds(rest if rest and not getattr(loader, "drop_last", False) else rows, 0, size)


@dataclass
class _Whole:
    loader: Iterable[Any]

    def __iter__(self) -> Iterator[Piece]:
        return ((batch, 0) for batch in self.loader)


@dataclass
class _Cut:
    """Rows cut from batches that every process makes as a whole."""

    loader: Iterable[Any]
    rank: int
    size: int

    def __iter__(self) -> Iterator[Piece]:
        for batch in self.loader:
            labels = split(batch)[1]
            own, rows = bounds(len(labels), self.rank, self.size), len(labels)

            def cut(leaf: Any, own: slice = own, rows: int = rows) -> Any:
                batched = isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == rows
                return leaf[own] if batched else leaf

            leaves, structure = pytree.tree_flatten(batch)
            yield (
                pytree.tree_unflatten([cut(leaf) for leaf in leaves], structure),
                zlib.crc32(tensor_bytes(labels)),
            )


def _loads_by_index(loader: Iterable[Any]) -> bool:
    return (
        isinstance(loader, DataLoader)
        and type(loader).__iter__ is DataLoader.__iter__
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
    )


class _Loaded:
    """A `DataLoader` that loads the own rows of every batch and no others."""

    def __init__(self, loader: Any, rank: int, size: int) -> None:
        self.indices = _Indices(loader.batch_sampler, rank, size)
        self.in_order = getattr(loader, "in_order", True)
        # A copy keeps all that a DataLoader has: workers, collate function, pinned memory, ...
        self.loader = copy.copy(loader)
        self.loader.worker_init_fn = _Worker(loader.worker_init_fn, rank)
        vars(self.loader).update(batch_sampler=self.indices, _iterator=None)

    def __iter__(self) -> Iterator[Piece]:
        for batch in self.loader:
            checksum = self.indices.checksums.popleft()
            yield batch, checksum if self.in_order else 0


class _Indices:
    """The own part of every batch of indices.

    Which indices those are must not depend on the rank, but augmentation must: rows that one
    process would augment in turn are not to get the same random numbers on all. So the sampler
    and the dataset, which draw from the same global generators, find them in separate states.
    """

    def __init__(self, batches: Iterable[Any], rank: int, size: int) -> None:
        self.batches, self.rank, self.size = batches, rank, size
        self.checksums: deque[int] = deque()

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[Any]]:
        self.checksums.clear()
        order, batches = random_states(), iter(self.batches)
        _seed_rank(self.rank)
        while True:
            own = random_states()
            set_random_states(order)
            try:
                batch = next(batches, None)
            finally:
                order = random_states()
                set_random_states(own)
            if batch is None:
                return
            indices = list(batch)
            self.checksums.append(zlib.crc32(repr(indices).encode()))
            yield indices[bounds(len(indices), self.rank, self.size)]


@dataclass
class _Worker:
    """Gives the workers of every process random numbers of their own."""

    then: Callable[[int], None] | None
    rank: int

    def __call__(self, worker: int) -> None:
        _seed_rank(self.rank)
        if self.then is not None:
            self.then(worker)


def _seed_rank(rank: int) -> None:
    seed_all(np.random.default_rng([torch.initial_seed() % 2**64, rank]))
