"""SWAG (Maddox et al., NeurIPS 2019, arXiv:1902.02476)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from abnn.baselines.method import Method
from abnn.baselines.sampled import logits_with, noise_like
from abnn.draws import number, whole_number
from abnn.outputs import Inputs, Output
from abnn.snapshots import snapshot_steps
from abnn.surgery import copied, weighted_layers


class SWAG(Method):
    """A Gaussian around the weights that the end of a training passes through.

        w = mean + scale * (sigma * z1 / sqrt(2) + D z2 / sqrt(2 (K - 1))),   z1, z2 ~ N(0, 1)

    with the mean and the standard deviation sigma of every weight over the snapshots, and D the
    deviations of the last K from the mean that they were taken into. The learning rate should stay
    up while they are taken, as with `schedule="constant"`. The members are drawn when the training
    ends, and the statistics of batch norms are averaged over the training data for each.

    Args:
        net: the network; copied.
        rank: how many deviations are kept, K; fewer if there are not as many snapshots.
        snapshots: how many are taken, evenly spread; every step if there are not as many.
        start: the share of the training after which they are taken.
        members: how many are drawn.
        scale: of the deviations from the mean.
        refresh: over how many batches the statistics of norms are averaged; None: over all.
        seed: of the members.
        output: finds the logits in what the network returns, where that is not obvious.
        class_dim: the dimension of the classes in the logits.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    >>> loader = [(torch.randn(16, 4), torch.randint(3, (16,))) for _ in range(5)]
    >>> swag = SWAG(net, members=8)
    >>> abnn.train(swag, loader, epochs=4, schedule="constant").losses.shape
    torch.Size([20])
    >>> swag.predict(torch.randn(2, 4)).samples_used, swag.taken
    (8, 10)
    """

    mean: Tensor
    variance: Tensor
    deviations: Tensor
    statistics: Tensor
    count: Tensor

    def __init__(
        self,
        net: nn.Module,
        rank: int = 20,
        snapshots: int = 40,
        start: float = 0.5,
        members: int = 16,
        scale: float = 1.0,
        refresh: int | None = None,
        seed: int = 0,
        output: Output | None = None,
        class_dim: int = 1,
    ) -> None:
        super().__init__(net, output, class_dim)
        self.rank = whole_number("rank", rank, least=2)
        self.snapshots = whole_number("snapshots", snapshots, least=2)
        self.members = whole_number("members", members, least=1)
        self.refresh = None if refresh is None else whole_number("refresh", refresh, least=1)
        self.seed = whole_number("seed", seed)
        self.start = number("start", start, least=0, below=1)
        self.scale = number("scale", scale, least=0)
        weighted_layers(net)
        self.net = copied(net)
        weights, statistics = self._flat_weights(), flat(_statistics(self.net))
        self.register_buffer("mean", torch.zeros_like(weights))
        self.register_buffer("variance", torch.zeros_like(weights))
        self.register_buffer("deviations", weights.new_zeros(self.rank, len(weights)))
        self.register_buffer("statistics", statistics.repeat(self.members, 1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @property
    def taken(self) -> int:
        """How many snapshots were taken."""
        return int(self.count)

    @property
    def num_added_parameters(self) -> int:
        """The variances and the deviations; the mean stands for the network."""
        return self.variance.numel() + self.deviations.numel()

    def weights(self, member: int) -> dict[str, Tensor]:
        """The weights of a member by their names, in the precision of the network."""
        if self.taken < 2:
            raise RuntimeError(
                "The SWAG has taken no snapshots of its weights, so it has no members; train it "
                "by abnn.train(swag, loader) first."
            )
        K = min(self.taken, self.rank)
        wide = {"diagonal": self.mean, "low_rank": self.deviations[:, 0]}
        z = noise_like(wide, self.seed, 0, member)
        diagonal = self.variance.sqrt() * z["diagonal"] / math.sqrt(2)
        low_rank = z["low_rank"][:K] @ self.deviations[:K] / math.sqrt(2 * (K - 1))
        return unflat(self.mean + self.scale * (diagonal + low_rank), self._parameters_of_net())

    def member_logits(self, x: Inputs, samples: int | None = None) -> Iterator[Tensor]:
        """The logits of the first members, or of all, one after another, `[1, B, K, ...]` each."""
        for member in range(self._checked(samples)):
            statistics = unflat(self.statistics[member], _statistics(self.net))
            yield logits_with(self, x, self.weights(member) | statistics).unsqueeze(0)

    def after_step(self, step: int, steps: int) -> None:
        """Take a snapshot, if this is a step to take one after."""
        first = int(self.start * steps)
        due = [first + s for s in snapshot_steps(steps - first, self.snapshots)[1:]]
        if step == 1:
            if len(due) < 2:
                raise ValueError(
                    f"SWAG would take 1 snapshot in {steps} steps, after which nothing is known "
                    "of the spread of the weights; train for more steps, or lower start=."
                )
            for tensor in (self.mean, self.variance, self.deviations, self.count):
                tensor.zero_()  # of an earlier training
        if step in due:
            self._take()

    def after_training(self, batches: Iterable[Inputs]) -> None:
        """Average the statistics of the norms over training data for every member."""
        self.train()
        # Norms that a network keeps in evaluation mode go on with the statistics that they have.
        norms = {name: norm for name, norm in _norms(self.net).items() if norm.training}
        kept = _statistics(self.net)
        if not norms:
            self.statistics.copy_(flat(kept).expand_as(self.statistics))
            return
        members = [self.weights(member) for member in range(self.members)]
        states = [_empty_statistics(norms) for _ in members]
        momenta = {norm: norm.momentum for norm in norms.values()}
        try:
            with torch.no_grad():
                for n, batch in enumerate(islice(batches, self.refresh), start=1):
                    for norm in momenta:
                        # Without a momentum, batch norms average; instance norms stand still.
                        norm.momentum = None if isinstance(norm, _BatchNorm) else 1 / n
                    for weights, state in zip(members, states, strict=True):
                        logits_with(self, batch, weights | state)
        finally:
            for norm, momentum in momenta.items():
                norm.momentum = momentum
        for row, state in zip(self.statistics, states, strict=True):
            row.copy_(flat({name: state.get(name, own) for name, own in kept.items()}))

    def _take(self) -> None:
        """Take the weights into their mean and variance, and keep their deviation."""
        weights = self._flat_weights()
        row = self.taken % self.rank
        self.count += 1
        # The second moment less the squared mean is lost in rounding where weights move little.
        before = weights - self.mean
        self.mean += before / self.count
        after = weights - self.mean
        self.variance += (before * after - self.variance) / self.count
        self.deviations[row] = after

    def _flat_weights(self) -> Tensor:
        return flat(self._parameters_of_net())

    def _parameters_of_net(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.net.named_parameters()}

    def _checked(self, samples: int | None) -> int:
        if samples is None:
            return self.members
        if whole_number("samples", samples, least=1) > self.members:
            raise ValueError(
                f"samples={samples} is more than the {self.members} members of the SWAG, which "
                "are drawn when its training ends; build it with more members=."
            )
        return int(samples)


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """All numbers side by side, in single precision at least.

    >>> flat({"weight": torch.ones(2, 1), "bias": torch.zeros(1)})
    tensor([1., 1., 0.])
    """
    parts = [tensor.detach().flatten() for tensor in tensors.values()]
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in parts) else torch.float32
    return torch.cat([part.to(dtype) for part in parts]) if parts else torch.empty(0)


def unflat(numbers: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The numbers that `flat` laid side by side, in the shapes and types of other tensors.

    >>> unflat(torch.arange(3.0), {"weight": torch.ones(2, 1), "bias": torch.zeros(1)})["bias"]
    tensor([2.])
    """
    parts = numbers.split([tensor.numel() for tensor in like.values()])
    return {
        name: part.view(tensor.shape).to(tensor.dtype)
        for (name, tensor), part in zip(like.items(), parts, strict=True)
    }


def _norms(net: nn.Module) -> dict[str, _NormBase]:
    """The norms that keep statistics of what they saw in training."""
    return {
        name: norm
        for name, norm in net.named_modules()
        if isinstance(norm, _NormBase) and norm.running_mean is not None
    }


def _statistics(net: nn.Module) -> dict[str, Tensor]:
    """The statistics of its norms by their names."""
    return {
        f"{name}.{key}": getattr(norm, key)
        for name, norm in _norms(net).items()
        for key in ("running_mean", "running_var")
    }


def _empty_statistics(norms: Mapping[str, _NormBase]) -> dict[str, Tensor]:
    """Statistics of norms that have seen nothing, with their count of batches."""
    return {
        f"{name}.{key}": torch.full_like(getattr(norm, key), 1 if key == "running_var" else 0)
        for name, norm in norms.items()
        for key in ("running_mean", "running_var", "num_batches_tracked")
    }
