"""Samples as a batch dimension: copies of the inputs, and whether a network can be trusted so."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from abnn.outputs import Inputs, arguments


def first_tensor(inputs: Inputs) -> Tensor:
    """The input whose leading dimension is taken for the batch.

    >>> first_tensor({"input_ids": torch.zeros(2, 5), "mask": torch.ones(2, 5)}).shape
    torch.Size([2, 5])
    """
    leaves = pytree.tree_leaves(arguments(inputs))
    tensor = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
    if tensor is None:
        raise TypeError("The input holds no tensor; pass a tensor, a tuple or a mapping of them.")
    return tensor


def signature(inputs: Inputs) -> tuple[Any, ...]:
    """What kind of input this is: its structure, and which of its tensors hold the batch.

    >>> signature(torch.zeros(2, 5)) == signature(torch.zeros(9, 4))
    True
    """
    leaves, structure = pytree.tree_flatten(arguments(inputs))
    B = first_tensor(inputs).shape[:1]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    # As text, because not every version of torch can hash the structure itself.
    return str(structure), *((t.ndim, t.dtype, t.shape[:1] == B) for t in tensors)


def repeat(inputs: Inputs, S: int) -> Inputs:
    """S copies of every tensor that holds the batch, one after the other.

    >>> repeat(torch.tensor([1, 2]), 2)
    (tensor([1, 2, 1, 2]),)
    """
    return _map_batched(inputs, lambda t: torch.cat([t] * S))


def head(inputs: Inputs, rows: int) -> Inputs:
    """The first examples of the batch.

    >>> head(torch.arange(5), 2)
    (tensor([0, 1]),)
    """
    return _map_batched(inputs, lambda t: t[:rows])


def pieces(inputs: Inputs, rows: int | None) -> Iterator[Inputs]:
    """The batch in consecutive pieces of at most so many examples; None leaves it whole.

    >>> [piece[0].shape for piece in pieces(torch.zeros(5, 2), 3)]
    [torch.Size([3, 2]), torch.Size([2, 2])]
    """
    B = first_tensor(inputs).shape[0]
    if rows is None or rows >= B:
        yield inputs
        return
    for start in range(0, B, rows):
        yield _map_batched(inputs, lambda t, start=start: t[start : start + rows])


def clone(inputs: Inputs) -> Inputs:
    """Inputs that a network may write to.

    >>> x = torch.zeros(1)
    >>> clone(x)[0] is x
    False
    """
    args, kwargs = pytree.tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, arguments(inputs)
    )
    return kwargs or args


def channels_last(inputs: Inputs) -> Inputs:
    """Images with the channel as the fastest index; the numbers and shapes stay as they are.

    >>> channels_last(torch.zeros(1, 3, 8, 8))[0].stride()
    (192, 1, 24, 3)
    >>> channels_last(torch.zeros(2, 1, 8, 8))[0].stride()
    (64, 1, 8, 1)
    """

    def visit(leaf: Any) -> Any:
        image = isinstance(leaf, Tensor) and leaf.ndim == 4
        # Not `contiguous`, for which one channel lies in any order: layers look at the strides.
        return leaf.to(memory_format=torch.channels_last) if image else leaf

    args, kwargs = pytree.tree_map(visit, arguments(inputs))
    return kwargs or args


def take(inputs: Inputs, rows: Tensor) -> Inputs:
    """The examples of the batch at the given indices.

    >>> take(torch.tensor([5, 6, 7]), torch.tensor([0, 2]))
    (tensor([5, 7]),)
    """
    return _map_batched(inputs, lambda t: t[rows].contiguous(memory_format=_layout(t)))


def all_batched(inputs: Inputs) -> bool:
    """Whether every tensor of the inputs holds the batch as its leading dimension.

    >>> all_batched((torch.zeros(4, 2), torch.zeros(4)))
    True
    >>> all_batched((torch.zeros(4, 2), torch.zeros(3)))
    False
    """
    B = first_tensor(inputs).shape[:1]
    leaves = pytree.tree_leaves(arguments(inputs))
    return all(leaf.shape[:1] == B for leaf in leaves if isinstance(leaf, Tensor))


def _layout(t: Tensor) -> torch.memory_format:
    channels_last = t.ndim == 4 and t.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if channels_last else torch.contiguous_format


def _map_batched(inputs: Inputs, change: Any) -> Inputs:
    B = first_tensor(inputs).shape[0]

    def visit(leaf: Any) -> Any:
        batched = isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == B
        return change(leaf) if batched else leaf

    args, kwargs = pytree.tree_map(visit, arguments(inputs))
    return kwargs or args


def agree(folded: Tensor, one_by_one: Tensor, half: bool) -> bool:
    """Whether samples that ran together, `[S, B, ...]`, are those that ran one by one.

    A wrong order of samples is off by as much as they differ; rounding is far below that, in half
    precision less far.

    >>> samples = torch.randn(3, 2, 4)
    >>> agree(samples + 1e-6, samples, half=False), agree(samples.roll(1, 0), samples, half=True)
    (True, False)
    """
    if folded.shape != one_by_one.shape:
        return False
    folded, one_by_one = folded.double(), one_by_one.double()
    spread = (one_by_one - one_by_one.mean(0)).abs().max()
    size = one_by_one.abs().max()
    tolerance = 0.3 * spread + 1e-2 * size if half else 1e-3 * spread + 1e-5 * size
    return bool((folded - one_by_one).abs().max() <= tolerance)


def any_half(values: Iterable[Any]) -> bool:
    """Whether any of the tensors is in half precision, or autocast would make it so.

    >>> any_half([torch.zeros(1)]), any_half([torch.zeros(1).bfloat16()])
    (False, True)
    """
    half = (torch.float16, torch.bfloat16)
    autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    return autocast or any(isinstance(v, Tensor) and v.dtype in half for v in values)


@contextmanager
def no_fused_encoder() -> Iterator[None]:
    """Keep `nn.TransformerEncoderLayer` from reading its norms' weights instead of calling them."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
