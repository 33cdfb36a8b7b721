"""`dtd[:ROOT]`: the Describable Textures, as torchvision downloads, checks and reads them."""

from __future__ import annotations

from functools import partial

import torch

from abnn.data.packages import package
from abnn.data.sources.source import Parts, Source, downloading
from abnn.data.stored import Stored, files

_NAMES = {"train": "train", "validation": "val", "test": "test"}


def parts(root: str) -> Parts:
    """The parts of the first of its ten divisions.

    >>> list(parts(""))
    ['train', 'validation', 'test']
    """
    return {part: partial(_read, root, name) for part, name in _NAMES.items()}


SOURCE = Source("dtd[:ROOT]", parts)


def _read(root: str, name: str) -> Stored:
    datasets = package("torchvision.datasets")
    with downloading("dtd", root) as folder:
        found = datasets.DTD(folder, split=name, download=True, loader=str)  # paths, not images
    paths, labels = zip(*found, strict=True)
    return Stored(f"{name} of dtd", files(paths), torch.tensor(labels), tuple(found.classes))
