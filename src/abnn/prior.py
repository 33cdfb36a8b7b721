"""The random class prior, and the loss it is part of.

    L = L_MAP + E = -sum_i (1 + eta[y_i]) log P(y_i | x_i, w) - log P(w)

The Gaussian prior `log P(w)` is the optimiser's weight decay.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from abnn.draws import generator


@dataclass(frozen=True)
class RandomPrior:
    """Class weights eta that every mode draws once, so that the modes do not collapse into one.

    Args:
        classes: how many classes get the weight: a number, or "sqrt" for the root of K.
        weight: their eta; the others have 0.

    >>> RandomPrior(classes=2, weight=6.0).draw(classes=5, seed=0, mode=1).sum()
    tensor(12.)
    """

    classes: int | Literal["sqrt"] = "sqrt"
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.classes != "sqrt" and (not isinstance(self.classes, int) or self.classes < 0):
            raise ValueError(f"RandomPrior(classes={self.classes!r}) must be a number or 'sqrt'.")
        number = isinstance(self.weight, (int, float, np.floating)) and math.isfinite(self.weight)
        if not number or self.weight < 0:
            raise ValueError(
                f"RandomPrior(weight={self.weight!r}) must be a finite number of at least 0."
            )
        object.__setattr__(self, "weight", float(self.weight))  # a number of numpy is no JSON

    def draw(self, classes: int, seed: int, mode: int) -> Tensor:
        """The eta of one mode, `[K]`."""
        chosen = math.isqrt(classes) if self.classes == "sqrt" else min(self.classes, classes)
        eta = torch.zeros(classes)
        eta[generator("prior", seed, mode).permutation(classes)[:chosen].copy()] = self.weight
        return eta


def abnn_loss(
    logits: Tensor,
    labels: Tensor,
    eta: Tensor,
    ignore_index: int = -100,
    count: int | None = None,
) -> Tensor:
    """`mean_i (1 + eta[y_i]) * CE_i` for every mode, `[S]`; never divided by the weights' sum.

    Args:
        logits: `[S, B, K, ...]`.
        labels: `[B, ...]`.
        eta: class weights of every mode, `[S, K]`.
        ignore_index: label of examples or pixels that do not count.
        count: how many labels count, where these are a part of the batch; the losses of all parts
            add up to that of the batch.

    >>> logits, labels = torch.zeros(1, 4, 2), torch.tensor([0, 0, 1, 1])
    >>> abnn_loss(logits, labels, eta=torch.tensor([[1.0, 0.0]]))  # (2 + 2 + 1 + 1) / 4 * log 2
    tensor([1.0397])
    """
    S = len(logits)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    ce: Tensor = F.cross_entropy(
        wide.flatten(0, 1),
        labels.expand(S, *labels.shape).flatten(0, 1),
        reduction="none",
        ignore_index=ignore_index,
    ).unflatten(0, (S, -1))
    counts = labels != ignore_index
    weight = (1 + eta[:, labels.where(counts, 0)]) * counts
    total = (weight * ce).flatten(1).sum(1)
    return total / (counts.sum().clamp_min(1) if count is None else max(1, count))
