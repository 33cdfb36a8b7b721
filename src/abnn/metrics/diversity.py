"""How much the members of an ensemble differ in what they predict.

The members are `[S, B, K, ...]`, with S members and the classes at dimension 2, as in
`Prediction.members`. Each member votes for the class of its largest score.
"""

from __future__ import annotations

import torch
from torch import Tensor


def disagreement(members: Tensor) -> Tensor:
    """Share of the pairs of members that vote for different classes, per example, `[B, ...]`.

    With `n_k` votes for class k, `1 - sum_k n_k (n_k - 1) / (S (S - 1))`; 0 for a single member.

    Args:
        members: probabilities, their logarithms, or logits, `[S, B, K, ...]`.

    >>> members = torch.tensor([[[0.9, 0.1]], [[0.8, 0.2]], [[0.3, 0.7]]])
    >>> disagreement(members)
    tensor([0.6667])
    """
    _check(members)
    size = members.shape[0]
    votes = torch.zeros(members.shape[1:], dtype=torch.int64, device=members.device)
    for member in members:
        label = member.argmax(1, keepdim=True)
        votes.scatter_add_(1, label, torch.ones_like(label))
    return disagreement_of_votes(votes, size)


def disagreement_of_votes(votes: Tensor, size: int) -> Tensor:
    """The same from the number of votes for every class, `[B, K, ...]`, of `size` members.

    >>> disagreement_of_votes(torch.tensor([[2, 1]]), 3)
    tensor([0.6667])
    """
    alike = (votes * (votes - 1)).sum(1)
    return (size * (size - 1) - alike).float() / max(1, size * (size - 1))


def disagreement_matrix(members: Tensor) -> Tensor:
    """Share of the examples on which two members vote for different classes, `[S, S]`.

    Args:
        members: probabilities, their logarithms, or logits, `[S, B, K, ...]`.

    >>> members = torch.tensor([[[0.9, 0.1]], [[0.8, 0.2]], [[0.3, 0.7]]])
    >>> disagreement_matrix(members)
    tensor([[0., 0., 1.],
            [0., 0., 1.],
            [1., 1., 0.]], dtype=torch.float64)
    """
    _check(members)
    labels = torch.stack([member.argmax(1).flatten() for member in members])
    differing = torch.stack([(label != labels).sum(1) for label in labels])
    # On the CPU first: some accelerators have no float64.
    return differing.cpu().double() / labels.shape[1]


def _check(members: Tensor) -> None:
    if members.dim() < 3:
        raise ValueError(
            f"The members have shape {list(members.shape)}; give [S, B, K, ...], with the members "
            "first, then the examples, then the classes."
        )
    if members.numel() == 0:
        raise ValueError(
            f"The members have shape {list(members.shape)}, which holds nothing to compare; give "
            "at least one member and one example."
        )
    if members.isnan().any():
        raise ValueError("The members contain NaN; check the network and its inputs.")
