"""A network with what it has to be used with: the images it expects, and its labels."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from abnn.builders import nearest
from abnn.outputs import Output

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
INTERPOLATIONS = ("nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos")


@dataclass(frozen=True)
class Input:
    """The images that a network expects, as values from 0 to 1 that are then normalised.

    Args:
        size: height and width; None: any.
        channels: of an image.
        mean, std: of every channel, to normalise by; empty: values stay from 0 to 1.
        interpolation: how images are resized.
        crop: the share of a side that the central crop keeps; 224 / 256 resizes to 256 for 224.
            A few networks have more than 1, and the border is then filled with zeros.
        squash: resize height and width each to its own, where others keep the proportions and
            resize the shorter side.

    >>> expected = Input((224, 224), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), crop=0.875)
    >>> expected.resized
    (256, 256)
    >>> expected.with_(size=160).size
    (160, 160)
    """

    size: tuple[int, int] | None = None
    channels: int = 3
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    interpolation: str = "bilinear"
    crop: float = 1.0
    squash: bool = False

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            object.__setattr__(self, name, tuple(map(float, getattr(self, name))))
        size: Any = self.size
        if size is not None:
            size = (size, size) if isinstance(size, int) else tuple(size)
            object.__setattr__(self, "size", size)
        self._check()

    @property
    def resized(self) -> tuple[int, int] | None:
        """Height and width before the central crop."""
        if self.size is None:
            return None
        # 224 / (224 / 232) is a little less than 232.
        height, width = (math.floor(side / self.crop + 1e-6) for side in self.size)
        return height, width

    def with_(self, **overrides: Any) -> Input:
        """The same with some values replaced; a size may be one number.

        >>> Input((32, 32)).with_(mean=[0.5] * 3, std=[0.25] * 3).std
        (0.25, 0.25, 0.25)
        """
        known = [field.name for field in fields(self)]
        for name in overrides:
            if name not in known:
                raise TypeError(f"The input of a network has no {name!r}; {nearest(name, known)}")
        return replace(self, **overrides)

    def _check(self) -> None:
        if self.size is not None and (len(self.size) != 2 or min(self.size) < 1):
            raise ValueError(
                f"Input size={self.size!r} must be a height and a width of at least 1, or one "
                "number for both."
            )
        if self.channels < 1:
            raise ValueError(f"Input channels={self.channels} must be at least 1.")
        if len(self.mean) != len(self.std) or len(self.mean) not in (0, self.channels):
            raise ValueError(
                f"Input has {self.channels} channels but {len(self.mean)} values as mean and "
                f"{len(self.std)} as std; give one of each a channel, or none at all."
            )
        if not all(value > 0 for value in self.std):
            raise ValueError(f"Input std={self.std} must be more than 0.")
        if not self.crop > 0:
            raise ValueError(f"Input crop={self.crop} must be more than 0.")
        if self.interpolation not in INTERPOLATIONS:
            raise ValueError(
                f"Input interpolation={self.interpolation!r} is unknown; "
                f"{nearest(self.interpolation, INTERPOLATIONS)}"
            )


@dataclass(frozen=True)
class Model:
    """A network and what comes with it; a builder of your own may return one.

    Args:
        net: the network.
        source: where it is from, as a command line names it.
        trained: whether its weights are anything but random.
        input: the images that it expects; None where that is not known, or it reads text.
        classes: the name of every class, in the order of the logits; None where not known.
        output: finds the logits in what the network returns, as `abnn.convert` takes it.

    >>> Model(nn.Linear(4, 2), classes=("cat", "dog")).classes
    ('cat', 'dog')
    """

    net: nn.Module
    source: str = ""
    trained: bool = True
    input: Input | None = None
    classes: tuple[str, ...] | None = None
    output: Output | None = None


def of_imagenet(size: int = 224) -> Input:
    """The images of nearly all networks that were trained on ImageNet.

    >>> of_imagenet().resized
    (256, 256)
    """
    return Input((size, size), 3, IMAGENET_MEAN, IMAGENET_STD, "bilinear", 0.875)
