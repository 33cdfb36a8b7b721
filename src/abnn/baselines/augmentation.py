"""Test-time augmentation (Ashukha et al., ICLR 2020, arXiv:2002.06470)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from abnn.baselines.method import Method
from abnn.draws import Draw, chunks, noise_matrix, number, whole_number
from abnn.folding import (
    agree,
    any_half,
    first_tensor,
    no_fused_encoder,
    repeat,
    signature,
    take,
)
from abnn.inference import inference
from abnn.norm import NotFoldable
from abnn.outputs import Inputs, Output, arguments

# What a pass of several members may hold: rows, and numbers of the input.
_ROWS, _NUMBERS = 64, 2**23


class TestTimeAugmentation(Method):
    """One network, asked about noisy copies of the input, every second one mirrored.

        p(y | x) = 1/S sum_s softmax(net(flip_s(x) + std * eps_s))[y],   eps_s ~ N(0, I)

    The noise alone is what the ABNN paper compares with; `flip=False` leaves it at that, which is
    also right where a mirrored image is another thing, as a letter. All members are augmented: the
    plain input is none of them. Nothing is trained.

    A noise is as large as one input, and every example gets the same S of them, so that what is
    predicted of an example does not depend on what else is in its batch. Predictions of different
    examples are therefore not independent, over draws, of each other.

    Args:
        net: the network; shared, not copied.
        std: of the noise, in the units of what the network is given: of normalised images, 0.08 is
            8 % of the standard deviation of a channel, about 5 of 255 grey levels.
        flip: mirror images `[B, C, H, W]` from left to right in draws 1, 3, 5, ...; logits of
            pixels are mirrored back. Inputs of other shapes are never mirrored.
        output: finds the logits in what the network returns, where that is not obvious.
        class_dim: the dimension of the classes in the logits.

    >>> net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 5))
    >>> augmented, x = TestTimeAugmentation(net), torch.randn(2, 3, 8, 8)
    >>> augmented.predict(x, samples=8, seed=0).samples_used
    8
    >>> mirrored = TestTimeAugmentation(net, std=0).predict(x, samples=2, keep_members=True).members
    >>> bool((mirrored[1] - net(x.flip(-1)).softmax(1)).abs().max() < 1e-6)
    True
    """

    shared = "net"
    __test__ = False  # by its name, pytest would take the class for tests

    def __init__(
        self,
        net: nn.Module,
        std: float = 0.08,
        flip: bool = True,
        output: Output | None = None,
        class_dim: int = 1,
    ) -> None:
        super().__init__(net, output, class_dim)
        if not isinstance(flip, bool):
            raise ValueError(f"flip={flip!r} must be True or False.")
        self.net, self.std, self.flip = net, number("std", std, least=0), flip
        self._folds: dict[Any, bool] = {}

    def member_logits(self, x: Inputs, samples: int = 16, seed: int = 0) -> Iterator[Tensor]:
        """The logits for the augmented inputs, `[s, B, K, ...]`, some draws at a time.

        Args:
            x: a tensor, a tuple of arguments, or a mapping; its first tensor gets the noise.
            samples: how many augmented inputs.
            seed: the same seed gives the same noise and the same prediction of an example.
        """
        samples, seed = whole_number("samples", samples, least=1), whole_number("seed", seed)
        first = self._augmented(x)
        at_once = min(_ROWS // max(1, len(first)), _NUMBERS // max(1, first.numel()), samples)
        if at_once > 1 and not self._is_foldable(x):
            at_once = 1
        draws = [Draw(seed, 0, index) for index in range(samples)]
        for group in chunks(draws, max(1, at_once)):
            yield self._logits(x, group, self.std)

    def _augmented(self, x: Inputs) -> Tensor:
        """The input that is augmented, or an error that says why it can't be."""
        first = first_tensor(x)
        if not first.is_floating_point():
            raise ValueError(
                f"The input is of {str(first.dtype).removeprefix('torch.')}, to which no noise can "
                "be added, as of tokens; test-time augmentation is for floating-point inputs, "
                "such as images."
            )
        others = [leaf for leaf in pytree.tree_leaves(arguments(x)) if isinstance(leaf, Tensor)][1:]
        if self._mirrors(first) and any(other.ndim > 2 for other in others):
            raise ValueError(
                "Only the first input is mirrored, and another that seems to belong to its pixels "
                "is not; use flip=False."
            )
        return first

    def _mirrors(self, first: Tensor) -> bool:
        return self.flip and first.ndim == 4

    def _logits(self, x: Inputs, draws: Sequence[Draw], std: float) -> Tensor:
        """The logits of some draws in one pass, `[s, B, K, ...]`."""
        first, S = first_tensor(x), len(draws)
        mirrored = torch.tensor([self._mirrors(first) and draw.index % 2 == 1 for draw in draws])
        copies = torch.stack([first.flip(-1) if flip else first for flip in mirrored])
        if std:
            noise = noise_matrix(draws, first[:1].numel()).view(S, 1, *first.shape[1:])
            copies = copies + std * noise.to(first)
        with no_fused_encoder():
            logits = self.network_logits(_with_first(repeat(x, S), copies.flatten(0, 1)))
        if S > 1 and logits.shape[0] != S * len(first):
            raise NotFoldable
        logits = logits.reshape(S, -1, *logits.shape[1:]) if S > 1 else logits.unsqueeze(0)
        places = logits.shape[3:]
        if not self._mirrors(first) or math.prod(places) == 1:
            return logits
        if len(places) != 2:
            raise ValueError(
                f"The logits of an image have the shape {list(logits.shape[2:])}, in which it is "
                "not known what is left and right, so they can't be mirrored back; use flip=False."
            )
        rows = mirrored.to(logits.device).view(S, *[1] * (logits.ndim - 1))
        return torch.where(rows, logits.flip(-1), logits)

    def _is_foldable(self, x: Inputs) -> bool:
        """Whether several members can run in one pass; found out once for every kind of input."""
        kind = signature(x)
        if kind not in self._folds:
            with inference(self):
                self._folds[kind] = self._trial(x)
            if not self._folds[kind]:
                warnings.warn(
                    "The members of the TestTimeAugmentation can't run in one pass (the network "
                    "mixes rows, or its batch is not the leading dimension), so they run one after "
                    "another.",
                    stacklevel=2,
                )
        return self._folds[kind]

    def _trial(self, x: Inputs) -> bool:
        """Try it on two examples, with noise so strong that members can't be taken for others."""
        x = take(x, torch.tensor([0, len(first_tensor(x)) - 1]))
        draws, strong = [Draw(0, 0, index) for index in range(3)], 1 + self.std
        alone = torch.cat([self._logits(x, [draw], strong) for draw in draws])
        try:
            together = self._logits(x, draws, strong)
        except (NotFoldable, RuntimeError):  # whatever the network does with more rows
            return False
        return agree(together, alone, any_half([alone]))


def _with_first(inputs: Inputs, tensor: Tensor) -> Inputs:
    """The inputs with another first tensor."""
    leaves, structure = pytree.tree_flatten(arguments(inputs))
    at = next(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    args, kwargs = pytree.tree_unflatten([*leaves[:at], tensor, *leaves[at + 1 :]], structure)
    return kwargs or args
