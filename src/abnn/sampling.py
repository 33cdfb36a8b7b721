"""Run draws through a network: one loaded into its layers, or several folded into one batch.

The two must give the same numbers. Whether they do is tried on the network itself, once for every
kind of input, and a network that can't share a batch between draws runs them one by one.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from abnn.draws import Draw, channel_noise
from abnn.folding import agree, any_half, first_tensor, head, no_fused_encoder, repeat, signature
from abnn.norm import Active, BayesNorm, Noise, NotFoldable, activated, sample_gamma
from abnn.outputs import Inputs, Output, call, logits_of

# Draws are handed to the layers of a network, so two threads can't run one network at once.
_RUNNING = threading.RLock()


@dataclass(frozen=True, eq=False)
class Sampler:
    """A network with Bayesian norms, and how its noise and its logits are to be had.

    Args:
        backbone: the network.
        layers: its Bayesian norms by name, in the order of their noise.
        alpha, noise, class_dim, output: as of `abnn.convert`.
        foldable: what is known of kinds of input: whether several draws can share a batch.
    """

    backbone: nn.Module
    layers: Mapping[str, BayesNorm]
    alpha: float
    noise: Noise
    class_dim: int
    output: Output | None
    foldable: dict[Any, bool]

    def logits(self, inputs: Inputs, draws: Sequence[Draw]) -> Tensor:
        """Logits of the draws, `[S, B, K, ...]`: together where that is right, else one by one."""
        first = first_tensor(inputs)
        if first.ndim == 0 or first.shape[0] == 0:
            raise ValueError(
                f"The input has shape {tuple(first.shape)}: there is no example in it."
            )
        with _RUNNING:
            if self.noise == "example" and not self.is_foldable(inputs):
                raise ValueError(
                    "noise='example' needs norms that see the batch as their leading dimension, "
                    "which this network's do not; use noise='channel'."
                )
            noise = self.channel_noise(draws)
            if len(draws) > 1 and self._check_foldable(inputs):
                try:
                    return self._together(inputs, draws, noise)
                except NotFoldable:  # inputs of this kind were fine so far, these are not
                    self.foldable[signature(inputs)] = False
            return self._one_by_one(inputs, draws, noise)

    def channel_noise(self, draws: Sequence[Draw]) -> list[Tensor]:
        """For every layer the noise of all draws, `[S, *shape]`; zero where it is not per draw."""
        shapes = [layer.bank.form.shape for layer in self.layers.values()]
        if self.noise != "channel":
            return [torch.zeros(len(draws), *shape) for shape in shapes]
        rows = [channel_noise(draw, [shape.numel() for shape in shapes]) for draw in draws]
        stacked = (torch.stack(column) for column in zip(*rows, strict=True))
        return [e.reshape(len(draws), *shape) for e, shape in zip(stacked, shapes, strict=True)]

    def actives(
        self,
        draws: Sequence[Draw],
        noise: Sequence[Tensor],
        batch: int,
        called: set[int] | None = None,
    ) -> list[Active]:
        """For every layer what it is to run with; `called` gathers the layers that ran."""
        modes = [draw.mode for draw in draws]
        actives = []
        for layer, eps in zip(self.layers.values(), noise, strict=True):
            bank = layer.bank
            gamma = bank.gamma[modes]
            weight = sample_gamma(gamma, eps.to(gamma), self.alpha, bank.form.offset)
            bias, mean, var = (
                None if rows is None else rows[modes] for rows in (bank.beta, bank.mean, bank.var)
            )
            actives.append(
                Active(draws, weight, bias, mean, var, batch, self.noise, self.alpha, called)
            )
        return actives

    def _one_by_one(self, inputs: Inputs, draws: Sequence[Draw], noise: Sequence[Tensor]) -> Tensor:
        """One pass a draw, each of the original network with this draw's weights."""
        B, logits = first_tensor(inputs).shape[0], []
        for s, draw in enumerate(draws):
            actives = self.actives([draw], [eps[s : s + 1] for eps in noise], B)
            with activated(list(self.layers.values()), actives):
                result = call(self.backbone, inputs)
            logits.append(logits_of(result, self.output, self.class_dim))
        return torch.stack(logits)

    def _together(
        self,
        inputs: Inputs,
        draws: Sequence[Draw],
        noise: Sequence[Tensor],
        called: set[int] | None = None,
    ) -> Tensor:
        """One pass over S copies of the inputs, sample-major."""
        B, S = first_tensor(inputs).shape[0], len(draws)
        actives = self.actives(draws, noise, B, called)
        with activated(list(self.layers.values()), actives), no_fused_encoder():
            result = call(self.backbone, repeat(inputs, S))
        logits = logits_of(result, self.output, self.class_dim)
        if logits.shape[0] % S:
            raise NotFoldable
        members: Tensor = logits.unflatten(0, (S, -1))
        return members

    # Whether draws can share a batch

    def is_foldable(self, inputs: Inputs) -> bool:
        """Whether several draws can run as one larger batch: see `ABNN.is_foldable`."""
        key = signature(inputs)
        if key not in self.foldable:
            # With strong noise a mistake is far larger than rounding.
            probe = replace(self, alpha=0.3, noise="channel")
            with torch.no_grad(), _evaluating(self.layers.values()):
                verdict = probe._try_folding(inputs)
            if verdict is None:
                return False
            self.foldable[key] = verdict
        return self.foldable[key]

    def _check_foldable(self, inputs: Inputs) -> bool:
        """As `is_foldable`, but says so the first time it is not."""
        known = signature(inputs) in self.foldable
        foldable = self.is_foldable(inputs)
        if not known and not foldable and signature(inputs) in self.foldable:
            warnings.warn(
                "Draws of this network can't share a batch: its batch is not the leading "
                "dimension, it mixes examples, or it uses a norm's weight without calling the "
                "norm. Predictions are right, but run one draw at a time; a batch-first version "
                "of the network would be faster.",
                stacklevel=6,  # the caller of predict
            )
        return foldable

    def _try_folding(self, inputs: Inputs) -> bool | None:
        """Whether folding is right; None if outputs that are not finite do not tell."""
        if first_tensor(inputs).shape[0] > 2:
            try:
                return self._folding_is_right(head(inputs, 2))
            except Exception:  # a network may not take fewer rows: all of them, then
                pass
        return self._folding_is_right(inputs)

    def _folding_is_right(self, inputs: Inputs) -> bool | None:
        modes = len(next(iter(self.layers.values())).bank.gamma)
        draws = [Draw(0, index % modes, index, "probe") for index in range(3)]
        noise = self.channel_noise(draws)
        one_by_one = self._one_by_one(inputs, draws, noise)
        if not one_by_one.isfinite().all():
            return None
        called: set[int] = set()
        try:
            together = self._together(inputs, draws, noise, called)
        except Exception:  # whatever the network says to a batch three times as large
            return False
        if self._is_bypassed(inputs, draws[:1], noise, called):
            return False
        leaves = (*self.backbone.parameters(), *self.backbone.buffers(), first_tensor(inputs))
        return agree(together, one_by_one, any_half(leaves))

    def _is_bypassed(
        self, inputs: Inputs, draw: Sequence[Draw], noise: Sequence[Tensor], called: set[int]
    ) -> bool:
        """Whether a norm that was not called changes the output all the same."""
        if len(called) == len(noise):
            return False
        only_uncalled = [0 * eps if i in called else eps for i, eps in enumerate(noise)]
        moved = self._one_by_one(inputs, draw, only_uncalled)
        still = replace(self, alpha=0.0)._one_by_one(inputs, draw, only_uncalled)
        return not torch.equal(moved, still)


@contextmanager
def _evaluating(layers: Iterable[BayesNorm]) -> Iterator[None]:
    """Running statistics stay as they are; everything else of a backbone is in eval mode anyway."""
    before = [(layer, layer.training) for layer in layers]
    try:
        for layer, _ in before:
            layer.training = False
        yield
    finally:
        for layer, training in before:
            layer.training = training
