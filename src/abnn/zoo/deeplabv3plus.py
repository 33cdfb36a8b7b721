"""DeepLabV3+ of Chen et al., 2018, from segmentation-models-pytorch."""

from __future__ import annotations

from torch import nn

from abnn.zoo.extras import package


def deeplabv3plus(num_classes: int = 19, in_channels: int = 3) -> nn.Module:
    """DeepLabV3+ with a ResNet-50 as its encoder, with random weights: 26.7 M parameters.

    Args:
        num_classes: number of logits a pixel: 13 for StreetHazards, 17 for BDD-Anomaly (19 where
            its labels keep the numbers of Cityscapes), 15 for MUAD.
        in_channels: channels of the images, whose sides must be multiples of 16.

    >>> with torch.device("meta"):
    ...     net = deeplabv3plus(13)
    >>> net(torch.zeros(2, 3, 64, 96, device="meta")).shape
    torch.Size([2, 13, 64, 96])
    """
    smp = package("segmentation_models_pytorch", install="segmentation-models-pytorch")
    net: nn.Module = smp.DeepLabV3Plus(
        "resnet50", encoder_weights=None, in_channels=in_channels, classes=num_classes
    )
    return net
