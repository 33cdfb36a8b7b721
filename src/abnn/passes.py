"""One pass of a network over some of its draws, in each of the ways in which that can be done.

A draw alone is loaded into the layers; several are folded into one batch. All must give the same
numbers.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from abnn.draws import Draw, noise_matrix
from abnn.folding import channels_last, clone, first_tensor, no_fused_encoder, repeat
from abnn.layout import ChannelsLast
from abnn.norm import Active, BayesNorm, Noise, NotFoldable, activated
from abnn.outputs import Inputs, Output, call, logits_of
from abnn.survey import Survey, has_hooks
from abnn.trunk import Trunk, WatchedTrunk
from abnn.weights import Weights


@dataclass(frozen=True)
class Folding:
    """How several draws share a pass, so that they equal draws that run one by one.

    Args:
        survey: what the network showed of itself.
        channels_last: whether images are laid out channels last.
        overwrite: the Bayesian layers that may overwrite their input.
        trunk: the Bayesian layers at which the trunk ends, if it runs once.
        watched: whether the trunk meets the branches again.
    """

    survey: Survey
    channels_last: bool = False
    overwrite: frozenset[int] = frozenset()
    trunk: frozenset[int] | None = None
    watched: bool = False


@dataclass(frozen=True, eq=False)
class Network:
    """A network with Bayesian norms, and how its noise and its logits are to be had.

    Args:
        backbone: the network.
        layers: its Bayesian norms by name, in the order of their noise.
        alpha, noise, class_dim, output: as of `abnn.convert`.
        channels_last: the weights of its convolutions in that order.
    """

    backbone: nn.Module
    layers: Mapping[str, BayesNorm]
    alpha: float
    noise: Noise
    class_dim: int
    output: Output | None
    channels_last: ChannelsLast = field(default_factory=ChannelsLast)

    def weights(self, draws: Sequence[Draw], eps: Tensor | None = None) -> Weights:
        """What the layers run with for these draws; `eps` is the noise if not theirs."""
        eps = self.channel_noise(draws) if eps is None else eps
        return Weights(list(self.layers.values()), draws, eps, self.alpha, self.noise)

    def channel_noise(self, draws: Sequence[Draw]) -> Tensor:
        """The noise of all layers side by side, a row a draw; zero where it is not per draw."""
        size = sum(layer.bank.form.shape.numel() for layer in self.layers.values())
        if self.noise != "channel":
            return torch.zeros(len(draws), size)
        return noise_matrix(draws, size)

    def one_by_one(self, inputs: Inputs, weights: Weights, part: range) -> Tensor:
        """One pass a draw, each of the original network with this draw's weights."""
        B, logits = first_tensor(inputs).shape[0], []
        layers = list(self.layers.values())
        for s in part:
            with activated(layers, weights.of(range(s, s + 1), B)):
                # A network that writes to its input would hand the next draw what it left.
                result = call(self.backbone, clone(inputs))
            logits.append(logits_of(result, self.output, self.class_dim))
        return torch.stack(logits)

    def together(
        self,
        batches: Sequence[Inputs],
        weights: Weights,
        part: range,
        folding: Folding,
        called: set[int] | None = None,
    ) -> Generator[Tensor, None, None]:
        """One pass a batch over part of the draws, folded sample-major into it."""
        layers, S = list(self.layers.values()), len(part)
        actives = weights.of(part, first_tensor(batches[0]).shape[0], called)
        trunk = None if folding.trunk is None else Trunk(folding.trunk)
        # Hooks that came after the proof may keep what they are shown.
        overwrite = (
            frozenset() if any(map(has_hooks, self.backbone.modules())) else folding.overwrite
        )
        for layer, active in zip(layers, actives, strict=True):
            active.trunk = trunk
            active.overwrite = layer.bank.index in overwrite
        with ExitStack() as stack:
            if folding.channels_last:
                stack.enter_context(self.channels_last.weights(self.backbone))
            stack.enter_context(activated(layers, actives))
            stack.enter_context(no_fused_encoder())
            for inputs in batches:
                if folding.channels_last:
                    inputs = channels_last(inputs)
                if folding.watched:
                    result = self.watched(inputs, actives)
                else:
                    result = call(self.backbone, inputs if trunk else repeat(inputs, S))
                logits = logits_of(result, self.output, self.class_dim)
                if logits.shape[0] % S:
                    raise NotFoldable
                yield logits.unflatten(0, (S, -1))

    def watched(self, inputs: Inputs, actives: Sequence[Active]) -> Any:
        """The network's output, its trunk run once and watched."""
        trunk = WatchedTrunk(len(first_tensor(inputs)), len(actives[0].draws))
        for active in actives:
            active.trunk = trunk
        with trunk:
            return call(self.backbone, trunk.plant(inputs))
