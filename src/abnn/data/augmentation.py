"""The augmentations of the recipes by their names, made of torchvision's and timm's.

Their random numbers come from the global generators of torch, numpy and Python, which are seeded
for every epoch (`abnn.order`), and in every worker of a `DataLoader`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from abnn.data.packages import package
from abnn.data.view import Fitted, View, mode

Step = Callable[[Any, Any], tuple[Any, Any]]

IGNORED = -100  # the label of what does not count

# A crop of a small image is the image shifted by a few pixels; a large one has parts worth seeing.
_SMALL = 64
_PADDING = 4
_SCALES = (0.5, 2.0)
_JITTER = 0.5  # of brightness, contrast and saturation

_RAND_AUGMENT = {"medium": "rand-m9-n2-mstd1", "a3": "rand-m6-mstd0.5-inc1"}
MIXING: dict[str, dict[str, float]] = {
    "medium": {"mixup_alpha": 0.5, "cutmix_alpha": 0.2, "label_smoothing": 0.1},
    "a3": {"mixup_alpha": 0.1, "cutmix_alpha": 1.0, "label_smoothing": 0.0},
}


def steps_of(view: View, size: tuple[int, int], channels: int, maps: bool) -> list[Step]:
    """What is done to an image and its label, in this order; mirroring excepted.

    Args:
        view: what is wanted.
        size: of the network's inputs.
        channels: of the images.
        maps: whether labels are maps, which move with the images.

    >>> [type(step).__name__ for step in steps_of(View(size=(8, 8)), (8, 8), 3, maps=False)]
    ['Fitted']
    """
    names = set(view.augmentation)
    whole = sorted(names & set(MIXING))
    if maps and whole:
        raise ValueError(
            f"augmentation {whole[0]!r} is for images of one label each, not for label maps; take "
            "hflip, random_crop, random_scale or color_jitter."
        )
    v2 = package("torchvision.transforms.v2")
    mean = view.mean or (0.5,) * channels  # the colour that comes in where an image is moved away
    if "a3" in names:
        return _a3(size, mean)
    steps = _placed(view, size, maps)
    if "color_jitter" in names:
        steps.append(v2.ColorJitter(_JITTER, _JITTER, _JITTER))
    if "medium" in names:
        policy = {"img_mean": tuple(round(255 * number) for number in mean)}
        rand_augment = package("timm.data.auto_augment").rand_augment_transform
        steps.append(_OfImages([rand_augment(_RAND_AUGMENT["medium"], policy)]))
    return steps


def mixing_of(augmentation: Sequence[str], classes: int) -> Any:
    """timm's `Mixup`, or None where batches are not mixed.

    >>> mixing_of(["hflip"], 10) is None, mixing_of(["medium"], 10).switch_prob
    (True, 0.5)
    """
    name = next((name for name in augmentation if name in MIXING), None)
    if name is None:
        return None
    mixup = package("timm.data.mixup").Mixup
    return mixup(switch_prob=0.5, num_classes=classes, **MIXING[name])


def _placed(view: View, size: tuple[int, int], maps: bool) -> list[Step]:
    """What of the image is seen, and how large."""
    v2, names = package("torchvision.transforms.v2"), view.augmentation
    how = mode(view.interpolation)
    cut = v2.RandomCrop(size, pad_if_needed=True, fill=_fill())
    if "random_scale" in names:
        # By the width first, and the height: torchvision's own order here.
        return [v2.ScaleJitter((size[1], size[0]), _SCALES, how, antialias=True), cut]
    if "random_crop" not in names:
        return [] if view.size is None else [Fitted(view)]
    if maps:
        return [cut]
    if min(size) > _SMALL:
        return [v2.RandomResizedCrop(size, interpolation=how, antialias=True)]
    fitted: list[Step] = [] if view.size is None else [Fitted(view)]
    return [*fitted, v2.RandomCrop(size, padding=_PADDING)]


def _a3(size: tuple[int, int], mean: tuple[float, ...]) -> list[Step]:
    """Procedure A3 of Wightman et al. 2021 (arXiv:2110.00476), but for what mixes batches."""
    parts = package("timm.data").create_transform(
        size,
        is_training=True,
        auto_augment=_RAND_AUGMENT["a3"],
        interpolation="random",
        mean=mean,
        separate=True,
    )
    return [_OfImages(parts[:2])]  # the third makes floats, as `Images` does


class _OfImages:
    """What timm does, which is to Pillow's images and knows no labels."""

    def __init__(self, steps: Sequence[Any]) -> None:
        self.steps = steps

    def __call__(self, image: Any, label: Any) -> tuple[Any, Any]:
        functional = package("torchvision.transforms.v2.functional")
        if not isinstance(image, package("PIL.Image").Image):
            image = functional.to_pil_image(image)
        for step in self.steps:
            image = step(image)
        return image, label


def _fill() -> dict[Any, int]:
    return {package("torchvision.tv_tensors").Mask: IGNORED, "others": 0}
