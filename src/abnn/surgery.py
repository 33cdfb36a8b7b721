"""Copy the structure of a network without copying its tensors, and read and set what it holds."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def twin(net: nn.Module) -> nn.Module:
    """A second network with the structure of `net` and the very same tensors, all frozen.

    Only Python objects are copied. Parameters and buffers of the twin are new tensors on the same
    memory, so that freezing or replacing one leaves `net` as it is.

    >>> net = nn.Linear(2, 3)
    >>> other = twin(net)
    >>> other.weight.data_ptr() == net.weight.data_ptr(), other.weight.requires_grad
    (True, False)
    """
    memo: dict[int, Any] = {id(b): b.detach() for b in net.buffers()}
    for module in net.modules():
        # A tensor kept as a plain attribute may be part of a graph, which deepcopy refuses.
        memo |= {id(v): v for v in vars(module).values() if isinstance(v, Tensor)}
    memo |= {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in net.parameters()}
    return copy.deepcopy(net, memo)


def slot(module: nn.Module, name: str) -> dict[str, Any] | None:
    """The dictionary of `module` that holds the parameter, buffer, child or attribute `name`.

    A parameter that is registered as None has a slot too.

    >>> slot(nn.LayerNorm(2, elementwise_affine=False), "weight")
    {'weight': None, 'bias': None}
    """
    holders = (module._parameters, module._buffers, module._modules, module.__dict__)
    return next((holder for holder in holders if name in holder), None)


@contextmanager
def swapped(module: nn.Module, values: dict[str, Any]) -> Iterator[None]:
    """Let `module` hold other parameters, buffers or children for a while.

    >>> layer = nn.LayerNorm(2)
    >>> with swapped(layer, {"weight": None, "bias": None}):
    ...     print(layer.weight)
    None
    >>> layer.weight is not None
    True
    """
    held = []
    for name, value in values.items():
        holder = slot(module, name)
        if holder is None:
            raise AttributeError(f"{type(module).__name__} has no {name!r} to swap.")
        held.append((holder, name, holder[name]))
        holder[name] = value
    try:
        yield
    finally:
        for holder, name, value in held:
            holder[name] = value
