"""Figures over seeds, against scipy; and what counts as a difference shown."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats  # type: ignore[import-untyped]

from abnn.statistics import HIGHER_IS_BETTER, compare_seeds, over_seeds
from abnn.statistics.verdicts import holm_corrected
from abnn.student import t_within


def seeds(name: str, values: Any) -> list[dict[str, float]]:
    return [{name: float(value)} for value in values]


@pytest.mark.parametrize("df", [1, 2, 3, 4, 5, 10, 29, 30, 1000])
def test_the_t_distribution_is_that_of_scipy(df: int) -> None:
    for t in (0, 1e-3, 0.5, 1, 2.5, 7, 100):
        assert t_within(t, df) == pytest.approx(1 - 2 * stats.t.sf(t, df), abs=1e-12)
    assert t_within(math.inf, df) == 1


@pytest.mark.parametrize("n", [2, 3, 10, 100])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 0.999])
def test_over_seeds_agrees_with_numpy_and_scipy(n: int, confidence: float) -> None:
    values = np.random.default_rng(n).normal(90, 2, n)
    row = over_seeds(seeds("accuracy", values), confidence)["accuracy"]
    low, high = stats.t.interval(confidence, n - 1, values.mean(), stats.sem(values))
    assert (row.figure, row.n) == ("accuracy", n)
    assert (row.mean, row.sd) == pytest.approx((values.mean(), values.std(ddof=1)))
    assert (row.low, row.high) == pytest.approx((low, high))


@pytest.mark.parametrize("values", [[0.4], [0.4, math.inf]])
def test_without_a_spread_there_is_no_interval(values: list[float]) -> None:
    result = over_seeds(seeds("nll", values))
    assert result["nll"].mean == sum(values)
    assert (result["nll"].sd, result["nll"].low, result["nll"].high) == (None, None, None)
    assert result.to_table().split()[-4:] == ["-", "-", "-", str(len(values))]


@pytest.mark.parametrize("n", [2, 3, 10])
def test_compare_seeds_is_the_paired_t_test_of_scipy(n: int) -> None:
    rng = np.random.default_rng(n)
    a = rng.normal(0.4, 0.1, n)
    b = a + rng.normal(0.02, 0.02, n)
    row = compare_seeds(seeds("nll", a), seeds("nll", b))["nll"]
    expected = stats.ttest_rel(b, a)
    low, high = expected.confidence_interval()
    assert (row.a, row.b, row.difference) == pytest.approx((a.mean(), b.mean(), (b - a).mean()))
    assert (row.low, row.high, row.p) == pytest.approx((low, high, expected.pvalue))


@pytest.mark.parametrize("figure", HIGHER_IS_BETTER)
def test_the_verdict_knows_which_way_is_up(figure: str) -> None:
    low, high = seeds(f"some/{figure}", [1, 2, 3]), seeds(f"some/{figure}", [5, 6, 7.1])
    up = compare_seeds(low, high)[f"some/{figure}"]
    down = compare_seeds(high, low)[f"some/{figure}"]
    verdicts = ("better", "worse") if HIGHER_IS_BETTER[figure] else ("worse", "better")
    assert (up.verdict, down.verdict) == verdicts
    assert (up.difference, up.low, up.high) == (-down.difference, -down.high, -down.low)
    assert up.p == down.p


def test_a_figure_of_your_own_needs_a_direction() -> None:
    a, b = seeds("far/mae", [1, 2, 3]), seeds("far/mae", [5, 6, 7.1])
    with pytest.raises(ValueError, match=r'lower mae is better; say so, as in .*"mae": True'):
        compare_seeds(a, b)
    assert compare_seeds(a, b, higher_is_better={"mae": False})["far/mae"].verdict == "worse"


def test_one_seed_shows_nothing() -> None:
    result = compare_seeds(seeds("nll", [9]), seeds("nll", [1]))
    assert (result["nll"].difference, result["nll"].p) == (-8, 1)
    assert result["nll"].verdict == "no difference shown"
    assert json.loads(result.to_json())["nll"]["low"] == "nan"


def test_against_an_infinite_figure_nothing_is_shown() -> None:
    a, b = seeds("nll", [math.inf, 1]), seeds("nll", [1, math.inf])
    for first, second in ((a, b), (a, a), (a, seeds("nll", [1, 2]))):
        row = compare_seeds(first, second)["nll"]
        assert (row.p, row.verdict) == (1, "no difference shown")
        assert math.isnan(row.low)


def test_equal_differences_are_no_chance_but_none_at_all_is() -> None:
    a, b = seeds("nll", [1, 2, 3]), seeds("nll", [2, 3, 4])
    assert (compare_seeds(a, b)["nll"].p, compare_seeds(a, b)["nll"].verdict) == (0, "worse")
    same = compare_seeds(a, a)["nll"]
    assert (same.p, same.low, same.high, same.verdict) == (1, 0, 0, "no difference shown")


def test_holm_multiplies_by_what_is_left_and_never_falls() -> None:
    p = {"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005, "e": 0.9}
    assert holm_corrected(p) == pytest.approx(
        {"d": 5 * 0.005, "a": 4 * 0.01, "c": 3 * 0.03, "b": 0.09, "e": 0.9}
    )
    assert holm_corrected({"a": 0.6, "b": 0.7}) == {"a": 1, "b": 1}


def test_more_figures_ask_for_more_evidence() -> None:
    rng = np.random.default_rng(0)
    names = ["accuracy", "nll", "brier", "ece"]
    a = [{name: rng.normal() for name in names} for _ in range(8)]
    b = [{name: value + 0.5 * rng.normal() for name, value in row.items()} for row in a]
    single = compare_seeds(a, b, holm=False)
    together = compare_seeds(a, b)
    expected = holm_corrected({name: row.p for name, row in single.items()})
    assert {name: row.p for name, row in together.items()} == expected
    for name in names:
        assert together[name].low == single[name].low


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (seeds("nll", [1, 2]), seeds("nll", [1]), "2 seeds of a and 1 of b"),
        ([], [], "a is empty"),
        (seeds("nll", [1]), seeds("ece", [1]), "Only one of a and b has ece, nll"),
        ([{"nll": 1.0}, {"ece": 1.0}], seeds("nll", [1, 2]), "0 and 1 of a differ in having ece"),
        (seeds("nll", [1, 2]), seeds("nll", [1, math.nan]), "nll of evaluation 1 of b is NaN"),
    ],
)
def test_seeds_that_cannot_be_compared_are_refused(
    a: list[dict[str, float]], b: list[dict[str, float]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compare_seeds(a, b)


@pytest.mark.parametrize("confidence", [0, 1, 95, math.nan])
def test_a_confidence_that_is_no_share_is_refused(confidence: float) -> None:
    some = seeds("nll", [1, 2])
    with pytest.raises(ValueError, match="give a share between 0 and 1"):
        over_seeds(some, confidence)
    with pytest.raises(ValueError, match="give a share between 0 and 1"):
        compare_seeds(some, some, confidence=confidence)


def test_no_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match="evaluations is empty; give .* at least one seed"):
        over_seeds([])
