"""TRADI (Franchi et al., ECCV 2020, arXiv:1912.11316)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from abnn.baselines.method import Method
from abnn.baselines.sampled import logits_with
from abnn.draws import generator, number, whole_number
from abnn.outputs import Inputs, Output
from abnn.surgery import copied, weighted_layers


class TRADI(Method):
    """Networks drawn from the mean and variance that a Kalman filter tracks of every weight.

    With `u` the step of the optimiser, the state is predicted from what SGD does, and corrected by
    the weights w that it arrives at:

        mu' = mu + u,    sigma'^2 = sigma^2 + u^2,    P' = P + Q,    K = P' / (P' + R)
        mu = mu' + K (w - mu'),   sigma^2 = sigma'^2 + K ((w - mu)^2 - sigma'^2),   P = (1 - K) P'

    with a P, Q and K for the means, and others for the variances. K tends to `sqrt(Q / R)`, so that
    the filter remembers some `sqrt(R / Q)` steps. For a draw, random Fourier features stand for a
    Gaussian kernel on the means of the weights of one tensor:

        w~_i = mu_i + sigma_i sqrt(2 / D) sum_k m_k cos(theta_k mu_i / l + b_k)
        Cov(w~_i, w~_j) = sigma_i sigma_j exp(-(mu_i - mu_j)^2 / (2 l^2))

    with m and theta standard normal and b uniform on [0, 2 pi], anew for every tensor and draw.

    The equations are the paper's as its authors' code has them; so are Q, R, D, the start at P = 0
    and that all parameters but those of batch norms are tracked. Chosen here:

    - Tracking starts from the weights of `net` and no variance, not from 0 and the variance of a
      random initialisation, as `net` may be trained already.
    - u is the step that was taken, with momentum and weight decay, instead of the learning rate
      times the gradient; for plain SGD the two are the same.
    - l is in standard deviations of the means of the tensor, and short. With l = 1 in the units of
      the weights, which differ by far less, all of a tensor would move as one; the code, which has
      it, draws a b for every weight, so that they do not covary at all.
    - Batch norms have the statistics of the means. The code goes through the training data for
      every network that it draws.

    Args:
        net: the network, with the weights to start from; copied.
        features: how many Fourier features a draw has, D.
        lengthscale: l; the smaller, the less the weights of a tensor have to do with each other.
        steps: predict the state by the steps of the optimiser. As the weights take these too, the
            mean is then the weight itself, and the variance the sum of the last steps, squared.
            Otherwise u = 0: mean and variance are those of the last weights.
        mean_noise: Q of the means.
        variance_noise: Q of the variances.
        measurement_noise: R of both.
        output: finds the logits in what the network returns, where that is not obvious.
        class_dim: the dimension of the classes in the logits.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> tradi, x = TRADI(net), torch.randn(2, 4)
    >>> loader = [(torch.randn(16, 4), torch.randint(3, (16,))) for _ in range(5)]
    >>> tradi.predict(x, samples=4).epistemic.max() > 1e-6, bool(tradi.variance.any())
    (tensor(False), False)
    >>> result = abnn.train(tradi, loader, epochs=2)
    >>> tradi.predict(x, samples=4).epistemic.max() > 1e-6
    tensor(True)
    """

    mean: Tensor
    variance: Tensor
    uncertainty: Tensor

    def __init__(
        self,
        net: nn.Module,
        features: int = 10,
        lengthscale: float = 0.1,
        steps: bool = True,
        mean_noise: float = 1e-4,
        variance_noise: float = 5e-5,
        measurement_noise: float = 10.0,
        output: Output | None = None,
        class_dim: int = 1,
    ) -> None:
        super().__init__(net, output, class_dim)
        self.features = whole_number("features", features, least=1)
        self.lengthscale = number("lengthscale", lengthscale, above=0)
        self.mean_noise = number("mean_noise", mean_noise, above=0)
        self.variance_noise = number("variance_noise", variance_noise, above=0)
        self.measurement_noise = number("measurement_noise", measurement_noise, above=0)
        if not isinstance(steps, bool):
            raise ValueError(f"steps={steps!r} must be True or False.")
        self.steps = steps
        weighted_layers(net)
        self.net = copied(net)
        weights = self._weights()
        self.register_buffer("mean", weights)
        self.register_buffer("variance", torch.zeros_like(weights))
        # P of the mean and of the variance; no weight has its own, as it depends on none.
        self.register_buffer("uncertainty", weights.new_zeros(2))

    @property
    def num_added_parameters(self) -> int:
        """Learned numbers beyond those of the one network: the means and the variances."""
        return self.mean.numel() + self.variance.numel()

    def after_step(self, step: int, steps: int) -> None:
        """A step of the filter."""
        weights = self._weights()
        noise = self.uncertainty.new_tensor([self.mean_noise, self.variance_noise])
        gains, uncertainty = kalman_gain(self.uncertainty, noise, self.measurement_noise)
        taken = weights - self.mean if self.steps else torch.zeros_like(weights)
        mean, variance = kalman_step(self.mean, self.variance, weights, taken, gains)
        self.mean.copy_(mean)
        self.variance.copy_(variance)
        self.uncertainty.copy_(uncertainty)

    def after_training(self, batches: Iterable[Inputs]) -> None:
        """Take the statistics of batch norms at the means, where these are not the weights."""
        norms = [part for part in self.net.modules() if isinstance(part, _BatchNorm)]
        norms = [norm for norm in norms if norm.track_running_stats]
        if self.steps or not norms:
            return
        modes = [(part, part.training) for part in self.modules()]
        momenta = [norm.momentum for norm in norms]
        self.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the mean over all batches
            norm.train()
        means = self._named(self.mean)
        try:
            with torch.no_grad():
                for x in batches:
                    logits_with(self, x, means)
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
            for part, training in modes:
                part.training = training

    def member_logits(self, x: Inputs, samples: int = 16, seed: int = 0) -> Iterator[Tensor]:
        """The logits of networks that are drawn, one at a time, `[1, B, K, ...]`."""
        for index in range(whole_number("samples", samples, least=1)):
            yield logits_with(self, x, self.draw(seed, index)).unsqueeze(0)

    def draw(self, seed: int, index: int) -> dict[str, Tensor]:
        """The tracked parameters of one network that is drawn, by their names.

        >>> list(TRADI(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))).draw(0, 0))
        ['0.weight', '0.bias']
        """
        rng = generator("predict", whole_number("seed", seed), 0, index)
        drawn = {}
        variances = self._named(self.variance)
        for name, mean in self._named(self.mean).items():
            theta, m = torch.from_numpy(rng.standard_normal((2, self.features))).tolist()
            b = torch.from_numpy(rng.uniform(0, 2 * math.pi, self.features)).tolist()
            place = mean - mean.mean()
            # Where all means are the same, the place of each is 0.
            place = place / (self.lengthscale * place.std(correction=0)).clamp_min(1e-30)
            noise = torch.zeros_like(mean)
            for k in range(self.features):  # never a copy of the tensor for every feature
                noise += m[k] * torch.cos(theta[k] * place + b[k])
            scale = math.sqrt(2 / self.features)
            drawn[name] = mean + scale * variances[name].clamp_min(0).sqrt() * noise
        own = dict(self.net.named_parameters())
        return {name: value.to(own[name].dtype) for name, value in drawn.items()}

    def _tracked(self) -> dict[str, Tensor]:
        """All parameters of the network but those of batch norms."""
        norms = (part for part in self.net.modules() if isinstance(part, _BatchNorm))
        left_out = {id(p) for norm in norms for p in norm.parameters()}
        named = self.net.named_parameters()
        return {name: p.detach() for name, p in named if id(p) not in left_out}

    def _weights(self) -> Tensor:
        flat = torch.cat([tensor.flatten() for tensor in self._tracked().values()])
        # Squares of small steps are nothing in half precision.
        return flat if flat.dtype == torch.float64 else flat.float()

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        tracked = self._tracked()
        parts = flat.split([tensor.numel() for tensor in tracked.values()])
        return {
            name: part.view(tensor.shape)
            for (name, tensor), part in zip(tracked.items(), parts, strict=True)
        }


def kalman_gain(P: Tensor, Q: Tensor, R: float) -> tuple[Tensor, Tensor]:
    """The gain of the next step, and the P that remains after it.

    >>> kalman_gain(torch.tensor(1.0), torch.tensor(1.0), 2.0)
    (tensor(0.5000), tensor(1.))
    """
    predicted = P + Q
    K = predicted / (predicted + R)
    return K, (1 - K) * predicted


def kalman_step(
    mean: Tensor, variance: Tensor, weight: Tensor, step: Tensor, gains: Tensor
) -> tuple[Tensor, Tensor]:
    """The mean and the variance after a step of the optimiser that led to `weight`.

    >>> zero, one = torch.tensor(0.0), torch.tensor(1.0)
    >>> kalman_step(zero, zero, weight=one, step=zero, gains=torch.tensor([0.5, 0.5]))
    (tensor(0.5000), tensor(0.1250))
    """
    mean = torch.lerp(mean + step, weight, gains[0])
    return mean, torch.lerp(variance + step.square(), (weight - mean).square(), gains[1])
