"""Running a network as it is used, and leaving it as it was found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def inference(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every submodule is back in its own mode.

    >>> net = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval())
    >>> with inference(net):
    ...     net(torch.zeros(1, 2))
    tensor([[0., 0.]])
    >>> [part.training for part in net]
    [True, False]
    """
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training
