"""Every metric against scikit-learn or torchmetrics, with ties, and its bad inputs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score, roc_curve
from torch import Tensor
from torchmetrics.functional.classification import multiclass_accuracy, multiclass_calibration_error

from abnn.metrics import accuracy, aupr, auroc, brier, detect, ece, fpr_at_recall, nll

SEEDS = range(10)
PROBS, LABELS = torch.tensor([[0.7, 0.3], [0.4, 0.6]]), torch.tensor([0, 1])


def predictions(seed: int, *rest: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities `[50, 7, ...]` and labels `[50, ...]`."""
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(50, 7, *rest, generator=g)
    return logits.log_softmax(1), torch.randint(7, (50, *rest), generator=g)


def scores(seed: int) -> tuple[Tensor, Tensor]:
    """ID and OOD scores of unequal number, rounded to between 1 and about 60 distinct values."""
    g = torch.Generator().manual_seed(seed)
    coarse = [0.1, 1, 3, 10][seed % 4]
    id_scores = torch.randn(80 + seed, generator=g)
    return (id_scores * coarse).round(), ((torch.randn(37, generator=g) + 1) * coarse).round()


def positives(pos: Tensor, neg: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Labels and scores as scikit-learn wants them."""
    return np.repeat([1, 0], [len(pos), len(neg)]), torch.cat([pos, neg]).numpy()


def sklearn_fpr(pos: Tensor, neg: Tensor, recall: float = 0.95) -> float:
    fpr, tpr, _ = roc_curve(*positives(pos, neg), drop_intermediate=False)
    return float(fpr[tpr >= recall].min())


@pytest.mark.parametrize("seed", SEEDS)
def test_accuracy_equals_torchmetrics(seed: int) -> None:
    log_probs, labels = predictions(seed)
    expected = multiclass_accuracy(log_probs, labels, 7, average="micro").item()
    assert accuracy(log_probs, labels) == pytest.approx(expected, abs=1e-7)
    assert accuracy(log_probs.exp(), labels) == accuracy(log_probs, labels)


@pytest.mark.parametrize("seed", SEEDS)
def test_nll_equals_scikit_learn(seed: int) -> None:
    log_probs, labels = predictions(seed)
    probs = log_probs.double().log_softmax(1).exp()
    expected = log_loss(labels.numpy(), probs.numpy(), labels=range(7))
    assert nll(log_probs, labels) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_brier_is_the_squared_distance_from_the_one_hot_label(seed: int) -> None:
    log_probs, labels = predictions(seed)
    probs = log_probs.exp().double().numpy()
    expected = ((probs - np.eye(7)[labels.numpy()]) ** 2).sum(1).mean()
    assert brier(log_probs.exp(), labels) == pytest.approx(expected, rel=1e-6)


def test_brier_runs_from_zero_for_sure_and_right_to_two_for_sure_and_wrong() -> None:
    sure = torch.tensor([[0.0, 1.0, 0.0]])
    assert brier(sure, torch.tensor([1])) == 0
    assert brier(sure, torch.tensor([2])) == 2


def test_brier_keeps_its_digits_when_the_network_is_nearly_sure() -> None:
    log_probs = torch.tensor([[0.0, -12.0]]).log_softmax(1)
    wrong = log_probs.exp()[0, 1].double().item()
    assert brier(log_probs.exp(), torch.tensor([0])) == pytest.approx(2 * wrong**2, rel=0.02)


def test_pixels_are_scored_as_examples() -> None:
    log_probs, labels = predictions(0, 3, 4)
    flat, flat_labels = log_probs.movedim(1, -1).reshape(-1, 7), labels.flatten()
    assert accuracy(log_probs, labels) == accuracy(flat, flat_labels)
    assert nll(log_probs, labels) == pytest.approx(nll(flat, flat_labels))
    assert brier(log_probs.exp(), labels) == pytest.approx(brier(flat.exp(), flat_labels))


def test_narrow_labels_and_half_precision_are_accepted() -> None:
    assert accuracy(PROBS, LABELS.to(torch.uint8)) == 1
    assert brier(PROBS.half(), LABELS.int()) == pytest.approx(brier(PROBS, LABELS), abs=1e-3)
    assert nll(PROBS.bfloat16().log(), LABELS) == pytest.approx(nll(PROBS.log(), LABELS), abs=1e-2)


@pytest.mark.parametrize(
    ("probs", "labels", "message"),
    [
        (PROBS, torch.tensor([0]), r"Labels of shape \[1\] do not fit"),
        (PROBS[0], LABELS, "classes at dimension 1"),
        (PROBS[:0], LABELS[:0], "no examples"),
        (PROBS, LABELS.float(), "class indices as integers"),
        (PROBS, torch.tensor([0, 2]), "run from 0 to 2, but the predictions have 2 classes"),
        (PROBS, torch.tensor([-100, 1]), "run from -100 to 1"),
        (PROBS * float("nan"), LABELS, "contain NaN"),
    ],
)
def test_predictions_that_cannot_be_scored_are_refused(
    probs: Tensor, labels: Tensor, message: str
) -> None:
    for metric in (accuracy, nll, brier):
        with pytest.raises(ValueError, match=message):
            metric(probs, labels)


def test_logits_are_not_taken_for_probabilities() -> None:
    logits = torch.tensor([[3.0, -2.0]])
    for metric in (nll, brier):
        with pytest.raises(ValueError, match="do not form a distribution"):
            metric(logits, torch.tensor([0]))
    with pytest.raises(ValueError, match="do not form a distribution"):
        nll(PROBS, LABELS)


@pytest.mark.parametrize("bins", [1, 10, 15])
@pytest.mark.parametrize("seed", SEEDS)
def test_ece_equals_torchmetrics(seed: int, bins: int) -> None:
    log_probs, labels = predictions(seed)
    confidence, predicted = log_probs.exp().max(1)
    expected = multiclass_calibration_error(log_probs.exp(), labels, 7, n_bins=bins).item()
    assert ece(confidence, predicted == labels, bins) == pytest.approx(expected, abs=1e-6)


def test_a_confidence_of_exactly_one_falls_into_the_last_bin() -> None:
    # |(1 + 0) - (1 + 0.98)| / 2 in one bin; a bin of its own would give 0.98 / 2 + 0.
    confidence, correct = torch.tensor([1.0, 0.98]), torch.tensor([False, True])
    assert ece(confidence, correct) == pytest.approx(0.98 / 2)
    assert ece(confidence, ~correct) == pytest.approx(0.98 / 2)
    assert ece(confidence, torch.tensor([True, True])) == pytest.approx(0.02 / 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_bin_holds_its_lower_edge_in_any_precision(dtype: torch.dtype) -> None:
    # Between two edges of opposite error nothing cancels unless they share a bin.
    edges = (torch.arange(15, dtype=torch.float64) / 15).to(dtype)
    correct = torch.arange(15) % 2 == 0
    expected = (correct.double() - edges.double()).abs().mean().item()
    assert ece(edges, correct) == pytest.approx(expected)


def test_ece_does_not_depend_on_shape_or_on_the_type_of_correct() -> None:
    g = torch.Generator().manual_seed(0)
    confidence, correct = torch.rand(4, 5, generator=g), torch.rand(4, 5, generator=g) > 0.5
    assert ece(confidence, correct) == ece(confidence.flatten(), correct.flatten().int())


@pytest.mark.parametrize(
    ("confidence", "correct", "message"),
    [
        (torch.rand(3), torch.ones(2), "one of each per example"),
        (torch.rand(0), torch.ones(0), "no examples"),
        (torch.tensor([float("nan")]), torch.ones(1), "NaN or outside"),
        (torch.tensor([3.2]), torch.ones(1), "NaN or outside"),
        (torch.tensor([0.5]), torch.tensor([7]), "True or False"),
    ],
)
def test_confidences_that_cannot_be_scored_are_refused(
    confidence: Tensor, correct: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ece(confidence, correct)


def test_no_bins_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one bin"):
        ece(torch.rand(3), torch.ones(3), bins=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_auroc_equals_scikit_learn(seed: int) -> None:
    id_scores, ood_scores = scores(seed)
    expected = roc_auc_score(*positives(ood_scores, id_scores))
    assert auroc(id_scores, ood_scores) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_aupr_equals_scikit_learn(seed: int) -> None:
    id_scores, ood_scores = scores(seed)
    expected = average_precision_score(*positives(ood_scores, id_scores))
    assert aupr(id_scores, ood_scores) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("recall", [0.05, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_fpr_at_recall_is_read_off_scikit_learns_roc_curve(seed: int, recall: float) -> None:
    id_scores, ood_scores = scores(seed)
    expected = sklearn_fpr(ood_scores, id_scores, recall)
    assert fpr_at_recall(id_scores, ood_scores, recall) == pytest.approx(expected, abs=1e-15)


def test_a_recall_met_exactly_is_met() -> None:
    # 19 of 20 is 95 %: the last OOD example need not be caught.
    ood_scores = torch.cat([torch.full((19,), 2.0), torch.zeros(1)])
    assert fpr_at_recall(torch.ones(10), ood_scores) == 0
    assert fpr_at_recall(torch.ones(10), ood_scores, recall=0.951) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_detect_gives_both_directions(seed: int) -> None:
    id_scores, ood_scores = scores(seed)
    detection = detect(id_scores, ood_scores)
    assert detection.auroc == auroc(id_scores, ood_scores)
    assert detection.auroc == auroc(-ood_scores, -id_scores)
    assert detection.aupr == aupr(id_scores, ood_scores)
    assert detection.fpr95 == fpr_at_recall(id_scores, ood_scores)
    expected = average_precision_score(*positives(-id_scores, -ood_scores))
    assert detection.aupr_in == pytest.approx(expected, abs=1e-12)
    assert detection.fpr95_in == pytest.approx(sklearn_fpr(-id_scores, -ood_scores), abs=1e-15)


def test_a_score_that_says_nothing_gives_chance() -> None:
    detection = detect(torch.zeros(30), torch.zeros(10))
    assert (detection.auroc, detection.aupr, detection.fpr95) == (0.5, 0.25, 1.0)
    assert (detection.aupr_in, detection.fpr95_in) == (0.75, 1.0)


def test_detection_depends_on_the_order_of_the_scores_alone() -> None:
    id_scores, ood_scores = scores(2)
    moved = detect(id_scores.reshape(2, -1).double().exp(), ood_scores.flip(0).double().exp())
    assert moved == detect(id_scores, ood_scores)


def test_infinite_scores_and_signed_zeros_are_ranked() -> None:
    inf = float("inf")
    assert auroc(torch.tensor([-inf, 0.0]), torch.tensor([-0.0, inf])) == 0.875


def test_percent_is_a_hundred_times_the_fraction() -> None:
    detection = detect(*scores(1))
    assert detection.percent().auroc == 100 * detection.auroc
    assert detection.percent().fpr95_in == 100 * detection.fpr95_in


@pytest.mark.parametrize("metric", [auroc, aupr, fpr_at_recall, detect])
def test_scores_that_cannot_be_ranked_are_refused(
    metric: Callable[[Tensor, Tensor], object],
) -> None:
    some, none, nan = torch.rand(3), torch.rand(0), torch.tensor([1.0, float("nan")])
    with pytest.raises(ValueError, match="no in-distribution scores"):
        metric(none, some)
    with pytest.raises(ValueError, match="no out-of-distribution scores"):
        metric(some, none)
    with pytest.raises(ValueError, match="out-of-distribution scores contain NaN"):
        metric(some, nan)


@pytest.mark.parametrize("recall", [0.0, 1.1, float("nan")])
def test_a_recall_outside_its_range_is_refused(recall: float) -> None:
    with pytest.raises(ValueError, match="give a share above 0"):
        fpr_at_recall(torch.rand(3), torch.rand(3), recall)
