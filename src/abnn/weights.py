"""The sampled weights of all layers of a network at once.

A network has many small norms, and calling an operation costs more than the few thousand numbers
it works on. So gamma, beta and statistics of all layers stand side by side, in matrices with a row
for every draw, and every layer gets its columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from abnn.draws import Draw
from abnn.norm import Active, BayesNorm, Noise, sample_gamma, scale_and_shift


@dataclass(frozen=True)
class _Group:
    """Layers that are alike, and their values side by side, named as those of `Active`."""

    places: list[int]
    shapes: list[torch.Size]
    values: dict[str, Tensor]


class Weights:
    """What every layer is to run with, for any of some draws.

    Args:
        layers: the Bayesian layers of a network, in the order of their noise.
        draws: the draws, S of them.
        eps: the noise of all layers side by side, `[S, sum of their sizes]`.
        alpha: scale of the noise.
        noise: what shares a noise value.

    >>> bnn = abnn.convert(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3)))
    >>> draws, eps = [Draw(0, 0, 0), Draw(0, 1, 0)], torch.zeros(2, 8)
    >>> weights = Weights(list(bnn.bayes_layers.values()), draws, eps, 0.1, "channel")
    >>> active, = weights.of(range(1, 2), batch=1)
    >>> active.weight.shape
    torch.Size([1, 8])
    """

    def __init__(
        self,
        layers: Sequence[BayesNorm],
        draws: Sequence[Draw],
        eps: Tensor,
        alpha: float,
        noise: Noise,
    ) -> None:
        self.alpha, self.noise = alpha, noise
        self.layers, self.draws = layers, draws
        self._state = _state(layers)
        self._actives: dict[range, list[Active]] = {}
        modes = [draw.mode for draw in draws]
        columns = eps.split([layer.bank.form.shape.numel() for layer in layers], 1)
        # Nearly always one group; parts of a network may be of other precision or on other devices.
        alike: dict[Any, list[int]] = {}
        for i, layer in enumerate(layers):
            alike.setdefault(_kind(layer), []).append(i)
        self._groups = []
        for places in alike.values():
            own = [layers[i] for i in places]
            noises = eps if len(alike) == 1 else _side_by_side([columns[i] for i in places])
            shapes = [layer.bank.form.shape for layer in own]
            self._groups.append(_Group(places, shapes, _values(own, modes, noises, alpha)))

    def of(self, part: range, batch: int, called: set[int] | None = None) -> list[Active]:
        """For every layer what it is to run with, for part of the draws.

        Args:
            batch: number of examples of one sample.
            called: gathers the layers that ran.
        """
        if part not in self._actives:
            self._actives[part] = self._slice(part.start, part.stop)
        actives = self._actives[part]
        for active in actives:
            active.batch, active.called = batch, called
        return actives

    def _slice(self, start: int, stop: int) -> list[Active]:
        actives: dict[int, Active] = {}
        for group in self._groups:
            names = list(group.values)
            matrices = [_apart(group.values[name][start:stop], group.shapes) for name in names]
            for place, *values in zip(group.places, *matrices, strict=True):
                actives[place] = Active(
                    draws=self.draws[start:stop],
                    batch=1,
                    noise=self.noise,
                    alpha=self.alpha,
                    **dict(zip(names, values, strict=True)),
                )
        return [actives[i] for i in range(len(self.layers))]

    def are_still(
        self, layers: Sequence[BayesNorm], draws: Sequence[Draw], alpha: float, noise: Noise
    ) -> bool:
        """Whether these are the weights of the given draws, and no value has changed since."""
        asked = (alpha, noise, draws, _state(layers))
        return asked == (self.alpha, self.noise, self.draws, self._state)


def _state(layers: Sequence[BayesNorm]) -> list[Any]:
    """What is different after any value that weights are made of has changed."""
    state: list[Any] = []
    for layer in layers:
        bank = layer.bank
        values = (*bank._parameters.values(), *bank._buffers.values(), *layer._buffers.values())
        state.append(layer.training)
        state.extend(
            (t.data_ptr(), 0 if t.is_inference() else t._version, t.dtype)
            for t in values
            if t is not None
        )
    return state


def _kind(layer: BayesNorm) -> tuple[Any, ...]:
    """What layers that stand side by side have in common."""
    bank = layer.bank
    return (
        bank.gamma.dtype,
        bank.gamma.device,
        bank.beta is None,
        bank.mean is None,
        _is_affine(layer),
    )


def _is_affine(layer: BayesNorm) -> bool:
    return layer.bank.form.affine and not layer.training


def _values(
    layers: Sequence[BayesNorm], modes: list[int], eps: Tensor, alpha: float
) -> dict[str, Tensor]:
    """The values of some layers that are alike, `[S, sum of their sizes]` each."""
    banks = [layer.bank for layer in layers]
    sizes = [bank.form.shape.numel() for bank in banks]
    gamma = _side_by_side([bank.gamma for bank in banks])[modes]
    offset = _constants([bank.form.offset for bank in banks], sizes, gamma)
    values = {"weight": sample_gamma(gamma, eps.to(gamma), alpha, offset)}
    for name, bank in (("bias", "beta"), ("mean", "mean"), ("var", "var")):
        rows = [getattr(own, bank) for own in banks]
        if rows[0] is not None:
            values[name] = _side_by_side(rows)[modes]
    if _is_affine(layers[0]) and (len(modes) > 1 or not torch.is_grad_enabled()):
        norms: Sequence[Any] = layers
        eps_of_norms = _constants([norm.eps for norm in norms], sizes, gamma)
        # With frozen statistics all draws have those of the network.
        mean, var = (
            values[name]
            if name in values
            else _side_by_side([getattr(norm, f"running_{name}")[None] for norm in norms])
            for name in ("mean", "var")
        )
        values["scale"], values["shift"] = scale_and_shift(
            values["weight"], values["bias"], mean.to(gamma), var.to(gamma), eps_of_norms
        )
    return values


def _side_by_side(rows: Sequence[Tensor]) -> Tensor:
    """`[S, ...]` of every layer as one matrix with S rows."""
    return torch.cat([row.flatten(1) for row in rows], 1)


def _apart(matrix: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The columns of every layer, in its own shape."""
    columns = matrix.split([shape.numel() for shape in shapes], 1)
    return [
        column if len(shape) == 1 else column.reshape(len(matrix), *shape)
        for column, shape in zip(columns, shapes, strict=True)
    ]


def _constants(values: Sequence[float], sizes: Sequence[int], like: Tensor) -> Any:
    """A number of every layer: the number itself if all have the same, else one for each column."""
    if len(set(values)) == 1:
        return values[0]
    each = torch.tensor(values, dtype=like.dtype)
    return each.repeat_interleave(torch.tensor(sizes)).to(like.device)
