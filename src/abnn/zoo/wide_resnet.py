"""The wide residual networks of Zagoruyko and Komodakis, "Wide Residual Networks", 2016.

6n + 4 convolutions: one, two for each of the n blocks of three stages, which are `width` times as
wide as 16, 32 and 64 channels, and one for the shortcut that begins a stage. Batch norm and ReLU
come before a convolution. Parts are named as in most public checkpoints: `block1.layer.0.conv1`,
`convShortcut`, `fc`.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class WideBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut: `shortcut(x) + f(x)`."""

    def __init__(self, in_channels: int, channels: int, stride: int, dropout: float) -> None:
        """Map `in_channels` to `channels`; a stride of 2 halves the image."""
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.convShortcut = (
            None
            if in_channels == channels and stride == 1
            else nn.Conv2d(in_channels, channels, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """`[B, C, H, W]` -> `[B, channels, H / stride, W / stride]`."""
        active = F.relu(self.bn1(x))
        out = self.dropout(F.relu(self.bn2(self.conv1(active))))
        # A shortcut that changes the shape starts from the activation, an identity from x itself.
        shortcut = x if self.convShortcut is None else self.convShortcut(active)
        return shortcut + self.conv2(out)  # type: ignore[no-any-return]


class Stage(nn.Module):
    """`blocks` blocks, the first of which may change the shape."""

    def __init__(
        self, in_channels: int, channels: int, blocks: int, stride: int, dropout: float
    ) -> None:
        """Make the blocks."""
        super().__init__()
        first = WideBlock(in_channels, channels, stride, dropout)
        rest = (WideBlock(channels, channels, 1, dropout) for _ in range(blocks - 1))
        self.layer = nn.Sequential(first, *rest)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, C, H, W]` -> `[B, channels, H / stride, W / stride]`."""
        out: Tensor = self.layer(x)
        return out


class WideResNet(nn.Module):
    """Three stages of `blocks` blocks each; `wide_resnet` makes it by its depth."""

    def __init__(
        self, blocks: int, width: int, num_classes: int, in_channels: int, dropout: float
    ) -> None:
        """Make the network with random weights."""
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 16, 3, padding=1, bias=False)
        self.block1 = Stage(16, 16 * width, blocks, 1, dropout)
        self.block2 = Stage(16 * width, 32 * width, blocks, 2, dropout)
        self.block3 = Stage(32 * width, 64 * width, blocks, 2, dropout)
        self.bn1 = nn.BatchNorm2d(64 * width)
        self.fc = nn.Linear(64 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Images `[B, C, H, W]` -> logits `[B, num_classes]`."""
        x = self.block3(self.block2(self.block1(self.conv1(x))))
        logits: Tensor = self.fc(F.relu(self.bn1(x)).mean((2, 3)))
        return logits


def wide_resnet(
    depth: int = 28,
    width: int = 10,
    num_classes: int = 10,
    in_channels: int = 3,
    dropout: float = 0.0,
) -> WideResNet:
    """The wide ResNet of `depth` convolutions, with random weights.

    Args:
        depth: 6n + 4; the paper has 16, 22, 28 and 40.
        width: how many times as wide as a ResNet for CIFAR.
        num_classes: number of logits.
        in_channels: channels of the images.
        dropout: probability between the two convolutions of a block; 0.3 in the paper, where it
            has any.

    >>> wide_resnet(10, 1)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    blocks, rest = divmod(depth - 4, 6)
    if blocks < 1 or rest:
        raise ValueError(
            f"A wide ResNet has 6n + 4 convolutions: choose 10, 16, 22, ..., not {depth}."
        )
    return WideResNet(blocks, width, num_classes, in_channels, dropout)


def wrn28_10(num_classes: int = 10, in_channels: int = 3, dropout: float = 0.0) -> WideResNet:
    """WideResNet-28-10, with random weights: 36.5 M parameters.

    Args:
        num_classes: number of logits.
        in_channels: channels of the images.
        dropout: probability between the two convolutions of a block.

    >>> with torch.device("meta"):
    ...     net = wrn28_10()
    >>> sum(parameter.numel() for parameter in net.parameters())
    36479194
    """
    return wide_resnet(28, 10, num_classes, in_channels, dropout)
