"""The original network, alone."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from abnn.baselines.method import Method
from abnn.outputs import Inputs, Output


class Single(Method):
    """One deterministic network: its softmax is the prediction, and nothing is epistemic.

        p(y | x) = softmax(net(x))[y]

    Args:
        net: the network; shared, not copied.
        output: finds the logits in what the network returns, where that is not obvious.
        class_dim: the dimension of the classes in the logits.

    >>> import torch
    >>> Single(nn.Identity()).predict(torch.zeros(1, 2)).probs
    tensor([[0.5000, 0.5000]])
    """

    shared = "net"

    def __init__(self, net: nn.Module, output: Output | None = None, class_dim: int = 1) -> None:
        super().__init__(net, output, class_dim)
        self.net = net

    def member_logits(self, x: Inputs) -> Iterator[Tensor]:
        """The logits of the one member, `[1, B, K, ...]`."""
        yield self.network_logits(x).unsqueeze(0)
