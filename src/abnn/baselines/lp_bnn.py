"""LP-BNN (Franchi et al., TPAMI 2024, arXiv:2012.02818)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from abnn.baselines.batch_ensemble import BatchEnsemble, Factors
from abnn.draws import Draw, noise_matrix, number, whole_number
from abnn.outputs import Inputs, Output
from abnn.surgery import swapped, weighted_layers
from abnn.train import cross_entropy


class LPBNN(BatchEnsemble):
    """A BatchEnsemble whose factors r are drawn from a latent posterior, in every layer.

        h = relu(E r + e),   z ~ q(z | r) = N(mu(h), sigma(h)^2),   r' = D z / sqrt(latent) + d
        W_m = W * (s_m r'_m^T)
        loss = cross-entropy + latent_weight * mean over layers of
               (KL(q(z | r) || N(0, I)), summed over members, + mean (r' - r)^2)

    A variational auto-encoder of each layer is trained with the shared weights and with s and b;
    r itself stays as it was drawn. d starts at the mean of r over the members, so that the network
    is not silenced; the root keeps its steps as small as those of a factor would be, for any size
    of the latent vector. What holds for a `BatchEnsemble` holds here too.

    Args:
        net: the network, with the weights from which the shared ones start; copied.
        members: how many there are.
        latent: size of h and of z.
        latent_weight: weight of the auto-encoders' loss.
        factors: what r is, and s starts from; as of `BatchEnsemble`.
        output: finds the logits in what the network returns, where that is not obvious.
        class_dim: the dimension of the classes in the logits.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> bnn, x = LPBNN(net, members=3), torch.randn(2, 4)
    >>> bnn.predict(x).samples_used, bnn.predict(x, samples=5).samples_used
    (3, 15)
    """

    def __init__(
        self,
        net: nn.Module,
        members: int = 4,
        latent: int = 32,
        latent_weight: float = 1.0,
        factors: Factors = "normal",
        output: Output | None = None,
        class_dim: int = 1,
    ) -> None:
        super().__init__(net, members, factors, output, class_dim)
        self.latent = whole_number("latent", latent, least=1)
        self.latent_weight = number("latent_weight", latent_weight, least=0)
        self.auto_encoders = nn.ModuleList()
        for layer in self._layers():
            r = layer.ensemble_r.detach()
            del layer.ensemble_r
            layer.register_buffer("ensemble_r", r)
            self.auto_encoders.append(AutoEncoder(r, self.latent))

    def member_logits(self, x: Inputs, samples: int = 1, seed: int = 0) -> Iterator[Tensor]:
        """The logits of so many draws of every member, draw by draw, `[M, B, K, ...]`."""
        samples, seed = whole_number("samples", samples, least=1), whole_number("seed", seed)
        sizes = [self.latent] * len(self.auto_encoders)
        for index in range(samples):
            draws = [Draw(seed, member, index) for member in range(self.members)]
            noise = noise_matrix(draws, sum(sizes)).split(sizes, 1)
            with self._swapped(self._decode(noise)[0]):
                logits = list(self._members.logits(self, x))
            yield from logits

    def training_logits(self, inputs: Inputs) -> Tensor:
        """The logits of a batch that the members share, for one draw of their factors."""
        return self._draw_and_run(inputs)[0]

    def training_loss(self, inputs: Inputs, labels: Tensor, ignore_index: int = -100) -> Tensor:
        """The cross-entropy, and the loss of the auto-encoders."""
        logits, latent_loss = self._draw_and_run(inputs)
        return cross_entropy(logits, labels, ignore_index) + self.latent_weight * latent_loss

    def parameter_groups(self) -> Sequence[dict[str, Any]]:
        """As of a `BatchEnsemble`; d is spared the decay as a factor is."""
        rest, factors = super().parameter_groups()
        biases = [auto_encoder.decoder.bias for auto_encoder in self._encoders()]
        spared = {id(bias) for bias in biases}
        kept = [p for p in rest["params"] if id(p) not in spared]
        return [rest | {"params": kept}, factors | {"params": [*factors["params"], *biases]}]

    def _draw_and_run(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        noise = [torch.randn(self.members, self.latent) for _ in self.auto_encoders]
        factors, losses = self._decode(noise)
        with self._swapped(factors):
            logits = self._members.training_logits(self, inputs)
        return logits, losses.mean()

    def _decode(self, noise: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """The factors of every layer that belong to some noise, and the auto-encoders' losses."""
        factors, losses = [], []
        for layer, auto_encoder, eps in zip(self._layers(), self._encoders(), noise, strict=True):
            r = layer.ensemble_r
            mean, log_var = auto_encoder.encode(r)
            r_hat = auto_encoder.decode(mean + (0.5 * log_var).exp() * eps.to(r))
            factors.append(r_hat)
            losses.append(kl_to_standard(mean, log_var) + F.mse_loss(r_hat, r))
        return factors, torch.stack(losses)

    @contextmanager
    def _swapped(self, factors: Sequence[Tensor]) -> Iterator[None]:
        """Let the layers have these factors for a while."""
        with ExitStack() as stack:
            for layer, r_hat in zip(self._layers(), factors, strict=True):
                stack.enter_context(swapped(layer, {"ensemble_r": r_hat}))
            yield

    def _layers(self) -> list[Any]:
        return list(weighted_layers(self.net).values())

    def _encoders(self) -> list[Any]:
        return list(self.auto_encoders)


class AutoEncoder(nn.Module):
    """The variational auto-encoder of the factors `[M, C]` of a layer.

    Args:
        r: the factors.
        latent: size of the latent vector.

    >>> r = torch.randn(4, 10)
    >>> auto_encoder = AutoEncoder(r, latent=3)
    >>> mean, log_var = auto_encoder.encode(r)
    >>> mean.shape, auto_encoder.decode(mean).shape
    (torch.Size([4, 3]), torch.Size([4, 10]))
    """

    def __init__(self, r: Tensor, latent: int) -> None:
        super().__init__()
        like: dict[str, Any] = {"device": r.device, "dtype": r.dtype}
        self.hidden = nn.Linear(r.shape[1], latent, **like)
        self.mean, self.log_var = (nn.Linear(latent, latent, **like) for _ in range(2))
        self.decoder = nn.Linear(latent, r.shape[1], **like)
        with torch.no_grad():
            self.decoder.bias.copy_(r.mean(0))

    def encode(self, r: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance of the latent vectors, `[M, latent]`."""
        h = F.relu(self.hidden(r))
        return self.mean(h).to(r.dtype), self.log_var(h).to(r.dtype)

    def decode(self, z: Tensor) -> Tensor:
        """The factors that latent vectors stand for, `[M, C]`."""
        r_hat: Tensor = self.decoder(z / math.sqrt(z.shape[1]))
        return r_hat.to(z.dtype)


def kl_to_standard(mean: Tensor, log_var: Tensor) -> Tensor:
    """KL of normal distributions to the standard one, summed over all.

    >>> kl_to_standard(torch.tensor([2.0, 0.0]), torch.zeros(2))
    tensor(2.)
    """
    return 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum()
