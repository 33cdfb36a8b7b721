"""How well a score tells out-of-distribution (OOD) from in-distribution (ID) examples.

A higher score means more out-of-distribution, and OOD is the positive class. The other direction,
ID as the positive class, swaps the two arguments and negates the scores.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from abnn.metrics.counts import LEAST_CAPACITY, Counts, dot, side_by_side


@dataclass(frozen=True)
class Detection:
    """How well one score detects one OOD dataset.

    Args:
        auroc: area under the ROC curve, the same in both directions.
        aupr: average precision, OOD positive.
        fpr95: share of ID flagged when 95 % of OOD is caught.
        aupr_in: average precision, ID positive.
        fpr95_in: share of OOD let in when 95 % of ID is accepted.
    """

    auroc: float
    aupr: float
    fpr95: float
    aupr_in: float
    fpr95_in: float

    def percent(self) -> Detection:
        """The same figures in percent.

        >>> Detection(0.9, 0.8, 0.25, 0.75, 0.5).percent().fpr95
        25.0
        """
        return Detection(*(100 * value for value in astuple(self)))


def detect(id_scores: Tensor, ood_scores: Tensor) -> Detection:
    """All detection figures, in both directions, from a single sort.

    >>> detect(torch.tensor([0.1, 0.2]), torch.tensor([0.8, 0.9]))
    Detection(auroc=1.0, aupr=1.0, fpr95=0.0, aupr_in=1.0, fpr95_in=0.0)
    """
    return _detection(*_ranked(id_scores, ood_scores))


def detect_counts(id_counts: Counts, ood_counts: Counts) -> Detection:
    """The same as `detect`, from scores that were counted batch by batch.

    Exact as long as both Counts are; `auroc_bound` says what dropped bits may have cost.

    Args:
        id_counts: scores of the in-distribution examples, in one column.
        ood_counts: scores of the out-of-distribution examples, in one column.

    >>> from abnn.metrics import Counts
    >>> known, unknown = Counts(), Counts()
    >>> known.update(torch.tensor([0.1, 0.5])), unknown.update(torch.tensor([0.5, 0.9]))
    (None, None)
    >>> detect_counts(known, unknown).auroc
    0.875
    """
    return _detection(*_side_by_side(id_counts, ood_counts))


def auroc_bound(id_counts: Counts, ood_counts: Counts) -> float:
    """How far the AUROC of `detect_counts` can be from the exact one: half the share of ties.

    >>> from abnn.metrics import Counts
    >>> known, unknown = Counts(), Counts()
    >>> known.update(torch.rand(9)), unknown.update(torch.rand(9))
    (None, None)
    >>> auroc_bound(known, unknown)
    0.0
    """
    ood, ind = _side_by_side(id_counts, ood_counts)
    if id_counts.exact and ood_counts.exact:
        return 0.0
    return dot(ood, ind) / (2 * int(ood.sum()) * int(ind.sum()))


def auroc(id_scores: Tensor, ood_scores: Tensor) -> float:
    """Area under the ROC curve: the chance that OOD scores above ID, a tie counting half.

    >>> auroc(torch.tensor([0.1, 0.5]), torch.tensor([0.5, 0.9]))
    0.875
    """
    return _auroc(*_ranked(id_scores, ood_scores))


def aupr(id_scores: Tensor, ood_scores: Tensor) -> float:
    """Average precision, `sum_t (recall_t - recall_{t-1}) * precision_t`, OOD positive.

    >>> aupr(torch.tensor([0.1, 0.5]), torch.tensor([0.3, 0.9]))
    0.8333333333333333
    """
    return _aupr(*_ranked(id_scores, ood_scores))


def fpr_at_recall(id_scores: Tensor, ood_scores: Tensor, recall: float = 0.95) -> float:
    """Share of ID that is flagged by the strictest threshold that catches enough OOD.

    Args:
        id_scores: scores of the in-distribution examples, any shape.
        ood_scores: scores of the out-of-distribution examples, any shape.
        recall: share of OOD to catch, at least.

    >>> fpr_at_recall(torch.tensor([0.1, 0.2, 0.3, 0.6]), torch.tensor([0.5, 0.9]))
    0.25
    """
    if not 0 < recall <= 1:
        raise ValueError(f"recall is {recall}; give a share above 0 and up to 1, such as 0.95.")
    return _fpr(*_ranked(id_scores, ood_scores), recall)


def _ranked(id_scores: Tensor, ood_scores: Tensor) -> tuple[Tensor, Tensor]:
    """How many OOD and ID examples have each distinct score, the highest score first."""
    counts = []
    for name, scores in (("in-distribution", id_scores), ("out-of-distribution", ood_scores)):
        if scores.isnan().any():
            raise ValueError(f"The {name} scores contain NaN; check the predictions they are of.")
        counts.append(Counts(capacity=max(LEAST_CAPACITY, scores.numel())))
        counts[-1].update(scores)
    return _side_by_side(*counts)


def _side_by_side(id_counts: Counts, ood_counts: Counts) -> tuple[Tensor, Tensor]:
    for name, counts in (("in-distribution", id_counts), ("out-of-distribution", ood_counts)):
        if counts.columns != 1:
            raise ValueError(
                f"The Counts of the {name} scores have {counts.columns} columns; give one."
            )
        if counts.n == (0,):
            raise ValueError(f"There are no {name} scores; give at least one.")
    ind, ood = side_by_side(id_counts, ood_counts).flip(0).unbind(1)
    return ood, ind


def _detection(ood: Tensor, ind: Tensor) -> Detection:
    # Negating the scores is reading the distinct ones from the other end.
    ood_back, ind_back = ood.flip(0), ind.flip(0)
    return Detection(
        auroc=_auroc(ood, ind),
        aupr=_aupr(ood, ind),
        fpr95=_fpr(ood, ind, 0.95),
        aupr_in=_aupr(ind_back, ood_back),
        fpr95_in=_fpr(ind_back, ood_back, 0.95),
    )


# Below, `pos` and `neg` count the examples of both classes at each distinct score. All but the
# last division is done on whole numbers, so the results are exact.


def _auroc(pos: Tensor, neg: Tensor) -> float:
    # Each negative is beaten by the positives above it and by half of those it ties with.
    twice = dot(neg, 2 * pos.cumsum(0) - pos)
    return twice / (2 * int(pos.sum()) * int(neg.sum()))


def _aupr(pos: Tensor, neg: Tensor) -> float:
    precision = pos.cumsum(0).double() / (pos + neg).cumsum(0)
    return float((pos * precision).sum().item() / pos.sum().item())


def _fpr(pos: Tensor, neg: Tensor, recall: float) -> float:
    reached = pos.cumsum(0).double() / pos.sum()
    first = torch.searchsorted(reached, recall)
    return float(neg.cumsum(0)[first].item() / neg.sum().item())
