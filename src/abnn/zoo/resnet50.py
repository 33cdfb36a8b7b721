"""ResNet-50 of He et al., "Deep Residual Learning", 2015, as torchvision has it."""

from __future__ import annotations

from torch import nn

from abnn.zoo.extras import package


def resnet50_imagenet(num_classes: int = 1000, in_channels: int = 3) -> nn.Module:
    """The ResNet-50 for ImageNet, with random weights: 25.56 M parameters for 1000 classes.

    Args:
        num_classes: number of logits.
        in_channels: channels of the images.

    >>> with torch.device("meta"):
    ...     net = resnet50_imagenet()
    >>> sum(parameter.numel() for parameter in net.parameters())
    25557032
    """
    net: nn.Module = package("torchvision").models.resnet50(weights=None, num_classes=num_classes)
    if in_channels != 3:
        net.conv1 = _first(nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False))
    return net


def resnet50(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """The ResNet-50 for images of 32 x 32, with random weights: 23.52 M parameters for 10 classes.

    A 3 x 3 convolution of stride 1 takes the place of the first one and of the max pooling after
    it, which together leave a quarter of the height and the width.

    Args:
        num_classes: number of logits.
        in_channels: channels of the images.

    >>> with torch.device("meta"):
    ...     net = resnet50()
    >>> sum(parameter.numel() for parameter in net.parameters())
    23520842
    """
    net = resnet50_imagenet(num_classes)
    net.conv1 = _first(nn.Conv2d(in_channels, 64, 3, padding=1, bias=False))
    net.maxpool = nn.Identity()
    return net


def _first(conv: nn.Conv2d) -> nn.Conv2d:
    """With the initial values that torchvision gives to the others."""
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv
