"""Copy the structure of a network without copying its tensors, and read and set what it holds."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy


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


def copied(net: nn.Module) -> nn.Module:
    """A network of its own with the structure and the values of `net`.

    >>> net = nn.Linear(2, 3)
    >>> other = copied(net)
    >>> bool((other.weight == net.weight).all()), other.weight.data_ptr() == net.weight.data_ptr()
    (True, False)
    """
    memo: dict[int, Any] = {}
    for module in net.modules():
        # A tensor kept as a plain attribute may be part of a graph, which deepcopy refuses.
        memo |= {id(v): v.detach().clone() for v in vars(module).values() if isinstance(v, Tensor)}
    return copy.deepcopy(net, memo)


def weighted_layers(net: nn.Module) -> dict[str, nn.Module]:
    """Every convolution and linear layer of a network by its name, shared ones once.

    The output projection of `nn.MultiheadAttention` is left out: attention reads its weight and
    never calls it, so what is done around the layer would be bypassed.

    >>> list(weighted_layers(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten())))
    ['0']
    """
    bypassed = {m.out_proj for m in net.modules() if isinstance(m, nn.MultiheadAttention)}
    found: dict[str, nn.Module] = {
        name: module
        for name, module in net.named_modules()
        if isinstance(module, nn.Linear | _ConvNd) and module not in bypassed
    }
    if not found:
        raise ValueError(
            f"The {type(net).__name__} has no convolution and no linear layer, which this method "
            "works on; give a network that has one."
        )
    return found


def check_network(net: object) -> None:
    """Refuse what is no network, or one whose tensors have no values yet.

    >>> check_network(nn.LazyLinear(3))
    Traceback (most recent call last):
    ValueError: Not initialised yet: 'weight'; run the network once on an input first.
    """
    if not isinstance(net, nn.Module):
        raise TypeError(
            f"A torch.nn.Module is needed, not a {type(net).__name__}; give the network itself."
        )
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"Not initialised yet: {name!r}; run the network once on an input first."
            )
        if tensor.is_meta:
            raise ValueError(
                f"On the meta device, without values: {name!r}; load the weights first."
            )


def channel_dim(layer: nn.Module) -> int:
    """Where the channels, or features, of a convolution's or linear layer's tensors are.

    >>> channel_dim(nn.Conv2d(1, 2, 3)), channel_dim(nn.Linear(1, 2))
    (-3, -1)
    """
    return -1 if isinstance(layer, nn.Linear) else -1 - len(cast(_ConvNd, layer).kernel_size)


def widths(layer: nn.Module) -> tuple[int, int]:
    """The channels, or features, that go into a convolution or linear layer and that come out.

    >>> widths(nn.Conv2d(3, 8, 3))
    (3, 8)
    """
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    layer = cast(_ConvNd, layer)
    return layer.in_channels, layer.out_channels


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
