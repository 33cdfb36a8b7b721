"""What prediction sets hold: `[B, K, ...]`, whether each class is in the set."""

from __future__ import annotations

import torch
from torch import Tensor


def set_coverage(sets: Tensor, labels: Tensor) -> Tensor:
    """Whether each label is in its set, `[B, ...]`: the terms whose mean is the coverage.

    Args:
        sets: which classes are in the set, `[B, K, ...]`.
        labels: class indices, `[B, ...]`.

    >>> set_coverage(torch.tensor([[True, False], [True, False]]), torch.tensor([0, 1]))
    tensor([ True, False])
    """
    _check_sets(sets)
    if labels.shape != sets.shape[:1] + sets.shape[2:]:
        raise ValueError(
            f"Labels of shape {list(labels.shape)} do not fit sets of shape {list(sets.shape)}; "
            "give one label per set, with the classes at dimension 1."
        )
    if labels.numel() and (labels.min() < 0 or labels.max() >= sets.shape[1]):
        raise ValueError(
            f"The labels run from {labels.min()} to {labels.max()}, but the sets have "
            f"{sets.shape[1]} classes; remap the labels, or leave some out."
        )
    return sets.gather(1, labels.long().unsqueeze(1)).squeeze(1)


def set_size(sets: Tensor) -> Tensor:
    """Number of classes in each set, `[B, ...]`.

    >>> set_size(torch.tensor([[True, False, True], [False, False, False]]))
    tensor([2, 0])
    """
    _check_sets(sets)
    return sets.sum(1)


def _check_sets(sets: Tensor) -> None:
    if sets.dtype != torch.bool or sets.ndim < 2:
        raise ValueError(
            f"The sets are {sets.dtype} of shape {list(sets.shape)}; give Prediction.sets, which "
            "are booleans with the classes at dimension 1."
        )
