"""Every method that is built from a network, and networks of every kind to build it from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from abnn import baselines
from abnn.baselines import Method
from nets import cnn, mlp

# Arguments under which a method is small; those whose members are drawn take samples=.
MAKERS: dict[str, Callable[[Any], Method]] = {
    "single": baselines.Single,
    "batch_ensemble": lambda net: baselines.BatchEnsemble(net, 3),
    "laplace": baselines.Laplace,
    "laplace_sampled": lambda net: baselines.Laplace(net, structure="diag", predictive="sampling"),
    "lp_bnn": lambda net: baselines.LPBNN(net, 3, latent=4),
    "masksembles": lambda net: baselines.Masksembles(net, 3, scale=1.5),
    "mc_dropout": baselines.MCDropout,
    "mimo": lambda net: baselines.MIMO(net, 2, rho=0.5),
    "packed_ensembles": lambda net: baselines.PackedEnsembles(net, 2, alpha=1.5),
    "tradi": lambda net: baselines.TRADI(net, features=4),
    "vi": lambda net: baselines.VIBNN(net, examples=48),
    "swag": lambda net: baselines.SWAG(net, rank=3, snapshots=4, start=0.2, members=3),
    "augmentation": baselines.TestTimeAugmentation,
    "latent_noise": baselines.LatentNoise,
}
DRAWN = {"laplace_sampled", "lp_bnn", "mc_dropout", "tradi", "vi", "augmentation", "latent_noise"}


@dataclass(frozen=True)
class Kind:
    """A network, and data for it: `inputs(n)` and labels `[n, ...]` in three classes."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    pixels: tuple[int, ...] = ()
    refused_by: frozenset[str] = frozenset()

    def batches(self, count: int = 6, size: int = 8) -> list[tuple[Any, Tensor]]:
        """Batches whose labels can be told from their inputs."""
        torch.manual_seed(1)
        found = []
        for _ in range(count):
            y = torch.randint(3, (size,))
            x = self.inputs(size)
            shift = 2.0 * (y - 1).reshape(-1, *[1] * (x.ndim - 1))
            labels = y.reshape(-1, *[1] * len(self.pixels)).expand(-1, *self.pixels)
            found.append((x + shift, labels.contiguous()))
        return found


class Tokens(nn.Module):
    """A transformer on features [B, T, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, 4]` -> `[B, 3]`."""
        logits: Tensor = self.head(self.encoder(self.embed(x)).mean(1))
        return logits


def segmenter() -> nn.Sequential:
    """Logits for every pixel."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 3, 1),
    )
    return net.eval()


def tokens() -> Tokens:
    """The transformer, always with the same weights."""
    torch.manual_seed(0)
    return Tokens().eval()


KINDS: dict[str, Kind] = {
    "mlp": Kind(mlp, lambda n: torch.randn(n, 4)),
    "cnn": Kind(cnn, lambda n: torch.randn(n, 3, 8, 8)),
    "segmenter": Kind(
        segmenter,
        lambda n: torch.randn(n, 3, 6, 6),
        pixels=(6, 6),
        refused_by=frozenset({"laplace", "laplace_sampled"}),
    ),
    "tokens": Kind(
        tokens, lambda n: torch.randn(n, 5, 4), refused_by=frozenset({"packed_ensembles"})
    ),
}
