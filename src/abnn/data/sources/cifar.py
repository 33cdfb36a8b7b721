"""`cifar10[:ROOT]` and `cifar100[:ROOT]`, as torchvision downloads, checks and reads them."""

from __future__ import annotations

from functools import partial

import torch

from abnn.data.packages import package
from abnn.data.sources.source import Parts, Source, downloading
from abnn.data.stored import Stored


def parts(reader: str, root: str) -> Parts:
    """The parts of CIFAR-10 or CIFAR-100.

    >>> list(parts("CIFAR10", ""))
    ['train', 'test']
    """
    return {part: partial(_read, reader, root, part) for part in ("train", "test")}


CIFAR10 = Source("cifar10[:ROOT]", partial(parts, "CIFAR10"))
CIFAR100 = Source("cifar100[:ROOT]", partial(parts, "CIFAR100"))


def _read(reader: str, root: str, part: str) -> Stored:
    datasets = package("torchvision.datasets")
    with downloading(reader.lower(), root) as folder:
        found = getattr(datasets, reader)(folder, train=part == "train", download=True)
    name = f"the {part} part of {reader.lower()}"
    classes = tuple(found.classes)
    return Stored(name, torch.from_numpy(found.data), torch.tensor(found.targets), classes)
