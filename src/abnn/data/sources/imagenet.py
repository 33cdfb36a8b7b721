"""`imagenet:ROOT`: ImageNet of 2012, as torchvision unpacks, checks and reads it.

It may not be downloaded by anybody: ROOT holds the archives that one gets after registering. Its
validation images are what everybody tests on, and the test part here.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from abnn.data.packages import package
from abnn.data.sources.source import Parts, Source
from abnn.data.stored import Stored, files

_NAMES = {"train": "train", "test": "val"}


def parts(root: str) -> Parts:
    """The parts of ImageNet.

    >>> list(parts("/data/imagenet"))
    ['train', 'test']
    """
    return {part: partial(_read, root, name) for part, name in _NAMES.items()}


SOURCE = Source("imagenet:ROOT", parts)


def _read(root: str, name: str) -> Stored:
    folder = Path(root).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {root}; give imagenet: the path of one.")
    try:
        found = package("torchvision.datasets").ImageNet(folder, split=name)
    except (RuntimeError, FileNotFoundError) as error:
        reason = str(error).partition(". ")[0].rstrip(".")
        raise ValueError(
            f"imagenet:{root} is not complete ({reason}); put the archives of ImageNet there, or "
            "name unpacked folders of classes as folder:PATH."
        ) from error
    paths, labels = zip(*found.samples, strict=True)
    classes = tuple(names[0] for names in found.classes)
    return Stored(f"{name} of imagenet", files(paths), torch.tensor(labels), classes)
