"""A network as a linear function of its weights."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from abnn.baselines.curvature import Block, powered
from abnn.baselines.method import Method
from abnn.baselines.sampled import logits_with
from abnn.folding import pieces
from abnn.outputs import Inputs, Output, logits_of


class Logits(nn.Module):
    """A network that returns its logits.

    >>> Logits(nn.Identity(), output=lambda result: -result, class_dim=1)(torch.ones(1, 2))
    tensor([[-1., -1.]])
    """

    def __init__(self, net: nn.Module, output: Output | None, class_dim: int) -> None:
        super().__init__()
        self.net, self.output, self.class_dim = net, output, class_dim

    def forward(self, x: Tensor) -> Tensor:
        """The logits, `[B, K, ...]`."""
        return wide(logits_of(self.net(x), self.output, self.class_dim))


def linearised(
    method: Method, x: Inputs, weights: dict[str, Tensor], change: dict[str, Tensor]
) -> Tensor:
    """The logits `f + J change` of a network that is linearised in its weights.

    >>> method, x = abnn.baselines.Single(nn.Linear(2, 3)), torch.ones(1, 2)
    >>> weights = {name: p.detach() for name, p in method.net.named_parameters()}
    >>> twice = linearised(method, x, weights, weights)  # it is linear
    >>> bool((twice - 2 * method.net(x)).abs().max() < 1e-6)
    True
    """

    def logits(tensors: dict[str, Tensor]) -> Tensor:
        return logits_with(method, x, tensors)

    with differentiable():
        value, slope, *_ = torch.func.jvp(logits, (weights,), (change,))
    summed: Tensor = value + slope
    return summed


def moments(
    method: Method,
    x: Inputs,
    weights: Mapping[str, Tensor],
    H: Sequence[Block],
    prior: Tensor,
    rows: int,
) -> tuple[Tensor, Tensor]:
    """The logits f, and the variances of those of the linearised network, both `[B, K]`.

        diag(J (H + prior I)^-1 J^T)

    Args:
        method: has the network.
        x: what goes into the network.
        weights: those that are uncertain, by their names in the network.
        H, prior: their curvature, and the precision of the prior.
        rows: of how many inputs to hold the Jacobian J at once.
    """
    own = {name: tensor.detach() for name, tensor in weights.items()}
    means, variances = [], []
    for piece in pieces(x, rows):

        def logits(tensors: dict[str, Tensor], x: Inputs = piece) -> tuple[Tensor, Tensor]:
            found = wide(logits_with(method, x, tensors))
            return found, found

        with differentiable():
            J, mean = torch.func.jacrev(logits, has_aux=True)(own)
        flat = wide(torch.cat([part.flatten(2) for part in J.values()], 2).flatten(0, 1))
        means.append(mean)
        variances.append(powered(flat, H, prior, -0.5).square().sum(1).view(mean.shape))
    return torch.cat(means), torch.cat(variances)


@contextmanager
def differentiable() -> Iterator[None]:
    """Let torch take derivatives of all kinds, of attention too."""
    with warnings.catch_warnings():
        # Loading what is needed for forward ones, torch 2.15 warns of itself.
        warnings.filterwarnings("ignore", ".*torch\\.jit\\.script")
        warnings.filterwarnings("ignore", "There is a performance drop because we have not yet")
        # The fast kernels of attention have no forward or batched ones.
        with sdpa_kernel(SDPBackend.MATH):
            yield


def wide(tensor: Tensor) -> Tensor:
    """The tensor in no less than single precision.

    >>> wide(torch.zeros(1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return tensor if tensor.dtype == torch.float64 else tensor.float()
