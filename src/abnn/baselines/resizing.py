"""Give the layers of a network other widths, and say where that goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from abnn.surgery import channel_dim, weighted_layers, widths


def ends(net: nn.Module, first: str | None, last: str | None) -> tuple[str, str]:
    """The names of the layers that the input enters and that make the logits.

    >>> ends(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), None, None)
    ('0', '2')
    """
    names = list(weighted_layers(net))
    for argument, name in (("first", first), ("last", last)):
        if name is not None and name not in names:
            raise ValueError(
                f"{argument}={name!r} is no convolution or linear layer of the network; its "
                f"layers are {', '.join(map(repr, names))}."
            )
    return first or names[0], last or names[-1]


def resize(net: nn.Module, name: str, inputs: int, outputs: int, groups: int = 1) -> None:
    """Give a convolution or linear layer other widths, and new weights, drawn as it always does.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 5))
    >>> resize(net, "0", inputs=6, outputs=8, groups=2)
    >>> net[0].weight.shape
    torch.Size([8, 3, 5, 5])
    """
    layer: Any = net.get_submodule(name)
    weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
    if weight is None:
        raise ValueError(
            f"The weight of the layer {name!r} is computed from other tensors, as by weight or "
            "spectral norm, so its widths can't be changed; remove that first."
        )
    holders = [m for m in net.modules() if any(p is weight for p in m._parameters.values())]
    if len(holders) > 1:
        raise ValueError(
            f"The layer {name!r} shares its weight with another layer, so its widths can't be "
            "changed; give each a weight of its own."
        )
    if isinstance(layer, nn.Linear):
        layer.in_features, layer.out_features = inputs, outputs
    else:
        layer.in_channels, layer.out_channels, layer.groups = inputs, outputs, groups
    leading = (outputs, inputs // groups)
    if getattr(layer, "transposed", False):
        leading = (inputs, outputs // groups)
    layer.weight = nn.Parameter(weight.detach().new_empty(*leading, *weight.shape[2:]))
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().new_empty(outputs))
    layer.reset_parameters()


class Grouped(nn.Linear):
    """A linear layer in groups, as a grouped convolution is: its matrix is block diagonal."""

    groups: int

    def forward(self, x: Tensor) -> Tensor:
        """Every group of outputs from its group of inputs."""
        blocks = self.weight.unflatten(0, (self.groups, -1))
        y = torch.einsum("...gi,goi->...go", x.unflatten(-1, (self.groups, -1)), blocks)
        return y.flatten(-2) if self.bias is None else y.flatten(-2) + self.bias


def narrow(net: nn.Module, first: str, last: str, width: Callable[[int], int], gamma: int) -> None:
    """Make every layer and norm as wide as `width` says, but for the input and the logits.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1))
    >>> narrow(net, "0", "2", lambda C: C // 2, gamma=1)
    >>> [(layer.in_channels, layer.out_channels, layer.groups) for layer in net]
    [(3, 4, 1), (4, 4, 4), (4, 8, 1)]
    """
    entered, C = False, widths(net.get_submodule(first))[0]
    for name, module in net.named_modules():
        if (
            isinstance(module, nn.MultiheadAttention)
            and width(module.embed_dim) != module.embed_dim
        ):
            raise ValueError(
                f"The attention {name!r} can't be given other widths; give alpha as large as "
                "members, which leaves every width as it is."
            )
        entered = entered or name == first
        before = norm_width(module)
        if before and (entered or before != C):  # otherwise it is a norm of the input
            resize_norm(module, width(before))
    for name, layer in weighted_layers(net).items():
        C_in, C_out = widths(layer)
        inputs = C_in if name == first else width(C_in)
        outputs = C_out if name == last else width(C_out)
        groups = getattr(layer, "groups", 1)
        if 1 < groups == C_in:  # every channel on its own, and so it stays
            groups = inputs
        elif name not in (first, last) and 1 not in (C_in, C_out):
            groups *= gamma
        if inputs % groups or outputs % groups:
            raise ValueError(
                f"The layer {name!r} would have {inputs} channels in and {outputs} out, which "
                f"{groups} groups don't divide; choose other members, alpha or gamma."
            )
        resize(net, name, inputs, outputs, groups)
        if isinstance(layer, nn.Linear) and groups > 1:
            if type(layer) is not nn.Linear:
                raise ValueError(
                    f"The layer {name!r} is a {type(layer).__name__}, which can't be split into "
                    "groups; use gamma=1."
                )
            layer.__class__ = Grouped
            setattr(layer, "groups", groups)  # noqa: B010


NORMS = {"num_features": _NormBase, "num_channels": nn.GroupNorm, "num_parameters": nn.PReLU}
SHAPED = (nn.LayerNorm, nn.RMSNorm)


def norm_width(norm: Any) -> int:
    """The channels of a norm, or slopes of a PReLU; 0 for any other module.

    >>> norm_width(nn.GroupNorm(2, 8)), norm_width(nn.ReLU())
    (8, 0)
    """
    if isinstance(norm, SHAPED):
        return int(norm.normalized_shape[0])
    return next((int(getattr(norm, n)) for n, kind in NORMS.items() if isinstance(norm, kind)), 0)


def resize_norm(norm: Any, width: int) -> None:
    """Give a norm another number of channels, and new values; its groups keep their size.

    >>> norm = nn.GroupNorm(4, 8)
    >>> resize_norm(norm, 6)
    >>> norm.num_groups, norm.weight.shape
    (3, torch.Size([6]))
    """
    before = norm_width(norm)
    if isinstance(norm, nn.GroupNorm) and norm.num_groups > 1:  # one group is all channels
        norm.num_groups = max(1, norm.num_groups * width // before)
        if width % norm.num_groups:
            raise ValueError(
                f"The {width} channels of a member don't make {norm.num_groups} groups for its "
                "group norm; choose other members, alpha or gamma."
            )
    if isinstance(norm, SHAPED):
        norm.normalized_shape = (width, *norm.normalized_shape[1:])
    for name, kind in NORMS.items():
        if isinstance(norm, kind):
            setattr(norm, name, width)
    for holder in (norm._parameters, norm._buffers):
        for name, tensor in holder.items():
            if tensor is not None and tensor.ndim and len(tensor) == before:
                new = tensor.detach().new_empty(width, *tensor.shape[1:])
                holder[name] = nn.Parameter(new) if isinstance(tensor, nn.Parameter) else new
    norm.reset_parameters()


Running = list[tuple[str, nn.Module, tuple[int, ...] | None]]


@contextmanager
def running(net: nn.Module) -> Iterator[Running]:
    """Which modules are running, the innermost last, each with the shape of its input.

    After an error this is where it came from.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.Linear(9, 2))
    >>> with running(net) as stack:
    ...     try:
    ...         net(torch.zeros(1, 4))
    ...     except RuntimeError:
    ...         print(stack[-1])
    ('1', Linear(in_features=9, out_features=2, bias=True), (1, 8))
    """
    stack: Running = []

    def enter(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        given = args and isinstance(args[0], Tensor)
        stack.append((name, module, tuple(cast(Tensor, args[0]).shape) if given else None))

    def leave(module: nn.Module, args: Any, result: Any) -> None:
        stack.pop()

    handles = []
    for name, module in net.named_modules():

        def before(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            enter(name, module, args)

        handles.append(module.register_forward_pre_hook(before))
        handles.append(module.register_forward_hook(leave))
    try:
        yield stack
    finally:
        for handle in handles:
            handle.remove()


def blame(stack: Running) -> str:
    """What the innermost of the running modules could not take, in words."""
    name, module, shape = stack[-1]
    if isinstance(module, nn.Linear | _ConvNd) and shape:
        takes, dim = widths(module)[0], channel_dim(module)
        if len(shape) >= -dim and shape[dim] != takes:
            return f"the layer {name!r} takes {takes} channels and got {shape[dim]}"
    part = (
        f"{name!r}, a {type(module).__name__}," if name else f"the {type(module).__name__} itself"
    )
    return f"{part} failed on {'its input' if shape is None else f'an input of shape {shape}'}"
