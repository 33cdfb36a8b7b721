"""How a network is called, and where the logits are in what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

Inputs = Any  # a tensor, a tuple of arguments, or a mapping of keyword arguments
Output = Callable[[Any], Tensor]


def arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments that `inputs` stands for."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


def call(net: nn.Module, inputs: Inputs) -> Any:
    """Call `net` on a tensor, a tuple of arguments or a mapping of keyword arguments.

    >>> import torch
    >>> call(nn.Identity(), torch.ones(2))
    tensor([1., 1.])
    """
    args, kwargs = arguments(inputs)
    return net(*args, **kwargs)


def logits_of(result: Any, output: Output | None = None, class_dim: int = 1) -> Tensor:
    """Find the logits in what a network returned, with the classes moved to dimension 1.

    >>> import torch
    >>> logits_of({"out": torch.zeros(2, 5, 7)}, class_dim=-1).shape
    torch.Size([2, 7, 5])
    """
    logits = output(result) if output is not None else _find(result)
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise TypeError(
            f"The output= function returned {describe(logits)}, not a floating-point tensor "
            "of logits."
            if output is not None
            else f"The network returned {describe(result)}, in which no logits were found; "
            "pass output=lambda result: <the logits>."
        )
    if not -logits.ndim <= class_dim < logits.ndim or logits.ndim < 2:
        raise ValueError(
            f"The logits have shape {tuple(logits.shape)}, which has no class dimension "
            f"{class_dim}; pass class_dim= or an output= function."
        )
    logits = logits.movedim(class_dim, 1)
    if logits.shape[1] < 2:
        raise ValueError(
            f"The logits have {logits.shape[1]} class at dimension {class_dim}, and a softmax "
            "needs at least two; for a single sigmoid output z, return the two logits (0, z) "
            "through output=."
        )
    return logits


def _find(result: Any) -> Any:
    """The tensor, the first of a tuple, the "logits" or "out" of a mapping or object."""
    if isinstance(result, Tensor):
        return result
    for name in ("logits", "out"):
        if isinstance(result, Mapping) and name in result:
            return result[name]
        if isinstance(getattr(result, name, None), Tensor):
            return getattr(result, name)
    if isinstance(result, (tuple, list)) and result:
        return _find(result[0])
    return None


def describe(value: Any) -> str:
    """What a value is, in the words of an error message.

    >>> describe({"a": 1}), describe((1, 2))
    ("a dict with the keys ['a']", 'a tuple of 2')
    """
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys [{', '.join(map(repr, value))}]"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype}"
    return f"a {type(value).__name__}"
