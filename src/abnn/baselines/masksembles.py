"""Masksembles (Durasov et al., CVPR 2021, arXiv:2012.08334)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from abnn.baselines.members import Members, change_first
from abnn.baselines.method import Method
from abnn.batches import device_of
from abnn.draws import generator, number, whole_number
from abnn.outputs import Inputs, Output
from abnn.surgery import copied, weighted_layers, widths

# From 8 channels on, rounding leaves the overlap of masks within 0.1 of what the scale asks for.
LEAST_WIDTH, LARGEST_SCALE = 8, 6.0


class Masksembles(Method):
    """M members that share all weights, each of which sees some channels: fixed dropout masks.

        y_m = W (x * mask_m) + b

    in every convolution and linear layer but the first, whose channels are the data's, and but
    those of fewer than 8 channels, which are too few to choose from. All masks of a layer have as
    many ones, every channel is in one of them at least, and two of them share about
    1 / (2 scale - 1) of the channels that either has. What a mask keeps is not scaled up: nothing
    is masked otherwise at prediction than in training. While it is trained, every member gets an
    equal share of each batch. All members predict in one pass.

    A layer whose weight is read without calling it is not masked: the projections of
    `nn.MultiheadAttention`, and those of torchvision's Swin and timm's BEiT.

    Args:
        net: the network, with the weights that training starts from; copied.
        members: how many there are.
        scale: how different the masks are, from 1, where every member is the network itself, to 6.
        seed: the same seed gives the same masks.
        output: finds the logits in what the network returns, where that is not obvious.
        class_dim: the dimension of the classes in the logits.

    >>> net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    >>> ensemble = Masksembles(net, members=4)
    >>> ensemble.net[2].ensemble_masks.sum(1)
    tensor([9, 9, 9, 9])
    >>> ensemble.predict(torch.randn(2, 4)).samples_used
    4
    """

    def __init__(
        self,
        net: nn.Module,
        members: int = 4,
        scale: float = 2.0,
        seed: int = 0,
        output: Output | None = None,
        class_dim: int = 1,
    ) -> None:
        super().__init__(net, output, class_dim)
        self._members = Members(members)
        self.members = self._members.count
        self.scale = number("scale", scale, least=1, most=LARGEST_SCALE)
        self.seed = whole_number("seed", seed)
        if not _maskable(net):
            raise ValueError(
                f"No layer of the {type(net).__name__} but its first has {LEAST_WIDTH} channels "
                "or more to mask; give a wider network."
            )
        self.net = copied(net)
        for index, layer in _maskable(self.net).items():
            numbers = generator("init", self.seed, index)
            masks = masks_of(widths(layer)[0], self.members, self.scale, numbers)
            layer.register_buffer("ensemble_masks", masks.to(device_of(layer)))
            layer.register_forward_pre_hook(_Mask(self._members), with_kwargs=True)

    def member_logits(self, x: Inputs) -> Iterator[Tensor]:
        """The logits of the members, `[M, B, K, ...]` where they run in one pass."""
        return self._members.logits(self, x)

    def training_logits(self, inputs: Inputs) -> Tensor:
        """The logits of a batch that the members share."""
        return self._members.training_logits(self, inputs)


def masks_of(width: int, members: int, scale: float, numbers: np.random.Generator) -> Tensor:
    """Masks `[M, width]` of equally many ones, which leave no position out.

    Each is drawn from somewhat more positions than there are; masks that together hit `width` of
    them are kept, and what no mask hits is dropped.

    >>> masks = masks_of(16, 4, 2.0, generator("init", 0))
    >>> masks.sum(1).tolist(), bool(masks.any(0).all())
    ([9, 9, 9, 9], True)
    """

    def hit(ones: float, positions: float) -> float:
        return positions * (1 - (1 - ones / positions) ** members)

    ones = max(round(width / hit(1, scale)), math.ceil(width / members))
    low, high = ones, 1000 * width
    while low < high:  # the fewest positions of which the masks hit about `width`
        middle = (low + high) // 2
        low, high = (low, middle) if hit(ones, middle) > width - 0.5 else (middle + 1, high)
    while True:  # that they hit exactly so many has a chance of about 1 / sqrt(width)
        order = numbers.random((members, low)).argsort(1)
        masks = order < ones
        masks = masks[:, masks.any(0)]
        if masks.shape[1] == width:
            return torch.from_numpy(masks.copy())


class _Mask:
    """Masks what goes into a layer."""

    def __init__(self, members: Members) -> None:
        self.members = members

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return change_first(
            lambda x: x * self.members.spread(layer.ensemble_masks, layer, x), args, kwargs
        )


def _maskable(net: nn.Module) -> dict[int, nn.Module]:
    """The layers that get masks, by their place in the network."""
    layers = enumerate(weighted_layers(net).values())
    return {i: layer for i, layer in layers if i > 0 and widths(layer)[0] >= LEAST_WIDTH}
