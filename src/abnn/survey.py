"""What one pass over a few examples shows of a network: where its norms stand, and their sizes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from abnn.folding import first_tensor
from abnn.norm import BayesNorm
from abnn.outputs import Inputs, call

# Modules that make a new tensor, of which they keep nothing.
_MAKERS = (nn.modules.conv._ConvNd, nn.Linear)


@dataclass(frozen=True)
class Survey:
    """What the plan of a prediction rests on.

    Args:
        owned: the Bayesian layers, by index, that are handed what a convolution or linear layer
            has just made, and no hook has seen.
        row_bytes: memory of the largest input of a Bayesian layer, for one example.
        row_elements: numbers in all inputs of Bayesian layers, for one example.
        weights: numbers in all parameters of the network.
        writes_input: whether the network changes its input in place.
    """

    owned: frozenset[int] = frozenset()
    row_bytes: int = 1
    row_elements: int = 1
    weights: int = 0
    writes_input: bool = False


def survey(net: nn.Module, layers: Mapping[str, BayesNorm], inputs: Inputs) -> Survey:
    """Run a network once, without noise, and look at what its norms are given.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    >>> bnn = abnn.convert(net)
    >>> survey(bnn.backbone, bnn.bayes_layers, torch.zeros(2, 4))
    Survey(owned=frozenset({0}), row_bytes=32, row_elements=8, weights=83, writes_input=False)
    """
    B = first_tensor(inputs).shape[0]
    # The tensors are kept alive, for an identity can be used again.
    made: dict[int, Tensor] = {}
    seen: list[tuple[int, bool, Tensor]] = []

    def maker(module: nn.Module, args: Any, out: Any) -> None:
        if isinstance(out, Tensor):
            made[id(out)] = out

    def norm(layer: nn.Module, args: Any) -> None:
        assert isinstance(layer, BayesNorm)
        if args and isinstance(args[0], Tensor):
            seen.append((layer.bank.index, id(args[0]) in made, args[0]))

    hooked = {layer.bank.index for layer in layers.values() if has_hooks(layer)}
    leaves = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    before = [_version(leaf) for leaf in leaves]
    with ExitStack() as stack:
        for module in net.modules():
            if isinstance(module, _MAKERS) and not has_hooks(module):
                stack.callback(module.register_forward_hook(maker).remove)
        for layer in layers.values():
            stack.callback(layer.register_forward_pre_hook(norm).remove)
        call(net, inputs)
    owned = {index for index, _, _ in seen}
    owned -= {index for index, fresh, _ in seen if not fresh} | hooked
    sizes = [(x.numel() // B * x.element_size(), x.numel() // B) for _, _, x in seen]
    return Survey(
        owned=frozenset(owned),
        row_bytes=max((size for size, _ in sizes), default=1) or 1,
        row_elements=sum(elements for _, elements in sizes) or 1,
        weights=sum(p.numel() for name, p in net.named_parameters() if ".bank." not in f".{name}"),
        writes_input=before != [_version(leaf) for leaf in leaves],
    )


def has_hooks(module: nn.Module) -> bool:
    """Whether somebody looks at what goes into a module or comes out of it.

    >>> has_hooks(nn.Linear(1, 1))
    False
    """
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def share_of_trunk(net: nn.Module, layers: Mapping[str, BayesNorm], inputs: Inputs) -> float:
    """How much of a network's arithmetic stands before its first Bayesian layer.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4))
    >>> bnn = abnn.convert(net)
    >>> share_of_trunk(bnn.backbone, bnn.bayes_layers, torch.zeros(1, 4))
    0.5
    """
    from torch.utils.flop_counter import FlopCounterMode  # loads much that is rarely needed

    at_norms: list[int] = []
    with ExitStack() as stack, torch.no_grad():
        counter = stack.enter_context(FlopCounterMode(display=False))
        for layer in layers.values():
            count = layer.register_forward_pre_hook(
                lambda *_: at_norms.append(counter.get_total_flops())
            )
            stack.callback(count.remove)
        call(net, inputs)
        total = counter.get_total_flops()
    return at_norms[0] / total if at_norms and total else 0.0
