"""How good predictions are against the labels: accuracy, top-k, likelihood and Brier score.

Classes are dimension 1 of the predictions `[B, K, ...]`; the labels are `[B, ...]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Wide enough for half precision, narrow enough to tell probabilities from logits.
SUM_TOLERANCE = 0.01


def accuracy(scores: Tensor, labels: Tensor) -> float:
    """Share of examples whose largest score is the label's.

    Args:
        scores: probabilities, their logarithms, or logits, `[B, K, ...]`.
        labels: class indices, `[B, ...]`.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 1]))
    0.5
    """
    check(scores, labels)
    return _mean(scores.argmax(1) == labels)


def top_k_accuracy(scores: Tensor, labels: Tensor, k: int = 5) -> float:
    """Share of examples whose label is among the k largest scores; of equal ones, the first count.

    Args:
        scores: probabilities, their logarithms, or logits, `[B, K, ...]`.
        labels: class indices, `[B, ...]`.
        k: number of guesses; with as many as there are classes, all are right.

    >>> top_k_accuracy(torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1]]), torch.tensor([1, 2]), k=2)
    0.5
    """
    if k < 1:
        raise ValueError(f"k is {k}; give the number of guesses, at least 1.")
    return _mean(label_rank(scores, labels) < k)


def nll(log_probs: Tensor, labels: Tensor) -> float:
    """Negative log-likelihood, `-mean log p[y]`, in nats.

    >>> probs = torch.tensor([[0.5, 0.5], [0.25, 0.75]])
    >>> round(nll(probs.log(), torch.tensor([0, 0])), 4)
    1.0397
    """
    return -_mean(log_likelihood(log_probs, labels))


def brier(probs: Tensor, labels: Tensor) -> float:
    """Brier score over all classes, `mean sum_k (p[k] - [k = y])^2`, from 0 to 2.

    >>> brier(torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([1, 1]))
    1.25
    """
    return _mean(squared_error(probs, labels))


def label_rank(scores: Tensor, labels: Tensor) -> Tensor:
    """Number of classes that come before the label, `[B, ...]`: the terms of `top_k_accuracy`.

    Classes with the label's own score come before it if their index is lower, as for `argmax`.

    >>> label_rank(torch.tensor([[0.4, 0.2, 0.4]]), torch.tensor([2]))
    tensor([1])
    """
    check(scores, labels)
    index = labels.long().unsqueeze(1)
    own = scores.gather(1, index)
    classes = torch.arange(scores.shape[1], device=scores.device)
    lower = classes.view(-1, *[1] * (scores.dim() - 2)) < index
    return ((scores > own) | ((scores == own) & lower)).sum(1)


def log_likelihood(log_probs: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of each label, `[B, ...]`: the terms whose mean is `-nll`.

    >>> log_likelihood(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([1]))
    tensor([-0.6931])
    """
    check(log_probs, labels)
    check_normalised(log_probs.exp(), "exponentials of the log-probabilities")
    return log_probs.gather(1, labels.long().unsqueeze(1)).squeeze(1)


def squared_error(probs: Tensor, labels: Tensor) -> Tensor:
    """Squared distance of each prediction from its label, `[B, ...]`: the terms of `brier`.

    >>> squared_error(torch.tensor([[0.5, 0.5]]), torch.tensor([1]))
    tensor([0.5000])
    """
    check(probs, labels)
    check_normalised(probs, "probabilities")
    probs = probs if probs.dtype == torch.float64 else probs.float()
    index = labels.long().unsqueeze(1)
    # Subtracting the one-hot label before squaring loses no digits when p[y] is close to 1.
    return probs.scatter_add(1, index, probs.new_full((), -1.0).expand_as(index)).square().sum(1)


def _mean(terms: Tensor) -> float:
    # On the CPU first: some accelerators have no float64.
    return terms.cpu().double().mean().item()


def check(scores: Tensor, labels: Tensor) -> None:
    """Refuse labels that do not fit the predictions, and predictions that are NaN."""
    if scores.dim() < 2 or labels.shape != scores.shape[:1] + scores.shape[2:]:
        raise ValueError(
            f"Labels of shape {list(labels.shape)} do not fit predictions of shape "
            f"{list(scores.shape)}; give one label per prediction, with the classes at dimension 1."
        )
    if labels.numel() == 0:
        raise ValueError("There are no examples to score; give at least one.")
    if labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"The labels are {labels.dtype}; give class indices as integers.")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= scores.shape[1]:
        raise ValueError(
            f"The labels run from {low} to {high}, but the predictions have {scores.shape[1]} "
            "classes; remap the labels, or leave some out (`evaluate` has `ignore_index`)."
        )
    if scores.isnan().any():
        raise ValueError("The predictions contain NaN; check the network and its inputs.")


def check_normalised(probs: Tensor, name: str) -> None:
    """Refuse what is no distribution over the classes, calling it `name`."""
    total = probs.sum(1)
    if (probs < 0).any() or ((total - 1).abs() > SUM_TOLERANCE).any():
        raise ValueError(
            f"The {name} do not form a distribution over the classes; "
            "apply softmax (or log_softmax) over dimension 1 first."
        )
