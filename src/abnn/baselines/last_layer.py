"""The last layer of a network, and what goes into it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from abnn.baselines.method import Method
from abnn.folding import clone, no_fused_encoder
from abnn.outputs import Inputs, call, logits_of


def through_last_layer(
    method: Method, x: Inputs, name: str | None = None
) -> tuple[str, Tensor, Tensor]:
    """The name of the linear layer whose output the logits are, the logits, and its input.

    Args:
        method: has the network.
        x: what goes into the network.
        name: the name of the layer, where it is known; it is looked for otherwise.

    >>> single = abnn.baselines.Single(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3)))
    >>> name, logits, features = through_last_layer(single, torch.zeros(1, 2))
    >>> name, logits.shape, features.shape
    ('2', torch.Size([1, 3]), torch.Size([1, 4]))
    """
    calls: list[tuple[str, Tensor, Tensor]] = []

    def hook(name: str) -> Callable[..., None]:
        # Copies, as the network may go on to change these in place.
        return lambda _, args, output: calls.append((name, args[0].clone(), output.clone()))

    handles = [
        module.register_forward_hook(hook(part))
        for part, module in method.net.named_modules()
        if isinstance(module, nn.Linear) and name in (None, part)
    ]
    try:
        with no_fused_encoder():
            logits = logits_of(call(method.net, clone(x)), method.output, method.class_dim)
    finally:
        for handle in handles:
            handle.remove()
    for part, features, output in reversed(calls):
        there = output.movedim(-1, 1) if output.ndim > 1 else output
        if there.shape == logits.shape and torch.allclose(there, logits, 0, 0, equal_nan=True):
            return part, logits, features
    raise no_last_layer(method.net)


def no_last_layer(net: nn.Module) -> ValueError:
    """What is wrong with a network that has no such layer."""
    return ValueError(
        f"The logits of the {type(net).__name__} are not the output of an nn.Linear, which "
        "subset='last_layer' needs; take subset='all', or an output= that returns that output."
    )
