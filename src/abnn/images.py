"""The images of batches: where they are, and how they were normalised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from abnn.batches import inputs_of
from abnn.outputs import describe

Statistic = float | Sequence[float] | Tensor
_SIDE = 224  # pixels of the longer side of an image that is kept to be shown


def images_of(batch: Any) -> Tensor:
    """The images of a batch: its first input of four dimensions.

    Args:
        batch: what `evaluate` takes, such as `(x, y)` or `{"pixel_values": x, "labels": y}`.

    >>> images_of((torch.zeros(2, 3, 8, 8), torch.tensor([0, 1]))).shape
    torch.Size([2, 3, 8, 8])
    """
    for leaf in pytree.tree_leaves(plain(inputs_of(batch))):
        if isinstance(leaf, Tensor) and leaf.ndim == 4 and leaf.is_floating_point():
            return leaf
    raise ValueError(
        f"The batch is {describe(batch)}, in which no images were found; give batches with a "
        "floating-point tensor [B, C, H, W]."
    )


def plain(batch: Any) -> Any:
    """A batch in which pytree finds the leaves: it knows no mappings but dictionaries.

    >>> plain({"x": 1})
    {'x': 1}
    """
    return dict(batch) if isinstance(batch, Mapping) else batch


def statistic(name: str, value: Statistic) -> Tensor:
    """A mean or a standard deviation of images as numbers: one, or one a channel.

    >>> statistic("std", (0.2, 0.3, 0.2))
    tensor([0.2000, 0.3000, 0.2000], dtype=torch.float64)
    """
    try:
        numbers = torch.as_tensor(value, dtype=torch.float64).detach().flatten()
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.empty(0)
    if not len(numbers) or not bool(numbers.isfinite().all()):
        raise ValueError(f"{name}={value!r} is no number, nor one a channel; give these.")
    return numbers


def to_bytes(image: Tensor, mean: Tensor | None, std: Tensor | None) -> Tensor:
    """An image `[C, H, W]` as whole numbers from 0 to 255, its longer side at most 224 pixels.

    >>> to_bytes(torch.tensor([[[0.0, 1.0]]]), None, None)
    tensor([[[  0, 255]]], dtype=torch.uint8)
    """
    image = image.detach().float().cpu()
    if std is not None:
        image = image * std.view(-1, 1, 1)
    if mean is not None:
        image = image + mean.view(-1, 1, 1)
    if mean is None and std is None and not (image.min() >= 0 and image.max() <= 1):
        low, high = image.aminmax()
        image = (image - low) / (high - low).clamp_min(torch.finfo(image.dtype).tiny)
    side = max(image.shape[1:])
    if side > _SIDE:
        size = [max(1, round(_SIDE * length / side)) for length in image.shape[1:]]
        image = F.interpolate(image[None], size, mode="area")[0]
    return (255 * image.clamp(0, 1)).round().to(torch.uint8)


def images_in(batch: Any) -> Tensor | None:
    """The images of a batch that can be shown, if it has any: grey ones, or of three colours.

    >>> images_in((torch.zeros(2, 3, 8, 8), torch.tensor([0, 1]))).shape
    torch.Size([2, 3, 8, 8])
    """
    try:
        images = images_of(batch)
    except ValueError:
        return None
    return images if images.shape[1] in (1, 3) else None
