"""Sets of images of bytes: as a network takes them, and brought to the shape of others."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

_LUMINANCE = (0.299, 0.587, 0.114)  # of red, green and blue, as in ITU-R BT.601


class Images(Dataset[Any]):
    """Images of bytes, as floats from 0 to 1 with the channels first, normalised and augmented.

    Args:
        x: `[N, H, W, C]`, `[N, H, W]` or `[N, C, H, W]`, of bytes.
        y: labels.
        mean, std: to normalise by; none: not at all.
        flip: whether half of the images are mirrored.

    >>> images = Images(torch.full((4, 8, 8, 3), 255, dtype=torch.uint8), torch.zeros(4).long())
    >>> images[0][0].shape, images[0][0].max()
    (torch.Size([3, 8, 8]), tensor(1.))
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
        flip: bool = False,
    ) -> None:
        self.x = channels_first(x)
        self.y, self.flip = y, flip
        channels = self.x.shape[1]
        if mean and len(mean) != channels:
            raise ValueError(f"The images have {channels} channels, but --mean has {len(mean)}.")
        self.mean = torch.tensor(mean or [0.0]).reshape(-1, 1, 1)
        self.std = torch.tensor(std or [1.0]).reshape(-1, 1, 1)

    def __len__(self) -> int:
        """How many images there are."""
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        """An image and its label."""
        x = (self.x[i].float() / 255 - self.mean) / self.std
        return x.flip(-1) if self.flip and torch.rand(()) < 0.5 else x, self.y[i]

    def plain(self) -> Images:
        """The same images, none of them mirrored."""
        other = copy.copy(self)
        other.flip = False
        return other


def channels_first(x: Tensor) -> Tensor:
    """Images `[N, C, H, W]`, of `[N, H, W]` or with the channels wherever they are.

    >>> channels_first(torch.zeros(9, 8, 8, 3)).shape
    torch.Size([9, 3, 8, 8])
    """
    x = x.unsqueeze(1) if x.ndim == 3 else x
    return x.movedim(-1, 1) if x.shape[-1] in (1, 3, 4) else x


def conformed(images: Tensor, shape: Sequence[int]) -> tuple[Tensor, str]:
    """Images of bytes `[N, C, H, W]` brought to another shape `[C, H, W]`, and what that took.

    >>> images, note = conformed(torch.zeros(9, 3, 32, 32, dtype=torch.uint8), (1, 28, 28))
    >>> images.shape, note
    (torch.Size([9, 1, 28, 28]), 'grey by luminance; resized from 32 x 32 to 28 x 28')
    """
    C, size = shape[0], list(shape[1:])
    before, old = images.shape[1], list(images.shape[2:])
    if before != C and {before, C} != {1, 3}:
        raise ValueError(
            f"The images have {before} channels, and the in-distribution ones {C}; only grey "
            "images and those of three colours can be brought to each other."
        )
    done = [] if before == C else ["grey by luminance" if C == 1 else "grey in three channels"]
    if old != size:
        text = f"resized from {old[0]} x {old[1]} to {size[0]} x {size[1]}"
        done.append(text + ("" if old[0] * size[1] == old[1] * size[0] else ", out of proportion"))
    if not done:
        return images, "as it is"
    grey = before == 3 and C == 1
    parts = []
    for some in images.split(256):  # as floats they take four times the memory, and more
        part = some.float()
        if grey:
            part = torch.einsum("nchw,c->nhw", part, torch.tensor(_LUMINANCE)).unsqueeze(1)
        if old != size:
            part = F.interpolate(part, size, mode="bilinear", antialias=True)
        # In-distribution images are of whole bytes, and by that OOD ones are not to be told.
        parts.append(part.round().clamp(0, 255).to(torch.uint8))
    return torch.cat(parts).expand(-1, C, -1, -1), "; ".join(done)
