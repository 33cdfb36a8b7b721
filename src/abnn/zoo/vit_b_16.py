"""ViT-B/16 of Dosovitskiy et al., "An Image is Worth 16x16 Words", 2020, as torchvision has it."""

from __future__ import annotations

from torch import nn

from abnn.zoo.extras import package


def vit_b_16(num_classes: int = 1000, image_size: int = 224) -> nn.Module:
    """The vision transformer of 12 layers on patches of 16 x 16, with random weights.

    It has 86.6 M parameters for 1000 classes; images have three channels.

    Args:
        num_classes: number of logits.
        image_size: height and width of the images, a multiple of 16.

    >>> with torch.device("meta"):
    ...     net = vit_b_16()
    >>> sum(parameter.numel() for parameter in net.parameters())
    86567656
    """
    if image_size < 16 or image_size % 16:
        raise ValueError(
            f"ViT-B/16 cuts images into patches of 16 x 16, so image_size={image_size} must be a "
            "multiple of 16."
        )
    models = package("torchvision").models
    net: nn.Module = models.vit_b_16(weights=None, num_classes=num_classes, image_size=image_size)
    return net
