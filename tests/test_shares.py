"""The share of every process: together the whole batch, in the one order, loaded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from abnn.order import seed_epoch
from abnn.shares import Deal, bounds, check_last_batch, share

LABELS = torch.arange(22)


class Counting(Dataset[Any]):
    """Notes the rows that are read, and draws a random number for each."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(LABELS)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.read.append(i)
        return torch.rand(()), LABELS[i]


def shares(loader: Any, epoch: int = 0, size: int = 2) -> list[list[Any]]:
    """The batches of every process, each from the same start, as after `seed_epoch`."""
    found = []
    for rank in range(size):
        seed_epoch(loader, 0, epoch)
        found.append(list(share(loader, rank, size)))
    return found


def labels(pieces: list[Any]) -> list[list[int]]:
    return [batch[1].tolist() for batch, _ in pieces]


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_shares_of_a_loader_are_its_batches(shuffle: bool) -> None:
    loader = DataLoader(TensorDataset(LABELS.float(), LABELS), 8, shuffle=shuffle)
    seed_epoch(loader, 0, 1)
    whole = [batch[1].tolist() for batch in loader]
    first, second = shares(loader, epoch=1)
    assert [a + b for a, b in zip(labels(first), labels(second), strict=True)] == whole
    assert [checksum for _, checksum in first] == [checksum for _, checksum in second]
    assert [len(part) for part in labels(second)] == [4, 4, 3]


def test_a_process_reads_its_own_rows_only() -> None:
    dataset = Counting()
    loader: Any = DataLoader(dataset, 8)
    list(share(loader, 1, 2))
    assert dataset.read == [*range(4, 8), *range(12, 16), *range(19, 22)]
    assert len(loader) == 3
    assert loader.batch_sampler.sampler is loader.sampler  # the user's loader is as it was


def test_processes_augment_with_random_numbers_of_their_own() -> None:
    loader = DataLoader(Counting(), 8, shuffle=True)
    first, second = shares(loader)
    numbers = [torch.cat([batch[0] for batch, _ in pieces]) for pieces in (first, second)]
    assert not set(numbers[0].tolist()) & set(numbers[1].tolist())
    again = torch.cat([batch[0] for batch, _ in shares(loader)[0]])
    assert torch.equal(again, numbers[0])  # but always the same


def collate(rows: list[Any]) -> Any:
    return torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])


def test_workers_and_collate_function_are_kept() -> None:
    loader = DataLoader(Counting(), 8, num_workers=1, collate_fn=collate, prefetch_factor=3)
    piece: Any = share(loader, 0, 2)
    for name in ("num_workers", "collate_fn", "prefetch_factor", "pin_memory", "generator"):
        assert getattr(piece.loader, name) == getattr(loader, name)
    first, second = shares(loader)
    assert labels(first)[0] + labels(second)[0] == list(range(8))
    numbers = [torch.cat([batch[0] for batch, _ in pieces]) for pieces in (first, second)]
    assert not set(numbers[0].tolist()) & set(numbers[1].tolist())


def test_a_distributed_sampler_makes_a_share_already() -> None:
    dataset = TensorDataset(LABELS.float(), LABELS)
    sampler: Any = DistributedSampler(dataset, num_replicas=2, rank=1, shuffle=False)
    loader = DataLoader(dataset, 8, sampler=sampler)
    assert labels(list(share(loader, 1, 2))) == [list(range(1, 16, 2)), [17, 19, 21]]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.zeros(2), label) for label in LABELS])


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Stream(), 8),
        [(torch.zeros(len(part), 2), part) for part in LABELS.split(8)],
        [{"x": torch.zeros(len(part), 2), "labels": part} for part in LABELS.split(8)],
    ],
)
def test_rows_are_cut_from_whatever_else_there_is(loader: Any) -> None:
    parts = []
    for rank in range(2):
        for batch, _ in share(loader, rank, 2):
            x, y = batch.values() if isinstance(batch, dict) else batch
            assert len(x) == len(y)
            parts.append(y.tolist())
    assert sorted(label for part in parts for label in part) == LABELS.tolist()
    assert parts[0] == [0, 1, 2, 3]


# Whole batches, dealt out


@pytest.mark.parametrize("workers", [0, 1])
def test_a_process_reads_its_own_batches_only(workers: int) -> None:
    dataset = Counting()
    loader: Any = DataLoader(dataset, 4, num_workers=workers)
    deal = Deal(loader, 1, 2)
    assert [y.tolist() for _, y in deal] == [[4, 5, 6, 7], [12, 13, 14, 15], [20, 21]]
    assert workers or dataset.read == [*range(4, 8), *range(12, 16), 20, 21]
    assert deal.seen == 6


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize(
    "loader", [DataLoader(Stream(), 4), DataLoader(TensorDataset(LABELS), 4), LABELS.split(4)]
)
def test_batches_dealt_out_in_turn_are_those_of_the_loader(loader: Any, size: int) -> None:
    def rows(batch: Any) -> list[int]:
        found: list[int] = (batch if isinstance(batch, Tensor) else batch[-1]).tolist()
        return found

    hands = [[rows(batch) for batch in Deal(loader, rank, size)] for rank in range(size)]
    dealt = [hands[place % size][place // size] for place in range(sum(map(len, hands)))]
    assert dealt == [part.tolist() for part in LABELS.split(4)]


def test_processes_tell_by_checksums_whether_they_are_dealt_from_one_order() -> None:
    def turns(parts: Any, rank: int) -> list[int]:
        deal = Deal(parts, rank, 2)
        return [deal.turn() for _ in deal]

    parts = [part.float() for part in LABELS.split(4)]
    assert turns(parts, 0) == turns(parts, 1)
    other = [*parts[:3], *parts[:2:-1]]
    agreed = [a == b for a, b in zip(turns(parts, 0), turns(other, 1), strict=True)]
    assert agreed == [True, True, False]


def test_a_batch_that_is_too_small_is_refused_before_the_fit() -> None:
    with pytest.raises(ValueError, match="2 rows, fewer than the 3 processes.*drop_last=True"):
        bounds(2, 0, 3)
    loader = DataLoader(TensorDataset(LABELS), 7)
    with pytest.raises(ValueError, match="A batch has 1 row, fewer than the 2 processes"):
        check_last_batch(loader, 2)
    check_last_batch(loader, 1)
    check_last_batch(DataLoader(TensorDataset(LABELS), 7, drop_last=True), 2)
