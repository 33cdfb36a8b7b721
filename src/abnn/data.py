"""The data that a command line names: `npz:PATH`, or `module:PACKAGE.MODULE:BUILDER`.

A source is a function of (what follows the colon, part, mean, std, augmentation) that returns a
dataset; a new one is a line in `SOURCES`.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from abnn.builders import from_module

Part = Literal["train", "validation"]

# The names of the arrays of an npz file, the first that are there.
_ARRAYS: dict[Part, list[tuple[str, str]]] = {
    "train": [("x_train", "y_train"), ("x", "y")],
    "validation": [("x_val", "y_val"), ("x_test", "y_test"), ("x", "y")],
}


def open_data(
    source: str,
    part: Part,
    mean: Sequence[float] = (),
    std: Sequence[float] = (),
    augmentation: Sequence[str] = (),
) -> Dataset[Any] | DataLoader[Any]:
    """A dataset, or a loader if the user's own module makes one.

    Args:
        source: where the data is from.
        part: which part of it.
        mean, std: of every channel of images, to normalise by.
        augmentation: what a recipe asks for.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/d.npz", x=np.zeros((9, 8, 8, 3), np.uint8), y=np.zeros(9, int))
    ...     len(open_data(f"npz:{folder}/d.npz", "train"))
    9
    """
    kind, _, name = source.partition(":")
    if kind not in SOURCES or not name:
        raise ValueError(
            f"{source!r} does not say where the data is from; write npz:PATH or "
            "module:PACKAGE.MODULE:BUILDER."
        )
    if len(mean) != len(std):
        raise ValueError("Give both --mean and --std, with as many numbers each, or neither.")
    data: Dataset[Any] | DataLoader[Any] = SOURCES[kind](name, part, mean, std, augmentation)
    return data


class Images(Dataset[Any]):
    """Images of bytes, as floats from 0 to 1 with the channels first, normalised and augmented.

    Args:
        x: `[N, H, W, C]`, `[N, H, W]` or `[N, C, H, W]`, of bytes.
        y: labels.
        mean, std: to normalise by; none: not at all.
        flip: whether half of the images are mirrored.

    >>> images = Images(torch.full((4, 8, 8, 3), 255, dtype=torch.uint8), torch.zeros(4).long())
    >>> images[0][0].shape, images[0][0].max()
    (torch.Size([3, 8, 8]), tensor(1.))
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
        flip: bool = False,
    ) -> None:
        x = x.unsqueeze(1) if x.ndim == 3 else x
        self.x = x.movedim(-1, 1) if x.shape[-1] in (1, 3, 4) else x
        self.y, self.flip = y, flip
        channels = self.x.shape[1]
        if mean and len(mean) != channels:
            raise ValueError(f"The images have {channels} channels, but --mean has {len(mean)}.")
        self.mean = torch.tensor(mean or [0.0]).reshape(-1, 1, 1)
        self.std = torch.tensor(std or [1.0]).reshape(-1, 1, 1)

    def __len__(self) -> int:
        """How many images there are."""
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        """An image and its label."""
        x = (self.x[i].float() / 255 - self.mean) / self.std
        return x.flip(-1) if self.flip and torch.rand(()) < 0.5 else x, self.y[i]


def _npz(
    path: str, part: Part, mean: Sequence[float], std: Sequence[float], augmentation: Sequence[str]
) -> Dataset[Any]:
    unknown = [name for name in augmentation if name != "hflip"]
    if unknown:
        raise ValueError(
            f"The recipe asks for {', '.join(unknown)}, which npz: data does not get; do it in a "
            "dataset of your own (module:), or leave all augmentation out by --no-augmentation."
        )
    if not Path(path).is_file():
        raise FileNotFoundError(f"There is no file {path}; give npz: the path of one.")
    try:
        with np.load(path) as arrays:
            pairs = [pair for pair in _ARRAYS[part] if all(name in arrays for name in pair)]
            if not pairs:
                names = " or ".join(" and ".join(pair) for pair in _ARRAYS[part])
                raise KeyError(f"{path} has no {names}; it has {', '.join(arrays) or 'nothing'}.")
            x, y = (torch.from_numpy(arrays[name]) for name in pairs[0])
    except KeyError as error:
        raise ValueError(error.args[0]) from error
    except (ValueError, OSError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no npz file of plain arrays: {error}.") from error
    if len(x) != len(y):
        raise ValueError(f"{path} has {len(x)} inputs but {len(y)} labels.")
    if x.dtype == torch.uint8 and x.ndim in (3, 4):
        return Images(x, y.long(), mean, std, "hflip" in augmentation)
    if mean or augmentation:
        wanted = "--mean and --std are" if mean else "The hflip of the recipe is"
        raise ValueError(
            f"{wanted} for images of bytes, which {path} does not hold; leave it out"
            f"{'' if mean else ' by --no-augmentation'}."
        )
    return torch.utils.data.TensorDataset(x, y.long())


def _own(
    name: str, part: Part, mean: Sequence[float], std: Sequence[float], augmentation: Sequence[str]
) -> Dataset[Any] | DataLoader[Any]:
    if mean:
        raise ValueError("--mean and --std are for npz: data; let the builder normalise its own.")
    if augmentation:
        raise ValueError(
            f"The recipe asks for {', '.join(augmentation)}, which only the builder of "
            f"module:{name} can do; say by --no-augmentation that this is its business."
        )
    data = from_module(name)
    if not isinstance(data, Dataset | DataLoader):
        raise ValueError(
            f"module:{name} is a {type(data).__name__}; name what builds a Dataset or a DataLoader."
        )
    return data


SOURCES: dict[str, Any] = {"npz": _npz, "module": _own}
