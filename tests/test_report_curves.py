"""Curves of a report: exact at every point that is left."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import precision_recall_curve, roc_curve
from torch import Tensor

from abnn import Prediction, metrics
from abnn.report import curves
from abnn.scores import SCORES


def predictions(seed: int, n: int, K: int = 5) -> Prediction:
    g = torch.Generator().manual_seed(seed)
    return Prediction.from_logits(2 * torch.randn(4, n, K, generator=g))


def example(n: int) -> tuple[Prediction, Tensor, dict[str, Prediction]]:
    known = predictions(0, n)
    chance = torch.rand(n, generator=torch.Generator().manual_seed(1))
    return known, chance < known.confidence, {"far": predictions(2, n // 2)}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("n", [20, 5000])
def test_what_is_kept_is_counted_at_every_threshold(name: str, n: int) -> None:
    known, correct, ood = example(n)
    found = curves.thresholds(name, known, correct, ood)
    score = SCORES[name](known).double()
    far = SCORES[name](ood["far"]).double()
    for i in range(0, len(found.values), 7):
        kept = score <= found.values[i]
        assert found.right[i] == (kept & correct).sum()
        assert found.wrong[i] == (kept & ~correct).sum()
        assert found.ood["far"][i] == (far <= found.values[i]).sum()
    assert (found.right[-1], found.wrong[-1]) == (int(correct.sum()), int((~correct).sum()))
    assert found.values == sorted(set(found.values))
    assert len(found.values) <= 1200


def test_every_mistake_has_a_threshold_right_below_it() -> None:
    known, correct, _ = example(300)
    found = curves.thresholds("msp", known, correct, {})
    score = SCORES["msp"](known).double()
    distinct = score.unique()
    for mistake in score[~correct]:
        below = distinct[distinct < mistake]
        assert not len(below) or below[-1].item() in found.values


def test_bins_hold_all_examples() -> None:
    known, correct, ood = example(500)
    found = curves.thresholds("energy", known, correct, ood)
    assert sum(found.right_bins) == correct.sum()
    assert sum(found.wrong_bins) == (~correct).sum()
    assert sum(found.ood_bins["far"]) == 250
    assert len(found.edges) == len(found.right_bins) + 1


def test_equal_scores_make_one_threshold() -> None:
    flat = Prediction.from_logits(torch.zeros(1, 4, 2))
    found = curves.thresholds("msp", flat, torch.tensor([True, True, True, False]), {})
    assert (found.values, found.right, found.wrong) == ([0.5], [3], [1])
    assert sum(found.right_bins) == 3


@pytest.mark.parametrize("ties", [False, True])
def test_roc_and_pr_are_those_of_scikit_learn(ties: bool) -> None:
    g = torch.Generator().manual_seed(0)
    known, unknown = torch.randn(50, generator=g), torch.randn(40, generator=g) + 1
    if ties:
        known, unknown = known.round(), unknown.round()
    truth = np.r_[np.zeros(50), np.ones(40)]
    scores = torch.cat([known, unknown]).numpy()
    fpr, tpr, _ = roc_curve(truth, scores, drop_intermediate=False)
    precision, recall, _ = precision_recall_curve(truth, scores)
    roc, pr = curves.roc_and_pr(known, unknown)
    np.testing.assert_allclose(roc.x, fpr)
    np.testing.assert_allclose(roc.y, tpr)
    np.testing.assert_allclose(pr.x, recall[::-1])
    np.testing.assert_allclose(pr.y, precision[::-1])


def test_long_curves_keep_some_hundred_points_and_both_ends() -> None:
    g = torch.Generator().manual_seed(0)
    roc, _ = curves.roc_and_pr(torch.rand(9000, generator=g), torch.rand(9000, generator=g))
    assert len(roc.x) == 300
    assert (roc.x[0], roc.y[0], roc.x[-1], roc.y[-1]) == (0, 0, 1, 1)
    assert np.trapezoid(roc.y, roc.x) == pytest.approx(0.5, abs=0.02)


def test_risk_curve_has_points_of_the_metric() -> None:
    known, correct, _ = example(3000)
    found = curves.risk_curve(known.confidence, correct)
    points = list(
        zip(*(c.tolist() for c in metrics.risk_coverage(known.confidence, correct)), strict=True)
    )
    assert set(zip(found.x, found.y, strict=True)) <= set(points)


def test_reliability_has_a_row_for_every_bin_that_is_not_empty() -> None:
    known, correct, _ = example(200)
    rows = curves.reliability_bins(known.confidence, correct)
    assert sum(n for _, _, n in rows) == 200
    gap = sum(n * abs(a - c) for c, a, n in rows) / 200
    assert gap == pytest.approx(metrics.ece(known.confidence, correct))


def test_dots_are_examples_of_their_kind() -> None:
    known, correct, ood = example(3000)
    by_kind = {found.kind: found for found in curves.dots(known, correct, ood)}
    assert list(by_kind) == ["right", "wrong", "far"]
    assert len(by_kind["right"].confidence) == 400
    assert set(by_kind["wrong"].confidence) <= set(known.confidence[~correct].tolist())
