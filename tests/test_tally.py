"""The tally against metrics of all examples at once, and other libraries."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score, top_k_accuracy_score
from torch import Tensor
from torchmetrics.functional.classification import multiclass_calibration_error

from abnn import metrics
from abnn.evaluation import Diversity
from abnn.prediction import Prediction
from abnn.tally import Tally


def labelled(seed: int, n: int = 300, K: int = 8) -> tuple[Prediction, Tensor]:
    """Predictions of five members, and labels that they are often right about."""
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(5, n, K, generator=g)
    labels = (logits.mean(0) + torch.randn(n, K, generator=g)).argmax(1)
    return Prediction.from_logits(logits), labels


def tallied(prediction: Prediction, labels: Tensor | None = None, size: int = 10**9) -> Tally:
    tally = Tally()
    for start in range(0, len(prediction.log_probs), size):
        rows = slice(start, start + size)
        tally.add(prediction[rows], None if labels is None else labels[rows])
    return tally


@pytest.mark.parametrize("seed", range(3))
def test_figures_are_those_of_other_libraries(seed: int) -> None:
    prediction, y = labelled(seed)
    figures = tallied(prediction, y, size=37).labelled()
    probs = prediction.probs.double()
    p = (probs / probs.sum(1, keepdim=True)).numpy()
    assert figures["accuracy"] == pytest.approx(100 * (p.argmax(1) == y.numpy()).mean())
    assert figures["top5"] == pytest.approx(100 * top_k_accuracy_score(y, p, k=5, labels=range(8)))
    assert figures["nll"] == pytest.approx(log_loss(y, p, labels=range(8)), abs=1e-6)
    assert figures["brier"] == pytest.approx(
        brier_score_loss(y, p, labels=list(range(8)), scale_by_half=False), abs=1e-6
    )
    ece = multiclass_calibration_error(prediction.probs, y, num_classes=8, n_bins=15)
    assert figures["ece"] == pytest.approx(100 * ece.item(), abs=1e-4)


def test_few_classes_have_no_top_five() -> None:
    assert "top5" not in tallied(*labelled(0, K=5)).labelled()
    assert "top5" in tallied(*labelled(0, K=6)).labelled()


@pytest.mark.parametrize("size", [1, 7, 300])
def test_batches_and_merges_change_no_bit(size: int) -> None:
    prediction, y = labelled(0)
    whole = tallied(prediction, y)
    cut = 111
    merged = tallied(prediction[cut:], y[cut:], size)
    merged.merge(tallied(prediction[:cut], y[:cut], size))
    merged.merge(Tally())
    assert merged.labelled() == whole.labelled()
    assert merged.selective([0.8], [0.1]) == whole.selective([0.8], [0.1])
    assert merged.diversity() == whole.diversity()


def test_selective_figures_are_the_metrics() -> None:
    prediction, y = labelled(0)
    right = prediction.label == y
    found = tallied(prediction, y, size=37).selective([0.5], [0.2])
    confidence = prediction.confidence
    assert found.aurc == metrics.aurc(confidence, right)
    assert found.augrc == metrics.augrc(confidence, right)
    assert found.accuracy[0.5] == 100 * metrics.accuracy_at_coverage(confidence, right, 0.5)
    assert found.coverage[0.2] == 100 * metrics.coverage_at_risk(confidence, right, 0.2)


def test_scores_are_counted_of_pixels_that_count() -> None:
    g = torch.Generator().manual_seed(0)
    prediction = Prediction.from_logits(torch.randn(3, 4, 5, 6, 7, generator=g))
    y = torch.randint(5, (4, 6, 7), generator=g)
    y[:, 0] = 255
    tally, ood = Tally(), Tally()
    tally.add(prediction, y, ignore_index=255)
    ood.add(prediction)
    keep = y != 255
    known, unknown = prediction.total[keep], prediction.total.flatten()
    truth = torch.cat([torch.zeros(len(known)), torch.ones(len(unknown))])
    found = metrics.detect_counts(tally.scores["entropy"], ood.scores["entropy"])
    expected = roc_auc_score(truth, torch.cat([known, unknown]))
    assert tally.n == keep.sum()
    assert found.auroc == pytest.approx(expected)


def test_the_ratio_of_epistemic_uncertainties_is_told() -> None:
    (known, y), (unknown, _) = labelled(0), labelled(1)
    ratio = unknown.epistemic.double().mean() / known.epistemic.double().mean()
    found = tallied(unknown).diversity(tallied(known, y))
    assert found is not None
    assert found.ratio == pytest.approx(ratio.item())
    assert found.epistemic == pytest.approx(unknown.epistemic.mean().item(), rel=1e-5)
    assert found.disagreement == pytest.approx(100 * unknown.disagreement.mean().item(), rel=1e-5)


def test_one_member_has_no_diversity() -> None:
    prediction, y = labelled(0)
    one = Prediction.from_logits(prediction.log_probs.unsqueeze(0))
    assert tallied(one, y).diversity() is None


def test_members_that_agree_have_no_ratio() -> None:
    same = Prediction.from_logits(torch.zeros(3, 4, 2))
    found = tallied(same).diversity(tallied(same, torch.zeros(4).long()))
    assert found == Diversity(disagreement=0.0, epistemic=0.0, ratio=None)


def test_sets_are_counted_over_all_and_by_class() -> None:
    prediction, _ = labelled(0, n=4, K=3)
    sets = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]]).bool()
    found = tallied(replace(prediction, sets=sets), torch.tensor([0, 1, 1, 1])).sets()
    assert found is not None
    assert (found.coverage, found.size, found.empty) == (50, 1.5, 25)
    assert found.by_class[0] == 100
    assert found.by_class[1] == pytest.approx(100 / 3)
    assert found.by_class[2] is None


def test_an_impossible_label_makes_the_nll_infinite() -> None:
    sure = Prediction.from_logits(torch.tensor([[[0.0, -math.inf]]]))
    assert tallied(sure, torch.tensor([1])).labelled()["nll"] == math.inf


def test_predictions_of_other_classes_are_refused() -> None:
    tally = tallied(*labelled(0, K=4))
    with pytest.raises(ValueError, match="Some predictions have 4 classes and others 5"):
        tally.add(labelled(0, K=5)[0])
    with pytest.raises(ValueError, match="Some predictions have 4 classes and others 5"):
        tally.merge(tallied(*labelled(0, K=5)))
