"""Networks of torch-uncertainty's layers with our parameters, and what is compared of both."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch_uncertainty import layers, models
from torch_uncertainty.layers.bayesian import lpbnn

from abnn.baselines import Method
from abnn.surgery import weighted_layers

M, K, B = 4, 5, 8  # members, classes, examples
RESNET: dict[str, Any] = {
    "in_channels": 3,
    "num_classes": K,
    "arch": 20,
    "style": "cifar",
    "conv_bias": False,
}
# Their perceptron holds its last layer first.
ENDS: dict[str, Any] = {"first": "layers.0", "last": "final_layer"}

Pairs = list[tuple[Tensor, Tensor]]  # of ours and theirs


class Check(NamedTuple):
    """What of ours should equal what of theirs."""

    method: str
    theirs: str
    what: str
    pairs: Pairs

    def difference(self) -> tuple[float, float]:
        """The largest, and the largest as a share of the size of the tensor that it is in."""
        sizes = [float(theirs.abs().max()) for _, theirs in self.pairs]
        # A gradient that is 0 but for rounding, as before a norm, has no size of its own.
        least = max(1e-7 * max(sizes), 1e-30)
        found = []
        for (ours, theirs), size in zip(self.pairs, sizes, strict=True):
            if ours.shape != theirs.shape:
                raise ValueError(f"{self}: {tuple(ours.shape)} against {tuple(theirs.shape)}.")
            apart = float((ours - theirs).abs().nan_to_num(math.inf).max())
            found.append((apart, apart / max(size, least)))
        return max(part for part, _ in found), max(share for _, share in found)


# Networks, and the same of their layers


def network(kind: str) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A small network of some kind of layers, and inputs and labels for it."""
    y = torch.randint(K, (B,))
    if kind == "Linear":
        ends = nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, K)
        inner = nn.Linear(24, 24, bias=False), nn.ReLU()
        return nn.Sequential(*ends[:2], *inner, ends[2]), torch.randn(B, 12), y
    dims = kind[-2:]
    layer = getattr(nn, kind)
    norms = [getattr(nn, f"BatchNorm{dims}")(width) for width in (24, 48)]
    net = nn.Sequential(
        *(getattr(nn, f"Conv{dims}")(12, 24, 3, padding=1), norms[0], nn.ReLU()),
        *(layer(24, 48, 3, stride=2, padding=1, groups=2, bias=False), norms[1], nn.ReLU()),
        *(layer(48, 24, 3), getattr(nn, f"AdaptiveAvgPool{dims}")(1), nn.Flatten()),
        nn.Linear(24, K),
    )
    return stirred(net), torch.randn(B, 12, *[7] * int(dims[0])), y


def resnet() -> tuple[Any, Tensor, Tensor]:
    """Their ResNet, and inputs and labels for it."""
    return stirred(models.resnet(**RESNET)), torch.randn(B, 3, 8, 8), torch.randint(K, (B,))


def stirred(net: Any) -> Any:
    """The network without numbers that are equal, or 0 or 1, because it is a new one."""
    statistics = [norm for norm in net.modules() if isinstance(norm, _BatchNorm)]
    with torch.no_grad():
        for tensor in net.parameters():
            tensor.add_(0.1 * torch.randn_like(tensor))
        for norm in statistics:
            cast(Tensor, norm.running_mean).uniform_(-0.5, 0.5)
            cast(Tensor, norm.running_var).uniform_(0.5, 1.5)
    return net


def rebuilt(net: nn.Module, prefix: str, skip: Sequence[int] = (), **more: Any) -> nn.Module:
    """A copy of the network with their layers, as "Batch" makes it one of BatchLinear, BatchConv2d.

    Args:
        net: the network.
        prefix: what the names of their layers start with.
        skip: the places of layers that are kept.
        more: what their layers take beside what ours take.
    """
    theirs, found = copy.deepcopy(net), weighted_layers(net)
    for place, (name, layer) in enumerate(found.items()):
        if place in skip:
            continue
        linear, kind = isinstance(layer, nn.Linear), f"{prefix}{type(layer).__name__}"
        keys = ["in_channels", "out_channels", "kernel_size", "stride", "padding", "groups"]
        keys = ["in_features", "out_features"] if linear else keys
        given = more | {key: getattr(layer, key) for key in keys} | {"bias": layer.bias is not None}
        if prefix == "Packed":
            given |= {"first": place == 0, "last": place == len(found) - 1}
            given |= {} if linear else {"minimum_channels_per_group": 1}
            if given["first"] or given["last"]:  # as in their ResNet
                given["gamma"] = 1
        theirs.set_submodule(name, getattr(lpbnn if prefix == "LPBNN" else layers, kind)(**given))
    for name, norm in list(theirs.named_modules()) if prefix == "Packed" else ():
        if isinstance(norm, _BatchNorm):
            theirs.set_submodule(name, type(norm)(int(norm.num_features * more["alpha"])))
    return theirs


def filled(
    theirs: nn.Module,
    ours: Mapping[str, Tensor],
    names: Mapping[str, str],
    without: tuple[str, ...] = (),
) -> Pairs:
    """Give their network our numbers; the pairs of tensors that are the same then.

    Args:
        theirs: their network.
        ours: our tensors by their names.
        names: how names of ours end where those of theirs end otherwise.
        without: how names of ours end that have no place in theirs.
    """
    pairs, left = [], set(ours)
    for name, tensor in tensors(theirs).items():
        ends = [(end, own) for end, own in names.items() if f".{name}".endswith(f".{end}")]
        candidates = [name.removesuffix(end) + own for end, own in (*ends, ("", ""))]
        mine = next((candidate for candidate in candidates if candidate in ours), None)
        if mine is not None:
            pairs.append((ours[mine], tensor))
            left.discard(mine)
        elif not name.endswith((".pi", ".mus", ".sigmas")):  # of a prior
            raise ValueError(f"Nothing of ours is their {name}.")
    if forgotten := [name for name in left if not name.endswith(without)]:
        raise ValueError(f"Nothing of theirs is our {', '.join(forgotten)}.")
    with torch.no_grad():
        for own, tensor in pairs:
            tensor.copy_(own.reshape(tensor.shape))
    return pairs


def tensors(net: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers by their names."""
    return dict(net.named_parameters()) | dict(net.named_buffers())


# What is compared


def logits(method: Method, theirs: Tensor, x: Tensor, **members: Any) -> Pairs:
    """The logits of all members, `[M, B, K]`; theirs come as `[M B, K]`."""
    ours = torch.cat(list(method.eval().member_logits(x, **members)))
    return [(ours.detach(), theirs.detach().unflatten(0, (-1, len(x))))]


def step(ours: Tensor, theirs: Tensor, pairs: Pairs) -> Pairs:
    """The losses, their gradients of all parameters, and the buffers."""
    learned = [pair for pair in pairs if pair[0].requires_grad and pair[1].requires_grad]
    found = [(ours.detach().reshape(()), theirs.detach().reshape(()))]
    gradients = [
        torch.autograd.grad(loss, parameters, materialize_grads=True)
        for loss, parameters in zip((ours, theirs), zip(*learned, strict=True), strict=True)
    ]
    found += zip(*gradients, strict=True)
    found += [(a.clone(), b.clone()) for a, b in pairs if not isinstance(b, nn.Parameter)]
    return [(a.reshape(b.shape), b) for a, b in found]


def in_shares(method: Method, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of a batch that members share, and its rows and labels, those of member 0 first."""
    state = torch.random.get_rng_state()
    loss = method.train().training_loss(x, y)
    torch.random.set_rng_state(state)
    order = torch.randperm(M).argsort()  # the members have drawn their shares so
    x, y = (t.unflatten(0, (M, -1))[order].flatten(0, 1) for t in (x, y))
    return loss, x, y


@contextmanager
def noise(numbers: Sequence[Tensor]) -> Iterator[None]:
    """Let what draws normal noise get these numbers, one after the other, and all of them."""
    left = list(numbers)

    def draw(*like: Any, size: Any = None, **_: Any) -> Tensor:
        eps = left.pop(0)
        shape = size or (like if isinstance(like[0], int) else getattr(like[0], "shape", like[0]))
        if tuple(shape) != tuple(eps.shape):
            raise ValueError(f"Noise of {tuple(shape)} is drawn, not of {tuple(eps.shape)}.")
        return eps.to(torch.float64)

    with mock.patch.object(torch, "randn", draw), mock.patch.object(torch, "randn_like", draw):
        yield
    if left:
        raise ValueError(f"{len(left)} tensors of noise were not drawn.")
