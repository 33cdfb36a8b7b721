"""A residual network for images of about 28 x 28 pixels that trains in minutes on a CPU.

The basic blocks of He et al., "Deep Residual Learning", 2015, one a stage, behind a convolution
that halves the image. Shortcuts that change the shape are convolutions of their own (option B).
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions around a shortcut: `relu(shortcut(x) + f(x))`."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        """Map `in_channels` to `channels`; a stride of 2 halves the image."""
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or in_channels != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """`[B, C, H, W]` -> `[B, channels, H / stride, W / stride]`."""
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


def small_resnet(num_classes: int = 10, in_channels: int = 1, width: int = 16) -> nn.Sequential:
    """A ResNet of 8 layers, with random weights.

    Args:
        num_classes: number of logits.
        in_channels: channels of the images.
        width: channels of the first stage; the second and the third have two and four times that.

    >>> net = small_resnet()
    >>> net(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    >>> sum(parameter.numel() for parameter in net.parameters())
    77754
    """
    if width < 1 or in_channels < 1 or num_classes < 2:
        raise ValueError(
            f"A small ResNet can't have {num_classes} classes, {in_channels} channels and a width "
            f"of {width}; give at least 2, 1 and 1."
        )
    net = nn.Sequential(
        nn.Conv2d(in_channels, width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        ResidualBlock(width, width, 1),
        ResidualBlock(width, 2 * width, 2),
        ResidualBlock(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, num_classes),
    )
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out")
    return net
