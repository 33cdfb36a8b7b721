"""Every process's share of a data set: its rows of every batch, or every so many-th batch."""

from __future__ import annotations

import copy
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from abnn.batches import inputs_of, labels_of, split_soft
from abnn.digests import tensor_bytes
from abnn.folding import first_tensor
from abnn.order import random_states, samplers, seed_all, set_random_states

# A batch of this process, and what must be the same on all of them: a checksum of the whole batch.
Piece = tuple[Any, int]
T = TypeVar("T")


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
            "split='modes' in a fit."
        )
    return slice(rows * rank // size, rows * (rank + 1) // size)


def check_last_batch(loader: Iterable[Any], size: int) -> None:
    """Say at the start of a fit that the last batch of an epoch will be too small to share."""
    rows, data = getattr(loader, "batch_size", None), getattr(loader, "dataset", None)
    if size == 1 or is_share(loader) or not isinstance(rows, int) or not isinstance(data, Sized):
        return
    rest = len(data) % rows
    bounds(rest if rest and not getattr(loader, "drop_last", False) else rows, 0, size)


def check_pieces(given: Tensor, checksums: Tensor, epoch: int, number: int) -> None:
    """Refuse shares that are not of one batch.

    Args:
        given: of every process, whether it got a share.
        checksums: of the whole batches.
        epoch, number: which batch it is.
    """
    if not (given == given[0]).all() or not (checksums == checksums[0]).all():
        what = "batch" if given.all() else "number of batches"
        raise ValueError(
            f"The processes do not have the same {what} (epoch {epoch}, batch {number}), so "
            "they can't share it; give all of them the same data in the same order, with no "
            "randomness but torch's, numpy's and Python's own, or a DistributedSampler."
        )


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
            labels = split_soft(batch)[1]
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


class Deal:
    """Whole batches of a loader, dealt out to `size` processes in turn: those of one of them.

    A `DataLoader` of a map-style dataset loads only these; anything else is iterated by all.

    >>> [batch.item() for batch in Deal(torch.arange(5.0).split(1), rank=1, size=2)]
    [1.0, 3.0]
    """

    def __init__(self, loader: Iterable[Any], rank: int, size: int) -> None:
        self.loader, self.rank, self.size = loader, rank, size
        self.in_order = getattr(loader, "in_order", True)
        self.seen = 0  # batches of the loader, own or not
        self.checksum = 0  # of all of these
        self._turns: deque[int] = deque()

    def __iter__(self) -> Iterator[Any]:
        if self.size == 1:
            return self._counted()
        if _loads_by_index(self.loader):
            return iter(_copy(self.loader, self.rank, self._own_indices))
        return self._own(self.loader, _mark)

    def turn(self) -> int:
        """Of the own batches, one after the other: the checksum up to the first of the turn."""
        return self._turns.popleft() if self._turns and self.in_order else 0

    def _counted(self) -> Iterator[Any]:
        for batch in self.loader:
            self.seen += 1
            yield batch

    def _own_indices(self, batches: Iterable[list[Any]]) -> Iterator[list[Any]]:
        return self._own(batches, lambda indices: repr(indices).encode())

    def _own(self, batches: Iterable[T], mark: Callable[[T], bytes | memoryview]) -> Iterator[T]:
        turn = 0
        for place, batch in enumerate(batches):
            self.seen, self.checksum = place + 1, zlib.crc32(mark(batch), self.checksum)
            if place % self.size == 0:
                turn = self.checksum
            if place % self.size == self.rank:
                self._turns.append(turn)
                yield batch


def _mark(batch: Any) -> bytes | memoryview:
    """What tells a batch from others: its labels, or else its first input."""
    labels = labels_of(batch)
    return tensor_bytes(first_tensor(inputs_of(batch))[:1] if labels is None else labels)


class _Loaded:
    """A `DataLoader` that loads the own rows of every batch and no others."""

    def __init__(self, loader: Any, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.checksums: deque[int] = deque()
        self.in_order = getattr(loader, "in_order", True)
        self.loader = _copy(loader, rank, self._own_rows)

    def __iter__(self) -> Iterator[Piece]:
        self.checksums.clear()
        for batch in self.loader:
            checksum = self.checksums.popleft()
            yield batch, checksum if self.in_order else 0

    def _own_rows(self, batches: Iterable[list[Any]]) -> Iterator[list[Any]]:
        for indices in batches:
            self.checksums.append(zlib.crc32(repr(indices).encode()))
            yield indices[bounds(len(indices), self.rank, self.size)]


def _copy(loader: Any, rank: int, own: Callable[[Iterable[list[Any]]], Iterator[list[Any]]]) -> Any:
    """A copy that loads its own indices; it keeps workers, collate function, pinned memory, ..."""
    copied = copy.copy(loader)
    copied.worker_init_fn = _Worker(loader.worker_init_fn, rank)
    vars(copied).update(batch_sampler=_Indices(loader.batch_sampler, rank, own), _iterator=None)
    return copied


@dataclass
class _Indices:
    """What this process takes from the batches of indices.

    Which indices those are must not depend on the rank, but augmentation must: rows that one
    process would augment in turn are not to get the same random numbers on all. So the sampler
    and the dataset, which draw from the same global generators, find them in separate states.
    """

    batches: Iterable[Any]
    rank: int
    own: Callable[[Iterable[list[Any]]], Iterator[list[Any]]]

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[list[Any]]:
        return self.own(self._all())

    def _all(self) -> Iterator[list[Any]]:
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
            yield list(batch)


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
