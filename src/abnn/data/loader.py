"""Loaders of batches to train on, mixed where the recipe asks for that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from abnn.data.augmentation import mixing_of


def training_loader(
    dataset: Dataset[Any],
    batch_size: int,
    augmentation: Sequence[str] = (),
    classes: int | None = None,
    workers: int = 0,
    *,
    least: int = 2,
) -> DataLoader[Any]:
    """Batches of a dataset in a new random order every epoch, to train on.

    Where `augmentation` names "medium" or "a3", batches are mixed by Mixup and CutMix, and their
    labels are probabilities, floats `[B, K]`.

    Args:
        dataset: the images; what is done to each of them alone is up to its view.
        batch_size: examples a batch; an even number where batches are mixed.
        augmentation: what the recipe asks for.
        classes: how many there are; batches that are mixed need it.
        workers: processes that load.
        least: how many examples the last batch must have. One that has fewer, or an odd number that
            is to be mixed, is left out: in the next epoch its examples are others.

    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.zeros(9, 3, 8, 8), torch.arange(9) % 3)
    >>> [x.shape[0] for x, y in training_loader(data, 4)]
    [4, 4]
    >>> [y.shape for x, y in training_loader(data, 4, ["medium"], classes=3)]
    [torch.Size([4, 3]), torch.Size([4, 3])]
    """
    mixing = _mixing(augmentation, classes, batch_size)
    if isinstance(dataset, IterableDataset):
        if mixing:
            raise ValueError(
                f"Batches of a {type(dataset).__name__} can't be mixed, for their number is not "
                "known to be even; give a Dataset that knows its length."
            )
        return DataLoader(dataset, batch_size, num_workers=workers)
    n = len(dataset)  # type: ignore[arg-type]
    last = n % batch_size
    drops = 0 < last < least or (mixing is not None and last % 2 == 1)
    if drops and n < batch_size and mixing:
        raise ValueError(
            f"{n} examples make no batch of {batch_size} that can be mixed; give a smaller batch "
            "size, an even number."
        )
    return DataLoader(
        dataset,
        batch_size,
        shuffle=True,
        num_workers=workers,
        drop_last=drops and n > batch_size,
        collate_fn=mixing,
    )


class Mixed:
    """Puts examples together and mixes them; an object, for workers can't be given lambdas."""

    def __init__(self, mixup: Any) -> None:
        self.mixup = mixup

    def __call__(self, examples: list[Any]) -> tuple[Tensor, Tensor]:
        """A batch of images, and the probabilities of their classes."""
        x, y = default_collate(examples)
        mixed: tuple[Tensor, Tensor] = self.mixup(x, torch.as_tensor(y))
        return mixed


def _mixing(augmentation: Sequence[str], classes: int | None, batch_size: int) -> Mixed | None:
    mixup = mixing_of(augmentation, classes or 0)
    if mixup is None:
        return None
    if not classes:
        raise ValueError("Batches can be mixed only if it is known how many classes there are.")
    if batch_size % 2:
        raise ValueError(
            f"Batches of {batch_size} can't be mixed in pairs; give an even batch size."
        )
    return Mixed(mixup)
