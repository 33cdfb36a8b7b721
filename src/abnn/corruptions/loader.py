"""A loader whose images are corrupted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from abnn.corruptions.functions import corrupt
from abnn.images import Statistic, images_of, plain, statistic


class Corrupted:
    """The batches of a loader with their images corrupted; all else is as it was.

    Networks take normalised images `(x - mean) / std`: these are brought back to 0..1, corrupted,
    and normalised again.

    Args:
        loader: batches as for `evaluate`.
        name: one of `CORRUPTIONS`.
        severity: 1 to 5; 0 checks the batches of the loader and leaves them as they are.
        mean, std: of the normalisation, a number or one a channel; default: there was none.
        seed: of the noise, of which every image has its own by its place in the loader.

    >>> loader = [(torch.zeros(2, 3, 8, 8), torch.tensor([0, 1]))]  # all 0.5, normalised
    >>> bright = Corrupted(loader, "brightness", 2, mean=(0.5, 0.5, 0.5), std=0.25)
    >>> [(x.unique(), y) for x, y in bright]
    [(tensor([0.4000]), tensor([0, 1]))]
    """

    def __init__(
        self,
        loader: Iterable[Any],
        name: str,
        severity: int,
        mean: Statistic | None = None,
        std: Statistic | None = None,
        seed: int = 0,
    ) -> None:
        self.loader, self.name, self.severity, self.seed = loader, name, severity, seed
        self.mean = statistic("mean", 0.0 if mean is None else mean)
        self.std = statistic("std", 1.0 if std is None else std)
        if not bool((self.std > 0).all()):
            raise ValueError(f"std={std} is not above 0 everywhere; give that of the images.")
        corrupt(torch.zeros(0, 3, 8, 8), name, severity, seed)  # a mistake shows before a batch
        # Processes that share the batches look for these, to see them in one order.
        self.sampler = getattr(loader, "sampler", None)
        self.batch_sampler = getattr(loader, "batch_sampler", None)
        self.generator = getattr(loader, "generator", None)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        first = 0
        for batch in self.loader:
            old = images_of(batch)
            new = self._corrupt(old, first)
            first += len(old)
            yield batch if self.severity == 0 else _replaced(batch, old, new)
        if first == 0:
            raise ValueError(
                "The loader is empty, if not from the start then after its first pass; give one "
                "that can be iterated again, such as a list or a DataLoader."
            )

    def _corrupt(self, images: Tensor, first: int) -> Tensor:
        exact = images.to(torch.promote_types(images.dtype, torch.float32))
        mean, std = _fitting("mean", self.mean, exact), _fitting("std", self.std, exact)
        corrupted = corrupt(exact * std + mean, self.name, self.severity, self.seed, first)
        return ((corrupted - mean) / std).to(images.dtype)


def _replaced(batch: Any, old: Tensor, new: Tensor) -> Any:
    return pytree.tree_map(lambda leaf: new if leaf is old else leaf, plain(batch))


def _fitting(name: str, values: Tensor, images: Tensor) -> Tensor:
    if len(values) not in (1, images.shape[1]):
        raise ValueError(
            f"{name}= has {len(values)} values and the images have {images.shape[1]} channels; "
            "give one number, or one a channel."
        )
    return values[:, None, None].to(images)
