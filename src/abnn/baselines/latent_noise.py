"""Noise on the latent space: an ABNN that was never trained (Franchi et al., CVPR 2024)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from abnn.baselines.method import Method
from abnn.convert import convert
from abnn.draws import all_draws, chunks, number, whole_number
from abnn.folding import first_tensor
from abnn.outputs import Inputs, Output
from abnn.prediction import Prediction


class LatentNoise(Method):
    """One network with noise on its norms, as ABNN has it, but never fitted to that noise.

        BNL(h) = (h - mu)/sigma * gamma * (1 + std * eps) + beta,   eps ~ N(0, I)

    It is `abnn.convert(net, modes=1, alpha=std)`, whose predictions it gives: the control that
    tells what the noise does by itself, and so what the fit of ABNN does.

    Args:
        net: the network, which has norms; its weights are shared, and those of its norms copied.
        std: of the noise, relative to gamma. The ABNN paper compares 0.01, 0.1 and 1.
        output: finds the logits in what the network returns, where that is not obvious.
        class_dim: the dimension of the classes in the logits.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    >>> noisy, x = LatentNoise(net), torch.randn(5, 4)
    >>> bnn = abnn.convert(net, modes=1, alpha=0.1)
    >>> bool((noisy.predict(x, samples=4).probs == bnn.predict(x, samples=4).probs).all())
    True
    """

    shared = "net"

    def __init__(
        self,
        net: nn.Module,
        std: float = 0.1,
        output: Output | None = None,
        class_dim: int = 1,
    ) -> None:
        super().__init__(net, output, class_dim)
        self.std = number("std", std, least=0)
        self.net = convert(net, modes=1, alpha=self.std, output=output, class_dim=class_dim)

    def predict(self, x: Inputs, keep_members: bool = False, **members: Any) -> Prediction:
        """The prediction over draws of the noise.

        Args:
            x: a tensor, a tuple of arguments, or a mapping of keyword arguments.
            keep_members: keep the members' probabilities.
            members: what `ABNN.predict` takes, such as `samples=16, seed=0`, the default.
        """
        prediction: Prediction = self.net.predict(
            x, keep_members=keep_members, **{"samples": 16, **members}
        )
        return prediction

    def member_logits(self, x: Inputs, samples: int = 16, seed: int = 0) -> Iterator[Tensor]:
        """The logits of the draws, `[s, B, K, ...]`, some at a time.

        Args:
            x: a tensor, a tuple of arguments, or a mapping of keyword arguments.
            samples: how many draws.
            seed: the same seed gives the same draws.
        """
        draws = all_draws([0], samples, whole_number("seed", seed))
        plan = self.net.plan(x, samples)
        rows = plan.draws * plan.examples
        for group in chunks(draws, max(1, rows // len(first_tensor(x)))):
            yield self.net.logits(x, group)

    @property
    def num_added_parameters(self) -> int:
        """None: gamma and beta are the network's own."""
        return 0

    @property
    def num_added_bytes(self) -> int:
        """Nothing has to be stored."""
        return 0
