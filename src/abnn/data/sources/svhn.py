"""`svhn[:ROOT]`: house numbers, as torchvision downloads, checks and reads them."""

from __future__ import annotations

from functools import partial

import torch

from abnn.data.packages import package
from abnn.data.sources.source import Parts, Source, downloading
from abnn.data.stored import Stored

_CLASSES = tuple("0123456789")


def parts(root: str) -> Parts:
    """The parts of SVHN.

    >>> list(parts(""))
    ['train', 'test']
    """
    return {part: partial(_read, root, part) for part in ("train", "test")}


SOURCE = Source("svhn[:ROOT]", parts)


def _read(root: str, part: str) -> Stored:
    datasets = package("torchvision.datasets")
    package("scipy.io")  # by which torchvision reads the files
    with downloading("svhn", root) as folder:
        found = datasets.SVHN(folder, split=part, download=True)
    name = f"the {part} part of svhn"
    images, labels = torch.from_numpy(found.data), torch.from_numpy(found.labels)
    return Stored(name, images, labels.reshape(-1), _CLASSES)
