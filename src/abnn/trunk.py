"""What stands before the first Bayesian layer is the same for all samples, and runs once."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

# The attribute of a tensor that tells what it holds: a batch for all samples, or one for each.
_BRANCHED = "_abnn_branched"


class Trunk:
    """Where samples part: tensors of the trunk hold one batch, those of the branches S of them.

    Args:
        ends: the Bayesian layers, by index, whose input is of the trunk.
    """

    def __init__(self, ends: Set[int]) -> None:
        self.ends = ends

    def ends_at(self, layer: int, x: Tensor) -> bool:
        """Whether x, the input of a Bayesian layer, is the same for all samples."""
        return layer in self.ends

    def branch(self, y: Tensor) -> None:
        """Say that y, the output of a Bayesian layer, differs between samples."""

    def end_before(self, layer: int, x: Tensor, samples: int) -> Tensor:
        """The input of a Bayesian layer for every sample, where the layer can't take it once."""
        self.ends = self.ends - {layer}
        return torch.cat([x] * samples)


class WatchedTrunk(TorchFunctionMode, Trunk):
    """A trunk whose tensors may meet those of the branches again, as by a residual connection.

    Every operation is watched: where a tensor of the trunk meets one of a branch, it is repeated
    for all samples first.

    Args:
        batch: examples of one sample, B.
        samples: number of samples, S.

    >>> with WatchedTrunk(batch=1, samples=2) as trunk:
    ...     x = trunk.plant(torch.tensor([[1.0]]))
    ...     y = torch.cat([x * 2, x * 3])  # what a Bayesian layer does
    ...     trunk.branch(y)
    ...     y + x
    tensor([[3.],
            [4.]])
    """

    def __init__(self, batch: int, samples: int) -> None:
        super().__init__()
        self.batch, self.samples = batch, samples
        self.found: set[int] = set()
        self.ends = self.found
        self.meetings = 0

    def plant(self, inputs: Any) -> Any:
        """The inputs of a network, marked as the trunk's."""

        def visit(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            own = leaf.view_as(leaf)  # a mark on the user's own tensor would outlive the pass
            setattr(own, _BRANCHED, False)
            return own

        return pytree.tree_map(visit, inputs)

    def ends_at(self, layer: int, x: Tensor) -> bool:
        """Whether x, the input of a Bayesian layer, is the same for all samples."""
        if getattr(x, _BRANCHED, None) is not False:
            return False
        self.found.add(layer)
        return True

    def branch(self, y: Tensor) -> None:
        """Say that y, the output of a Bayesian layer, differs between samples."""
        setattr(y, _BRANCHED, True)

    def end_before(self, layer: int, x: Tensor, samples: int) -> Tensor:
        """The input of a Bayesian layer for every sample, where the layer can't take it once."""
        x = torch.cat([x] * samples)
        self.branch(x)
        return x

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, with its tensors brought to the same number of samples."""
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        marks = {getattr(leaf, _BRANCHED, None) for leaf in leaves if isinstance(leaf, Tensor)}
        if {True, False} <= marks:
            self.meetings += 1
            args, kwargs = pytree.tree_map(self._repeated, (args, kwargs))
        result = func(*args, **kwargs)
        if marks - {None}:
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, Tensor):
                    setattr(leaf, _BRANCHED, True in marks)
        return result

    def _repeated(self, leaf: Any) -> Any:
        of_trunk = isinstance(leaf, Tensor) and getattr(leaf, _BRANCHED, None) is False
        if not of_trunk or leaf.ndim == 0 or leaf.shape[0] != self.batch:
            return leaf
        return torch.cat([leaf] * self.samples)
