"""The residual networks for 32 x 32 images of He et al., "Deep Residual Learning", 2015.

6n + 2 layers: a convolution, three stages of n blocks with 16, 32 and 64 channels, and a linear
layer. Shortcuts have no parameters (the paper's option A): where a stage halves the image and
doubles the channels, they take every other pixel and pad the missing channels with zeros.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Two 3 x 3 convolutions around a shortcut: `relu(shortcut(x) + f(x))`."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        """Map `in_channels` to `channels`; a stride of 2 halves the image."""
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.stride = stride
        self.padding = (channels - in_channels) // 2

    def forward(self, x: Tensor) -> Tensor:
        """`[B, C, H, W]` -> `[B, channels, H / stride, W / stride]`."""
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))

    def shortcut(self, x: Tensor) -> Tensor:
        """The identity, or every other pixel between zero channels on both sides."""
        if self.stride == 1:
            return x
        strided = x[:, :, :: self.stride, :: self.stride]
        return F.pad(strided, (0, 0, 0, 0, self.padding, self.padding))


class CifarResNet(nn.Module):
    """Three stages of `blocks` blocks each; `cifar_resnet` makes it by its depth."""

    def __init__(self, blocks: int, num_classes: int, in_channels: int = 3) -> None:
        """Make the network with random weights."""
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks, stride=1)
        self.layer2 = _stage(16, 32, blocks, stride=2)
        self.layer3 = _stage(32, 64, blocks, stride=2)
        self.linear = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Images `[B, C, H, W]` -> logits `[B, num_classes]`."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.linear(x.mean((2, 3)))
        return logits


def cifar_resnet(depth: int = 20, num_classes: int = 10, in_channels: int = 3) -> CifarResNet:
    """The CIFAR ResNet of `depth` layers, with random weights.

    Args:
        depth: 6n + 2; the paper has 20, 32, 44, 56 and 110.
        num_classes: number of logits.
        in_channels: channels of the images.

    >>> import torch
    >>> net = cifar_resnet(20)
    >>> net(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    >>> sum(parameter.numel() for parameter in net.parameters())
    269722
    """
    blocks, rest = divmod(depth - 2, 6)
    if blocks < 1 or rest:
        raise ValueError(f"A CIFAR ResNet has 6n + 2 layers: choose 8, 14, 20, ..., not {depth}.")
    return CifarResNet(blocks, num_classes, in_channels)


def _stage(in_channels: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
    first = Block(in_channels, channels, stride)
    return nn.Sequential(first, *(Block(channels, channels, 1) for _ in range(blocks - 1)))
