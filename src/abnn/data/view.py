"""How images become the inputs of a network: their size, their scale, and their augmentation."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from abnn.data.packages import package
from abnn.recipe import nearest

AUGMENTATIONS = ("hflip", "random_crop", "random_scale", "color_jitter", "medium", "a3")
_INTERPOLATIONS = ("nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos")
_A3_SIDE = 160  # pixels, at which the A3 procedure trains


@dataclass(frozen=True)
class View:
    """How images become the inputs of a network; plain values, as networks and recipes give them.

    To predict and to evaluate: the image is resized, in its proportions, until `size / crop` just
    fits into it, the middle of that size is cut out, bytes become floats from 0 to 1, and these
    are normalised. To train: what `augmentation` names, in the place of the resizing.

    Args:
        size: height and width of the input; None: images stay as large as they are. An image that
            has this size already is neither resized nor cut.
        mean, std: of every channel, to normalise by; none: not at all.
        interpolation: "nearest", "bilinear", "bicubic", "lanczos", "box", ...
        crop: which share of the resized image's side the input is; above 1, it has a black border.
        squash: resize height and width each to its own, whatever the proportions of the image.
        augmentation: names of `AUGMENTATIONS`; docs/data.md says what each does.

    >>> View(size=(224, 224), mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2), crop=0.875).resized
    (256, 256)
    """

    size: tuple[int, int] | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    interpolation: str = "bilinear"
    crop: float = 1.0
    augmentation: tuple[str, ...] = ()
    squash: bool = False

    def __post_init__(self) -> None:
        for name in ("mean", "std", "augmentation"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.size is not None:
            object.__setattr__(self, "size", tuple(self.size))
            if len(self.size) != 2 or not all(isinstance(n, int) and n > 0 for n in self.size):
                raise ValueError(f"size={self.size} is no height and width; give two above 0.")
        if len(self.mean) != len(self.std):
            raise ValueError("Give both --mean and --std, with as many numbers each, or neither.")
        if not all(number > 0 for number in self.std):
            raise ValueError(f"std={self.std} is not above 0 everywhere; give that of the images.")
        if not 0 < self.crop < math.inf:
            raise ValueError(f"crop={self.crop} is no share of a side; give one above 0.")
        if self.interpolation not in _INTERPOLATIONS:
            raise ValueError(
                f"interpolation={self.interpolation!r} is unknown"
                f"{nearest(self.interpolation, _INTERPOLATIONS)}"
            )
        for name in self.augmentation:
            if name not in AUGMENTATIONS:
                raise ValueError(f"augmentation {name!r} is unknown{nearest(name, AUGMENTATIONS)}")
        if "a3" in self.augmentation and len(set(self.augmentation)) > 1:
            raise ValueError(
                "augmentation 'a3' is a whole procedure, with crops and flips of its own; leave "
                "out the others."
            )

    @property
    def channels(self) -> int | None:
        """How many channels a network wants, if that is known.

        >>> View().channels is None
        True
        """
        return len(self.mean) or None

    @property
    def resized(self) -> tuple[int, int] | None:
        """What just fits into an image before the middle of it is cut out.

        >>> View(size=(224, 224), crop=224 / 232).resized
        (232, 232)
        """
        if self.size is None:
            return None
        # 224 / (224 / 232) is a little less than 232 in floating point.
        height, width = (math.floor(side / self.crop + 1e-6) for side in self.size)
        return height, width

    @property
    def training_size(self) -> tuple[int, int] | None:
        """The size of what is trained on.

        >>> View(size=(224, 224), augmentation=("a3",)).training_size
        (160, 160)
        """
        if "a3" not in self.augmentation:
            return self.size
        height, width = self.size or (_A3_SIDE, _A3_SIDE)
        return min(height, _A3_SIDE), min(width, _A3_SIDE)

    def plain(self) -> View:
        """The same without augmentation.

        >>> View(augmentation=("hflip",)).plain() == View()
        True
        """
        return replace(self, augmentation=())


class Fitted:
    """Images, and label maps, resized until `view.resized` just fits into them, and cut.

    >>> from torchvision import tv_tensors
    >>> image = tv_tensors.Image(torch.zeros(3, 30, 40, dtype=torch.uint8))
    >>> Fitted(View(size=(16, 16), crop=0.8))(image, torch.tensor(1))[0].shape
    torch.Size([3, 16, 16])
    """

    def __init__(self, view: View) -> None:
        assert view.size is not None
        assert view.resized is not None
        self.size, self.least = view.size, view.resized
        self.interpolation, self.squash = view.interpolation, view.squash

    def __call__(self, image: Any, label: Any) -> tuple[Any, Any]:
        """An image, and its label, which moves along where it is a map."""
        v2 = package("torchvision.transforms.v2")
        height, width = v2.functional.get_size(image)
        if (height, width) == self.size:
            return image, label
        least_height, least_width = self.least
        if not self.squash:  # one of them is more than the least
            least_height, least_width = (
                max(least_height, least_width * height // width),
                max(least_width, least_height * width // height),
            )
        fit = v2.Compose(
            [
                v2.Resize([least_height, least_width], mode(self.interpolation), antialias=True),
                v2.CenterCrop(list(self.size)),
            ]
        )
        fitted: tuple[Any, Any] = fit(image, label)
        return fitted


def mode(interpolation: str) -> Any:
    """What torchvision calls an interpolation."""
    return package("torchvision.transforms.v2").InterpolationMode(interpolation)
