"""What is said when a trained network and the data differ in their classes or channels."""

from __future__ import annotations


def other_classes(source: str, has: int, wanted: int | None) -> ValueError:
    """A head for another number of classes than the data has.

    >>> print(other_classes("torchvision:resnet50@DEFAULT", 1000, 10))
    torchvision:resnet50@DEFAULT has 1000 classes, and the data has 10; fine-tune it on your data \
first and give the result by --weights FILE, or take data of its own classes.
    """
    return ValueError(
        f"{source} has {has} classes, and the data has {wanted}; fine-tune it on your data first "
        "and give the result by --weights FILE, or take data of its own classes."
    )


def other_channels(source: str, has: int, wanted: int | None) -> ValueError:
    """A first layer for other images than those of the data.

    >>> print(other_channels("hf:ours/net", 3, 1))
    hf:ours/net was trained on images of 3 channels, and the data has 1; convert the images, or \
give weights that were trained on such images by --weights FILE.
    """
    return ValueError(
        f"{source} was trained on images of {has} channels, and the data has {wanted}; convert the "
        "images, or give weights that were trained on such images by --weights FILE."
    )
