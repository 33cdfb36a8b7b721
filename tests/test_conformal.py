"""Conformal sets: the coverage they promise, and what they are made of."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from abnn.baselines import Conformal, Single
from abnn.baselines.conformal import Score, class_scores, conformal_quantile, examples_needed
from abnn.metrics import set_coverage, set_size

SCORES: tuple[Score, ...] = ("lac", "aps")


def conformal(coverage: float = 0.9, per_class: bool = False, score: Score = "lac") -> Conformal:
    """On top of a predictor whose inputs are its logits."""
    return Conformal(Single(nn.Identity()), coverage, per_class, score)


def sets_of(predictor: Conformal, logits: Tensor) -> Tensor:
    sets = predictor.predict(logits).sets
    assert sets is not None
    return sets


def data(seed: int, n: int = 500, K: int = 6) -> tuple[Tensor, Tensor]:
    """Logits twice too large for the labels that are drawn from them."""
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, K, generator=g)
    return 2 * logits, torch.multinomial(logits.softmax(1), 1, generator=g).squeeze(1)


def imbalanced(seed: int, n: int = 4000) -> tuple[Tensor, Tensor]:
    """One label in ten is of class 1, which the predictor mostly takes for class 0."""
    g = torch.Generator().manual_seed(seed)
    labels = (torch.rand(n, generator=g) < 0.1).long()
    z = torch.randn(n, generator=g) + labels.float()
    return torch.stack([2 - z, z - 1], 1), labels


# The promise


@pytest.mark.parametrize(("n", "coverage"), [(20, 0.8), (50, 0.9), (99, 0.99)])
def test_the_coverage_has_its_exact_beta_distribution(n: int, coverage: float) -> None:
    # The label's probability is uniform, so a threshold covers just what it is.
    stats = pytest.importorskip("scipy.stats")
    v = torch.rand(1000, n, dtype=torch.float64)
    labels = torch.zeros(n, dtype=torch.long)
    predictor = conformal(coverage)
    covered = []
    for row in v:
        predictor.fit([(torch.stack([row, 1 - row], 1).log(), labels)])
        covered.append(-math.expm1(-predictor.threshold.item()))
    rank = math.ceil(round((n + 1) * coverage, 6))
    assert stats.kstest(covered, stats.beta(rank, n + 1 - rank).cdf).pvalue > 0.01


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("coverage", [0.5, 0.9])
def test_new_labels_are_covered_as_often_as_promised(score: Score, coverage: float) -> None:
    shares = []
    for seed in range(200):
        logits, labels = data(seed, 300)
        predictor = conformal(coverage, score=score).fit([(logits[:100], labels[:100])])
        inside = set_coverage(sets_of(predictor, logits[100:]), labels[100:])
        shares.append(inside.double().mean().item())
    mean = sum(shares) / len(shares)
    deviation = math.sqrt(coverage * (1 - coverage) * (1 / 100 + 1 / 200) / len(shares))
    assert mean > coverage - 3 * deviation
    if score == "lac":  # no more than it must, since no two scores are equal
        assert mean < coverage + 1 / 101 + 3 * deviation


def test_a_rare_class_is_covered_only_by_a_threshold_of_its_own() -> None:
    rare = {}
    logits, labels = imbalanced(1)
    for per_class in (False, True):
        predictor = conformal(0.9, per_class).fit([imbalanced(0)])
        inside = set_coverage(sets_of(predictor, logits), labels).double()
        assert inside.mean() > 0.87
        rare[per_class] = inside[labels == 1].mean().item()
    assert rare[False] < 0.6
    assert rare[True] == pytest.approx(0.9, abs=0.05)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("per_class", [False, True])
def test_a_higher_coverage_has_larger_sets(score: Score, per_class: bool) -> None:
    calibration, (logits, _) = data(0), data(1)
    before = torch.zeros(500, 6, dtype=torch.bool)
    for coverage in (0.1, 0.5, 0.8, 0.95):
        sets = sets_of(conformal(coverage, per_class, score).fit([calibration]), logits)
        assert not (before & ~sets).any()
        assert set_size(sets).sum() > set_size(before).sum()
        before = sets


# What they are made of


@pytest.mark.parametrize(("n", "rank"), [(9, 9), (10, 10), (18, 18), (19, 18), (99, 90)])
def test_the_quantile_is_an_order_statistic(n: int, rank: int) -> None:
    scores = torch.arange(1.0, n + 1)[torch.randperm(n)]
    assert conformal_quantile(scores, 0.9).item() == rank


def test_the_rank_is_not_moved_by_rounding() -> None:
    assert 100 * 0.07 > 7
    assert conformal_quantile(torch.arange(1.0, 100), 0.07).item() == 7


@pytest.mark.parametrize("coverage", [0.01, 0.5, 0.8, 0.9, 0.95, 0.99, 0.999])
def test_as_many_examples_as_needed_are_just_enough(coverage: float) -> None:
    n = examples_needed(coverage)
    assert conformal_quantile(torch.zeros(n), coverage).isfinite()
    assert conformal_quantile(torch.zeros(n - 1), coverage).isinf()


@pytest.mark.parametrize("seed", range(5))
def test_lac_keeps_the_classes_that_are_likely_enough(seed: int) -> None:
    (logits, labels), (new, _) = data(seed, 99), data(seed + 9)
    u = (1 - logits.double().softmax(1)).gather(1, labels.unsqueeze(1)).flatten()
    q = u.sort().values[90 - 1]
    predictor = conformal().fit([(logits.double(), labels)])
    assert torch.equal(sets_of(predictor, new.double()), 1 - new.double().softmax(1) <= q)


@pytest.mark.parametrize("seed", range(5))
def test_aps_scores_are_the_mass_of_all_classes_at_least_as_likely(seed: int) -> None:
    p = data(seed)[0].double().softmax(1)
    mass = (p.unsqueeze(1) * (p.unsqueeze(1) >= p.unsqueeze(2))).sum(2)
    torch.testing.assert_close(-torch.expm1(-class_scores(p.log(), "aps")), mass)


@pytest.mark.parametrize("score", SCORES)
def test_equal_classes_are_treated_equally_in_any_order(score: Score) -> None:
    log_probs = torch.tensor([[0.1, 0.3, 0.1, 0.3, 0.1, 0.1]]).log()
    scores = class_scores(log_probs, score)
    assert len(scores.unique()) == 2
    for _ in range(20):
        order = torch.randperm(6)
        assert torch.equal(class_scores(log_probs[:, order], score), scores[:, order])


@pytest.mark.parametrize("score", SCORES)
def test_a_set_is_the_most_likely_classes(score: Score) -> None:
    logits, _ = data(1)
    sets = sets_of(conformal(0.7, score=score).fit([data(0)]), logits)
    top = set_coverage(sets, logits.argmax(1))
    assert torch.equal(top, set_size(sets) > 0)
    least_in = logits.where(sets, math.inf).amin(1)
    assert (least_in > logits.where(~sets, -math.inf).amax(1)).all()


def test_only_lac_has_empty_sets() -> None:
    logits, _ = data(1)
    empty = {
        s: (set_size(sets_of(conformal(0.3, score=s).fit([data(0)]), logits)) == 0).sum()
        for s in SCORES
    }
    assert empty["lac"] > 0
    assert empty["aps"] == 0


@pytest.mark.parametrize("score", SCORES)
def test_probabilities_too_small_for_a_difference_from_one_are_told_apart(score: Score) -> None:
    # Once in ten times the label has a probability of e^-40, and the other class e^-60.
    logits = torch.tensor([[60.0, 20.0, 0.0]]).repeat(100, 1)
    labels = (torch.arange(100) % 10 == 0).long()
    sets = sets_of(conformal(0.95, score=score).fit([(logits, labels)]), logits[:1])
    assert sets.tolist() == [[True, True, False]]


def test_the_prediction_is_otherwise_the_predictors_own() -> None:
    logits, _ = data(0)
    before, after = (
        Single(nn.Identity()).predict(logits),
        conformal().fit([data(1)]).predict(logits),
    )
    assert torch.equal(after.log_probs, before.log_probs)
    assert torch.equal(after.energy, before.energy)
    assert before.sets is None


# Data


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("per_class", [False, True])
def test_pixels_are_examples_and_void_ones_do_not_count(score: Score, per_class: bool) -> None:
    logits, labels = data(0, 600)
    void = labels.clone().index_fill_(0, torch.arange(0, 600, 3), 255)
    image = logits.reshape(6, 10, 10, 6).movedim(-1, 1)
    dense = conformal(0.8, per_class, score).fit([(image, void.reshape(6, 10, 10))], 255)
    flat = conformal(0.8, per_class, score).fit([(logits[void != 255], labels[void != 255])])
    torch.testing.assert_close(dense.threshold, flat.threshold)
    dense.threshold = flat.threshold
    sets = sets_of(dense, image)
    assert sets.shape == image.shape
    assert torch.equal(sets.movedim(1, -1).reshape(600, 6), sets_of(flat, logits))
    assert (
        set_coverage(sets, labels.reshape(6, 10, 10)).shape == set_size(sets).shape == (6, 10, 10)
    )


@pytest.mark.parametrize("per_class", [False, True])
def test_the_threshold_does_not_depend_on_the_batches(per_class: bool) -> None:
    logits, labels = data(0)
    parts = zip(logits.split(37), labels.split(37), strict=True)
    whole = conformal(per_class=per_class).fit([(logits, labels)])
    assert torch.equal(conformal(per_class=per_class).fit(parts).threshold, whole.threshold)


@pytest.mark.parametrize(("per_class", "added"), [(False, 1), (True, 6)])
def test_thresholds_are_counted_and_saved_with_the_module(per_class: bool, added: int) -> None:
    fitted = conformal(per_class=per_class).fit([data(0)])
    copied = conformal(per_class=per_class)
    nn.Sequential(copied).load_state_dict(nn.Sequential(fitted).state_dict())
    assert torch.equal(copied.threshold, fitted.threshold)
    assert conformal().num_added_parameters == 0
    assert fitted.num_added_parameters == added


def test_too_few_examples_give_all_classes_and_a_warning() -> None:
    logits, labels = data(0, 98)
    with pytest.warns(UserWarning, match="98 examples are too few, .* 0.99 needs at least 99"):
        predictor = conformal(0.99).fit([(logits, labels)])
    assert sets_of(predictor, logits).all()


def test_a_class_of_too_few_examples_is_named_and_in_every_set() -> None:
    logits, labels = data(0)
    keep = (labels != 2) & (labels != 4)
    with pytest.warns(UserWarning, match="of the classes 2, 4, .* at least 9 examples of each"):
        predictor = conformal(per_class=True).fit([(logits[keep], labels[keep])])
    sets = sets_of(predictor, logits)
    assert sets[:, [2, 4]].all()
    assert not sets[:, [0, 1, 3, 5]].all(0).any()


def test_of_many_classes_without_examples_a_few_are_named() -> None:
    with pytest.warns(UserWarning, match="8, 9 and 20 more, which are in every set"):
        conformal(per_class=True).fit([(torch.zeros(2, 30), torch.tensor([1, 2]))])


def test_enough_examples_give_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        conformal(0.99).fit([data(0, 99)])


@pytest.mark.parametrize("score", SCORES)
def test_of_a_prediction_that_is_nan_every_class_is_possible(score: Score) -> None:
    predictor = conformal(score=score).fit([data(0)])
    assert sets_of(predictor, torch.full((2, 6), math.nan)).all()


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "no labelled examples"),
        ([(torch.eye(3), torch.full((3,), -100))], "no labelled examples"),
        ([(torch.eye(3), torch.tensor([0, 1, 3]))], "run from 0 to 3, but there are 3 classes"),
        ([(torch.eye(3), torch.tensor([0, -1, 2]))], "run from -1 to 2"),
        ([(torch.eye(3) * math.nan, torch.tensor([0, 1, 2]))], "batch 1 contain NaN"),
        ([(torch.eye(3), torch.tensor([0, 1]))], "one label per prediction"),
    ],
)
def test_unfit_calibration_data_is_refused(batches: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        conformal().fit(batches)


@pytest.mark.parametrize("coverage", [0, 1, -0.5, 90, math.nan])
def test_a_coverage_that_is_no_probability_is_refused(coverage: float) -> None:
    with pytest.raises(ValueError, match="must lie between 0 and 1"):
        conformal(coverage)


def test_what_cannot_be_used_is_refused() -> None:
    with pytest.raises(TypeError, match=r"has no predict\(x\); .*baselines\.Single\(net\)"):
        Conformal(nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="score='raps' must be 'lac' or 'aps'"):
        conformal(score="raps")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"no threshold yet; call fit\(loader\)"):
        conformal().predict(torch.zeros(1, 2))
    with pytest.raises(ValueError, match="thresholds for 6 classes, but predictions of 3"):
        conformal(per_class=True).fit([data(0)]).predict(torch.zeros(1, 3))


def test_sets_and_labels_that_do_not_fit_are_refused() -> None:
    sets = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"shape \[3\] do not fit sets of shape \[2, 3\]"):
        set_coverage(sets, torch.zeros(3).long())
    with pytest.raises(ValueError, match="run from 0 to 3, but the sets have 3 classes"):
        set_coverage(sets, torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="give Prediction.sets"):
        set_size(sets.float())
