"""Selective prediction against brute force, over all orders of tied examples."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise, permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from abnn.metrics import (
    Counts,
    accuracy_at_coverage,
    augrc,
    aurc,
    auroc,
    coverage_at_risk,
    risk_coverage,
)

METRICS: list[Callable[..., Any]] = [
    risk_coverage,
    aurc,
    augrc,
    accuracy_at_coverage,
    coverage_at_risk,
]


def examples(seed: int, n: int, distinct: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    confidence = torch.randint(distinct, (n,), generator=g) / distinct
    return confidence, torch.rand(n, generator=g) < 0.3 + confidence / 2


def orders(confidence: Tensor, correct: Tensor) -> list[list[int]]:
    """Whether the k-th most confident is right, in every order that the ties allow."""
    rows = list(zip(confidence.tolist(), correct.int().tolist(), strict=True))
    return [
        [right for _, right in order]
        for order in permutations(rows)
        if all(a[0] >= b[0] for a, b in pairwise(order))
    ]


def brute_aurc(hits: list[int]) -> float:
    risks = [1 - sum(hits[:k]) / k for k in range(1, len(hits) + 1)]
    return math.fsum(risks) / len(hits)


@pytest.mark.parametrize("seed", range(10))
def test_without_ties_aurc_is_the_mean_risk_of_the_most_confident(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    confidence, correct = torch.randn(500, generator=g), torch.rand(500, generator=g) < 0.7
    hits = correct[confidence.argsort(descending=True)].int().tolist()
    assert aurc(confidence, correct) == pytest.approx(brute_aurc(hits), rel=1e-13)


@pytest.mark.parametrize("distinct", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_aurc_is_the_mean_over_all_orders_of_ties(seed: int, distinct: int) -> None:
    confidence, correct = examples(seed, 7, distinct)
    found = [brute_aurc(hits) for hits in orders(confidence, correct)]
    assert aurc(confidence, correct) == pytest.approx(sum(found) / len(found), rel=1e-12)


@pytest.mark.parametrize("coverage", [0.01, 0.3, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_accuracy_at_coverage_is_the_mean_over_all_orders_of_ties(
    seed: int, coverage: float
) -> None:
    confidence, correct = examples(seed, 7, 3)
    k = math.ceil(coverage * 7)
    found = [sum(hits[:k]) / k for hits in orders(confidence, correct)]
    expected = sum(found) / len(found)
    assert accuracy_at_coverage(confidence, correct, coverage) == pytest.approx(expected)


def test_aurc_keeps_its_digits_over_many_examples() -> None:
    # Confidence in pairs of one right and one wrong: all digits of 200,000 terms, in fractions.
    n = 200_000
    confidence = torch.arange(n) // 2
    correct = torch.arange(n) % 2 == 0
    # After k pairs, the next example is wrong half of the time, and so is the whole: risk 1/2.
    assert aurc(confidence, correct) == pytest.approx(0.5, rel=1e-14)
    # The wrong ones last: risk 0 for n/2 examples, then (k - n/2) / k.
    last = math.fsum((k - n // 2) / k for k in range(n // 2 + 1, n + 1)) / n
    assert aurc(-torch.arange(n), torch.arange(n) < n // 2) == pytest.approx(last, rel=1e-13)
    # The same, with all wrong ones tied: their order is all one.
    tied = -torch.arange(n).clamp(max=n // 2)
    assert aurc(tied, torch.arange(n) < n // 2) == pytest.approx(last, rel=1e-13)


@pytest.mark.parametrize("distinct", [1, 2, 5, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_augrc_is_failure_detection_weighed_by_accuracy(seed: int, distinct: int) -> None:
    confidence, correct = examples(seed, 200, distinct)
    acc = correct.double().mean().item()
    failure = auroc(confidence[~correct], confidence[correct])
    expected = (1 - failure) * acc * (1 - acc) + (1 - acc) ** 2 / 2
    assert augrc(confidence, correct) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_augrc_is_the_trapezoid_under_the_curve(seed: int) -> None:
    confidence, correct = examples(seed, 100, 10)
    coverage, risk = risk_coverage(confidence, correct)
    zero = torch.zeros(1, dtype=torch.float64)
    area = torch.trapezoid(torch.cat([zero, risk * coverage]), torch.cat([zero, coverage]))
    assert augrc(confidence, correct) == pytest.approx(area.item(), rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_the_curve_counts_what_each_threshold_accepts(seed: int) -> None:
    confidence, correct = examples(seed, 60, 8)
    coverage, risk = risk_coverage(confidence.view(3, 20), correct.view(3, 20).int())
    thresholds = sorted(set(confidence.tolist()), reverse=True)
    for threshold, share, errors in zip(thresholds, coverage, risk, strict=True):
        accepted = confidence >= threshold
        assert share == accepted.double().mean()
        assert errors == (~correct[accepted]).double().mean()


@pytest.mark.parametrize("risk", [0.0, 0.1, 0.25, 0.4, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_coverage_at_risk_is_the_largest_of_all_thresholds(seed: int, risk: float) -> None:
    confidence, correct = examples(seed, 60, 8)
    found = [0.0]
    for threshold in confidence.unique():
        accepted = confidence >= threshold
        errors = Fraction(int((accepted & ~correct).sum()), int(accepted.sum()))
        if errors <= Fraction(str(risk)):
            found.append(int(accepted.sum()) / 60)
    assert coverage_at_risk(confidence, correct, risk) == max(found)


def test_a_risk_that_rises_and_falls_again_is_met_where_it_falls() -> None:
    correct = torch.tensor([False, True, True, True])
    confidence = torch.tensor([4.0, 3.0, 2.0, 1.0])
    assert coverage_at_risk(confidence, correct, 0.25) == 1
    assert coverage_at_risk(confidence, correct, 0.2) == 0


def test_a_coverage_met_exactly_needs_no_further_example() -> None:
    # 0.07 * 100 is a little more than 7 in floating point.
    correct = torch.arange(100) < 7
    assert accuracy_at_coverage(-torch.arange(100), correct, 0.07) == 1
    assert accuracy_at_coverage(-torch.arange(100), correct, 0.071) == 7 / 8


def test_the_limits_are_all_right_all_wrong_and_all_ties() -> None:
    ranks, yes, no = torch.arange(10.0), torch.ones(10), torch.zeros(10)
    assert (aurc(ranks, yes), augrc(ranks, yes), coverage_at_risk(ranks, yes, 0)) == (0, 0, 1)
    assert (aurc(ranks, no), augrc(ranks, no), coverage_at_risk(ranks, no, 0.9)) == (1, 0.5, 0)
    half = torch.arange(10) % 2
    assert aurc(no, half) == pytest.approx(0.5)
    assert augrc(no, half) == 0.25
    assert accuracy_at_coverage(no, half, 0.3) == 0.5
    assert aurc(ranks[:1], yes[:1]) == 0


@pytest.mark.parametrize("metric", METRICS)
def test_counts_filled_in_batches_give_the_same(metric: Callable[..., Any]) -> None:
    confidence, correct = examples(0, 300, 40)
    counts = Counts(columns=2)
    for some, right in zip(confidence.split(77), correct.split(77), strict=True):
        counts.update(some, column=~right)
    expected, found = metric(confidence, correct), metric(counts)
    if metric is risk_coverage:
        assert all(a.equal(b) for a, b in zip(expected, found, strict=True))
    else:
        assert found == expected


@pytest.mark.parametrize("metric", METRICS)
def test_what_cannot_be_ranked_is_refused(metric: Callable[..., Any]) -> None:
    some, yes = torch.rand(3), torch.ones(3)
    for arguments, message in [
        ((some, torch.ones(2)), "one of each per example"),
        ((torch.rand(0), torch.ones(0)), "no examples"),
        ((torch.tensor([float("nan")]), torch.ones(1)), "contain NaN"),
        ((some, 7 * yes), "True or False"),
        ((some,), "`correct` is missing"),
        ((Counts(columns=2),), "no examples"),
        ((Counts(),), r"have 1 column\(s\); give two"),
        ((Counts(columns=2), yes), "leave `correct` out"),
    ]:
        with pytest.raises(ValueError, match=message):
            metric(*arguments)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_shares_outside_their_range_are_refused(share: float) -> None:
    with pytest.raises(ValueError, match="coverage is .*; give a share above 0"):
        accuracy_at_coverage(torch.rand(3), torch.ones(3), share)
    with pytest.raises(ValueError, match="risk is .*; give a share of errors"):
        coverage_at_risk(torch.rand(3), torch.ones(3), share)
    with pytest.raises(ValueError, match="coverage is 0"):
        accuracy_at_coverage(torch.rand(3), torch.ones(3), 0)
