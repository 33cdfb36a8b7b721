"""The curves of a report, thinned out so that a page can hold them; what is left is exact."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from abnn.metrics import Bins, risk_coverage
from abnn.metrics.counts import Floats, Ints
from abnn.prediction import Prediction
from abnn.report.data import Curve, Dots, Thresholds
from abnn.scores import SCORES

_POINTS = 300  # of a curve
_THRESHOLDS = 600  # of a score, and as many more where mistakes are
_BINS = 40
_DOTS = 400  # of a kind


def thresholds(
    name: str, known: Prediction, correct: Tensor, ood: Mapping[str, Prediction]
) -> Thresholds:
    """What is kept below the thresholds of one score, by its name in `abnn.scores`.

    Among the thresholds are those right below a mistake, up to some hundreds: where the share of
    mistakes that is caught changes.

    >>> known = Prediction.from_logits(torch.tensor([[[3.0, 0.0], [1.0, 0.0]]]))
    >>> found = thresholds("msp", known, torch.tensor([True, False]), {})
    >>> [round(value, 3) for value in found.values], found.right, found.wrong
    ([0.047, 0.269], [1, 1], [0, 1])
    """
    score = SCORES[name]
    groups = {"": score(known)} | {dataset: score(p) for dataset, p in ood.items()}
    values = {k: np.sort(v.double().numpy()) for k, v in groups.items()}
    scored = score(known).double().numpy()
    right, wrong = np.sort(scored[correct.numpy()]), np.sort(scored[~correct.numpy()])
    distinct = np.unique(np.concatenate(list(values.values())))
    chosen = _thinned(distinct, _THRESHOLDS)
    below = np.searchsorted(distinct, np.unique(_thinned(wrong, _THRESHOLDS))) - 1
    grid = np.unique(np.concatenate([chosen, distinct[below[below >= 0]]]))
    # A line of equal scores has no width to divide into bins.
    low, high = distinct[0], distinct[-1] if distinct[-1] > distinct[0] else distinct[0] + 1
    edges = np.linspace(low, high, _BINS + 1)
    unknown = {dataset: values[dataset] for dataset in ood}
    return Thresholds(
        values=grid.tolist(),
        right=_kept(right, grid),
        wrong=_kept(wrong, grid),
        ood={dataset: _kept(v, grid) for dataset, v in unknown.items()},
        edges=edges.tolist(),
        right_bins=np.histogram(right, edges)[0].tolist(),
        wrong_bins=np.histogram(wrong, edges)[0].tolist(),
        ood_bins={k: np.histogram(v, edges)[0].tolist() for k, v in unknown.items()},
    )


def _kept(ordered: Floats, grid: Floats) -> list[int]:
    found: list[int] = np.searchsorted(ordered, grid, side="right").tolist()
    return found


def roc_and_pr(id_scores: Tensor, ood_scores: Tensor) -> tuple[Curve, Curve]:
    """False against true positive rate, and recall against precision; OOD is positive.

    >>> roc, pr = roc_and_pr(torch.tensor([0.1, 0.2]), torch.tensor([0.15, 0.9]))
    >>> roc
    Curve(x=[0.0, 0.0, 0.5, 0.5, 1.0], y=[0.0, 0.5, 0.5, 1.0, 1.0])
    >>> pr.y
    [1.0, 1.0, 0.5, 0.66..., 0.5]
    """
    scores = torch.cat([id_scores, ood_scores]).double().numpy()
    positive = np.arange(len(scores)) >= len(id_scores)
    distinct, place = np.unique(-scores, return_inverse=True)
    size = len(distinct)
    hits = np.bincount(place[positive], minlength=size).cumsum()
    alarms = np.bincount(place[~positive], minlength=size).cumsum()
    hits, alarms = np.r_[0, hits], np.r_[0, alarms]
    flagged = hits + alarms
    precision = np.where(flagged > 0, hits / np.maximum(flagged, 1), 1.0)
    rows = _rows(len(hits))
    recall = (hits / hits[-1])[rows].tolist()
    return (
        Curve((alarms / alarms[-1])[rows].tolist(), recall),
        Curve(recall, precision[rows].tolist()),
    )


def risk_curve(confidence: Tensor, correct: Tensor) -> Curve:
    """Coverage against risk.

    >>> risk_curve(torch.tensor([0.9, 0.8]), torch.tensor([True, False]))
    Curve(x=[0.5, 1.0], y=[0.0, 0.5])
    """
    coverage, risk = risk_coverage(confidence, correct)
    rows = _rows(len(coverage))
    return Curve(coverage.numpy()[rows].tolist(), risk.numpy()[rows].tolist())


def reliability_bins(confidence: Tensor, correct: Tensor) -> list[tuple[float, float, int]]:
    """Mean confidence, accuracy and number of examples of every bin that has any.

    >>> reliability_bins(torch.tensor([0.75, 0.75]), torch.tensor([True, False]))
    [(0.75, 0.5, 2)]
    """
    bins = Bins()
    bins.update(confidence, correct)
    rows = zip(*(column.tolist() for column in bins.reliability()), strict=True)
    return [row for row in rows if row[2]]


def dots(known: Prediction, correct: Tensor, ood: Mapping[str, Prediction]) -> list[Dots]:
    """Some examples of every kind, drawn at random but always the same.

    >>> known = Prediction.from_logits(torch.zeros(1, 3, 2))
    >>> [(d.kind, len(d.confidence)) for d in dots(known, torch.tensor([True, True, False]), {})]
    [('right', 2), ('wrong', 1)]
    """
    kinds = {"right": known[correct], "wrong": known[~correct], **ood}
    rng = np.random.default_rng(0)
    found = []
    for kind, prediction in kinds.items():
        n = len(prediction.log_probs)
        rows = torch.from_numpy(np.sort(rng.permutation(n)[:_DOTS]))
        some = prediction[rows]
        found.append(Dots(kind, some.confidence.tolist(), some.epistemic.tolist()))
    return found


def _thinned(values: Floats, most: int) -> Floats:
    return values[_rows(len(values), most)]


def _rows(n: int, most: int = _POINTS) -> Ints:
    """Up to so many of n rows, evenly spread, the first and the last among them."""
    rows: Ints = np.linspace(0, n - 1, min(n, most)).round().astype(int)
    return rows
