"""Calibration errors against torchmetrics and brute force; bins do not depend on order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor
from torchmetrics.functional.classification import binary_calibration_error

from abnn.metrics import Bins, Counts, adaptive_ece, classwise_ece, ece, reliability


def predictions(seed: int, *rest: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    probs = (2 * torch.randn(60, 5, *rest, generator=g)).softmax(1)
    return probs, torch.randint(5, (60, *rest), generator=g)


def graded(seed: int, n: int, distinct: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    confidence = torch.randint(1, distinct + 1, (n,), generator=g).double() / distinct
    return confidence, torch.rand(n, generator=g) < confidence


def brute_adaptive(confidence: Tensor, correct: Tensor, bins: int) -> float:
    """Every example stands for the mean correctness of its ties, then groups of equal size."""
    right = np.array([correct[confidence == c].double().mean().item() for c in confidence])
    order = np.argsort(confidence.numpy())
    groups = np.array_split((right - confidence.numpy())[order], bins)
    return float(sum(abs(group.sum()) for group in groups) / len(order))


@pytest.mark.parametrize("bins", [1, 10, 15])
@pytest.mark.parametrize("seed", range(5))
def test_classwise_ece_is_the_mean_of_torchmetrics_over_the_classes(seed: int, bins: int) -> None:
    probs, labels = predictions(seed)
    classes = enumerate(probs.T.contiguous())
    each = [binary_calibration_error(p, labels == k, n_bins=bins) for k, p in classes]
    expected = torch.stack(each).double().mean().item()
    assert classwise_ece(probs, labels, bins) == pytest.approx(expected, abs=1e-6)


def test_pixels_are_examples_of_classwise_ece() -> None:
    probs, labels = predictions(0, 3, 4)
    flat = probs.movedim(1, -1).reshape(-1, 5)
    assert classwise_ece(probs, labels) == classwise_ece(flat, labels.flatten())


def test_classwise_ece_has_its_limits() -> None:
    sure = torch.eye(3)
    assert classwise_ece(sure, torch.arange(3)) == 0
    assert classwise_ece(sure, torch.tensor([1, 2, 0])) == pytest.approx(2 / 3)
    assert classwise_ece(torch.ones(4, 1), torch.zeros(4, dtype=torch.int64)) == 0


@pytest.mark.parametrize("bins", [1, 4, 15, 100])
@pytest.mark.parametrize("distinct", [1, 3, 20, 10**9])
@pytest.mark.parametrize("seed", range(3))
def test_adaptive_ece_equals_brute_force_with_ties(seed: int, distinct: int, bins: int) -> None:
    confidence, correct = graded(seed, 83, distinct)
    expected = brute_adaptive(confidence, correct, bins)
    assert adaptive_ece(confidence, correct, bins) == pytest.approx(expected, abs=1e-13)


def test_adaptive_ece_of_as_many_bins_as_examples_looks_at_each() -> None:
    confidence, correct = torch.tensor([0.25, 0.5, 0.75]), torch.tensor([1, 0, 1])
    assert adaptive_ece(confidence, correct, bins=3) == pytest.approx(1.5 / 3)
    assert adaptive_ece(confidence, correct, bins=50) == pytest.approx(1.5 / 3)
    assert adaptive_ece(confidence, correct, bins=1) == pytest.approx(0.5 / 3)


def test_adaptive_ece_does_not_depend_on_order_or_shape() -> None:
    confidence, correct = graded(0, 60, 4)
    expected = adaptive_ece(confidence, correct)
    for seed in range(5):
        order = torch.randperm(60, generator=torch.Generator().manual_seed(seed))
        assert adaptive_ece(confidence[order].view(6, 10), correct[order].view(6, 10)) == expected


def test_adaptive_ece_comes_from_counts_as_well() -> None:
    confidence, correct = graded(1, 90, 30)
    counts = Counts(columns=2)
    for some, right in zip(confidence.split(17), correct.split(17), strict=True):
        counts.update(some, column=~right)
    assert adaptive_ece(counts, bins=7) == adaptive_ece(confidence, correct, 7)


def test_adaptive_ece_hardly_moves_when_counts_drop_bits() -> None:
    confidence, correct = graded(2, 50_000, 10**9)
    counts = Counts(columns=2, capacity=4096)
    counts.update(confidence, column=~correct)
    assert not counts.exact
    # Cells keep the mean of their values, so only those on an edge can be shared out wrongly.
    assert adaptive_ece(counts) == pytest.approx(adaptive_ece(confidence, correct), abs=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_a_reliability_diagram_holds_what_ece_sums(seed: int) -> None:
    confidence, correct = graded(seed, 200, 10**9)
    mean, accuracy, n = reliability(confidence, correct, bins=10)
    for b in range(10):
        inside = (confidence >= b / 10) & (confidence < (b + 1) / 10)
        assert n[b] == inside.sum()
        if n[b] == 0:
            assert mean[b].isnan()
            assert accuracy[b].isnan()
        else:
            assert mean[b].item() == pytest.approx(confidence[inside].mean().item())
            assert accuracy[b].item() == correct[inside].double().mean().item()
    total = ((mean - accuracy).abs() * n).nansum() / n.sum()
    assert ece(confidence, correct, bins=10) == pytest.approx(total.item(), abs=1e-14)


def test_a_reliability_diagram_can_be_had_per_class() -> None:
    probs, labels = predictions(0)
    bins = Bins(bins=4, classes=5)
    bins.update(probs, labels)
    for k in range(5):
        single = reliability(probs[:, k], labels == k, bins=4)
        for found, expected in zip(bins.reliability(), single, strict=True):
            torch.testing.assert_close(found[k], expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_bins_are_the_same_whatever_the_order_of_batches_and_merges(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    confidence = torch.rand(5000, generator=g, dtype=torch.float64).to(dtype)
    correct = torch.rand(5000, generator=g) < 0.5
    whole = Bins()
    whole.update(confidence, correct)
    for size in (1, 37, 4999):
        parts = []
        for rows in torch.randperm(5000, generator=g).split(size):
            parts.append(Bins())
            parts[-1].update(confidence[rows], correct[rows])
        total = Bins()
        for part in reversed(parts):
            total.merge(Bins.from_state(part.state()))
        assert total.state()["sums"].equal(whole.state()["sums"])
        assert total.ece() == ece(confidence, correct)
        assert total.n == 5000


def test_bins_of_classes_merge_as_well() -> None:
    probs, labels = predictions(3)
    total = Bins(classes=5)
    for some, y in zip(probs.split(7), labels.split(7), strict=True):
        part = Bins(classes=5)
        part.update(some, y)
        total.merge(Bins.from_state(part.state()))
    assert total.ece() == classwise_ece(probs, labels)
    assert total.n == 60


def test_large_batches_are_added_in_chunks() -> None:
    confidence = torch.full((2**22 + 3,), 0.75)
    correct = torch.arange(2**22 + 3) < 3
    assert ece(confidence, correct) == pytest.approx(0.75 - 3 / (2**22 + 3), rel=1e-14)


def test_a_batch_without_examples_adds_nothing() -> None:
    top, each = Bins(), Bins(classes=3)
    top.update(torch.rand(0), torch.ones(0))
    each.update(torch.rand(0, 3), torch.ones(0, dtype=torch.int64))
    assert (top.n, each.n) == (0, 0)
    for bins, look in itertools.product((top, each), (Bins.ece, Bins.reliability)):
        with pytest.raises(ValueError, match="no examples"):
            look(bins)


def test_bins_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one bin"):
        Bins(bins=0)
    with pytest.raises(ValueError, match="at least one class"):
        Bins(classes=0)
    with pytest.raises(ValueError, match="make both alike"):
        Bins(bins=10).merge(Bins())
    with pytest.raises(ValueError, match="make both alike"):
        Bins(classes=1).merge(Bins())
    with pytest.raises(ValueError, match="4 classes of these Bins at dimension 1"):
        Bins(classes=4).update(*predictions(0))
    with pytest.raises(ValueError, match=r"give what Bins.state\(\) returned"):
        Bins.from_state({"sums": torch.zeros(1)})


@pytest.mark.parametrize(
    ("confidence", "correct", "message"),
    [
        (torch.rand(3), torch.ones(2), "one of each per example"),
        (torch.rand(0), torch.ones(0), "no examples"),
        (torch.tensor([float("nan")]), torch.ones(1), "NaN"),
        (torch.tensor([3.2]), torch.ones(1), "outside 0..1"),
        (torch.tensor([-0.1]), torch.ones(1), "outside 0..1"),
        (torch.tensor([0.5]), torch.tensor([7]), "True or False"),
    ],
)
def test_confidences_that_cannot_be_scored_are_refused(
    confidence: Tensor, correct: Tensor, message: str
) -> None:
    for metric in (ece, adaptive_ece, reliability):
        with pytest.raises(ValueError, match=message):
            metric(confidence, correct)


def test_no_bins_are_refused() -> None:
    for metric in (adaptive_ece, reliability):
        with pytest.raises(ValueError, match="at least one bin"):
            metric(torch.rand(3), torch.ones(3), bins=0)
    with pytest.raises(ValueError, match="at least one bin"):
        classwise_ece(*predictions(0), bins=0)


def test_probabilities_of_classes_that_cannot_be_scored_are_refused() -> None:
    probs, labels = predictions(0)
    for bad, message in [
        (probs * float("nan"), "contain NaN"),
        (probs.log(), "do not form a distribution"),
        (probs[:, 0], "do not fit"),
        (probs[:, :3], "have 3 classes"),
        (probs[:30], "do not fit"),
    ]:
        with pytest.raises(ValueError, match=message):
            classwise_ece(bad, labels)
    with pytest.raises(ValueError, match="no examples"):
        classwise_ece(probs[:0], labels[:0])
