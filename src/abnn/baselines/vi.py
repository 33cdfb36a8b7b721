"""Bayes by Backprop (Blundell et al., ICML 2015, arXiv:1505.05424)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from abnn.baselines.method import Method
from abnn.baselines.sampled import logits_with, noise_like
from abnn.draws import number, whole_number
from abnn.outputs import Inputs, Output
from abnn.surgery import copied, weighted_layers
from abnn.train import cross_entropy


class VIBNN(Method):
    """Mean-field variational inference: a Gaussian for every weight, trained by its gradients.

        w = mu + softplus(rho) * eps,   eps ~ N(0, 1)
        loss = CE + kl_weight * KL(N(mu, softplus(rho)^2) || N(0, prior_std^2)) / N

    with the weights and biases of every convolution and linear layer, those of attention too; mu
    starts at the network's. The rest of the network, as its norms, is trained as ever. A step
    draws the weights once for its batch. The prior takes the place of weight decay. Gradients of
    rho are small, so that SGD leaves it about where it starts; `optimizer="adamw"` moves it.

    Args:
        net: the network; copied.
        prior_std: of the prior of every weight.
        init_std: what softplus(rho) starts from.
        kl_weight: 1 is the evidence lower bound; less is a cold posterior.
        examples: N, how many labels the training data has: its examples, or its pixels where
            every pixel has a label. It has to be given before training.
        output: finds the logits in what the network returns, where that is not obvious.
        class_dim: the dimension of the classes in the logits.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> loader = [(torch.randn(16, 4), torch.randint(3, (16,))) for _ in range(5)]
    >>> vi = VIBNN(net, examples=80)
    >>> abnn.train(vi, loader, epochs=2).losses.shape
    torch.Size([10])
    >>> vi.predict(torch.randn(2, 4), samples=8, seed=0).samples_used
    8
    """

    def __init__(
        self,
        net: nn.Module,
        prior_std: float = 1.0,
        init_std: float = 0.01,
        kl_weight: float = 1.0,
        examples: int | None = None,
        output: Output | None = None,
        class_dim: int = 1,
    ) -> None:
        super().__init__(net, output, class_dim)
        self.prior_std = number("prior_std", prior_std, above=0)
        self.init_std = number("init_std", init_std, above=0)
        self.kl_weight = number("kl_weight", kl_weight, least=0)
        self.examples = None if examples is None else whole_number("examples", examples, least=1)
        weights_of(net)
        self.net = copied(net)
        means = weights_of(self.net)
        self._names = list(means)
        rho = self.init_std + math.log(-math.expm1(-self.init_std))  # softplus's inverse
        self.rho = nn.ParameterList(torch.full_like(mean, rho) for mean in means.values())

    @property
    def mu(self) -> dict[str, Tensor]:
        """The means of the weights by their names: the weights of the network inside."""
        found = dict(self.net.named_parameters())
        return {name: found[name] for name in self._names}

    @property
    def std(self) -> dict[str, Tensor]:
        """The standard deviations of the weights by their names."""
        return {n: F.softplus(rho) for n, rho in zip(self._names, self.rho, strict=True)}

    def weights(self, eps: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights that standard normal noise stands for."""
        std = self.std
        return {name: mu + std[name] * eps[name] for name, mu in self.mu.items()}

    def kl(self) -> Tensor:
        """The divergence of all weights from their prior.

        KL(q || p) = sum(log(prior_std / std) + (std^2 + mu^2) / (2 prior_std^2) - 1/2)
        """
        std = self.std
        return torch.stack(
            [kl_divergence(mu, std[name], self.prior_std) for name, mu in self.mu.items()]
        ).sum()

    def member_logits(self, x: Inputs, samples: int = 16, seed: int = 0) -> Iterator[Tensor]:
        """The logits of draws of the weights, run one after another, `[1, B, K, ...]` each."""
        for draw in range(whole_number("samples", samples, least=1)):
            weights = self.weights(noise_like(self.mu, seed, 0, draw))
            yield logits_with(self, x, weights).unsqueeze(0)

    def training_logits(self, inputs: Inputs) -> Tensor:
        """The logits of a batch under one draw of the weights."""
        eps = {name: torch.randn_like(mu) for name, mu in self.mu.items()}
        return logits_with(self, inputs, self.weights(eps))

    def training_loss(self, inputs: Inputs, labels: Tensor, ignore_index: int = -100) -> Tensor:
        """The loss of a batch: the negative evidence lower bound of one example, from one draw."""
        if self.examples is None:
            raise ValueError(
                "The VIBNN does not know how many training examples share its KL; give their "
                "number, as VIBNN(net, examples=len(dataset))."
            )
        loss = cross_entropy(self.training_logits(inputs), labels, ignore_index)
        return loss + self.kl_weight * self.kl() / self.examples

    def parameter_groups(self) -> Sequence[dict[str, Any]]:
        """The Gaussians, whose prior takes the place of weight decay, and all other parameters."""
        gaussians = [*self.mu.values(), *self.rho]
        own = {id(parameter) for parameter in gaussians}
        rest = [parameter for parameter in self.parameters() if id(parameter) not in own]
        return [{"params": rest}, {"params": gaussians, "weight_decay": 0.0}]


def kl_divergence(mu: Tensor, std: Tensor, prior_std: float) -> Tensor:
    """The sum of KL(N(mu, std^2) || N(0, prior_std^2)) over all weights.

    >>> kl_divergence(torch.zeros(3), torch.full((3,), 2.0), prior_std=2.0)
    tensor(0.)
    """
    if mu.dtype != torch.float64:  # half precision is too coarse for the sum
        mu, std = mu.float(), std.float()
    mean, ratio = mu / prior_std, std / prior_std
    return (0.5 * (ratio**2 + mean**2 - 1) - ratio.log()).sum()


def weights_of(net: nn.Module) -> dict[str, nn.Parameter]:
    """The weights and biases of all convolutions and linear layers by name, tied ones once.

    >>> list(weights_of(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))))
    ['0.weight', '0.bias']
    """
    wanted = set()
    for layer_name, layer in weighted_layers(net).items():
        if not isinstance(layer._parameters.get("weight"), nn.Parameter):
            raise ValueError(
                f"The weight of {layer_name!r} is computed from other parameters (weight norm, "
                "spectral norm or another parametrization); remove that first, as by "
                "torch.nn.utils.parametrize.remove_parametrizations."
            )
        wanted |= {id(layer._parameters.get(name)) for name in ("weight", "bias")}
    for attention in net.modules():
        if isinstance(attention, nn.MultiheadAttention):
            # It reads the weights of its four linear layers, and three of them have no module.
            own = dict(attention.named_parameters())
            wanted |= {id(p) for name, p in own.items() if name not in ("bias_k", "bias_v")}
    return {name: p for name, p in net.named_parameters() if id(p) in wanted}
