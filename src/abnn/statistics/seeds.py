"""Figures over seeds: how far they spread, and whether two methods differ over the same seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev

from abnn.statistics.table import Comparison, Figures, Spread, last_part
from abnn.statistics.verdicts import HIGHER_IS_BETTER, Test, check_confidence, comparisons
from abnn.student import student, t_within


def over_seeds(
    evaluations: Sequence[Mapping[str, float]], confidence: float = 0.95
) -> Figures[Spread]:
    """Mean, standard deviation and t-interval of each figure over seeds.

    Args:
        evaluations: the figures of each seed, by name.
        confidence: of the intervals.

    >>> print(over_seeds([{"accuracy": 90.0}, {"accuracy": 92.0}, {"accuracy": 91.0}]))
    figure       mean    sd    low   high  n
    accuracy %  91.00  1.00  88.52  93.48  3
    """
    check_confidence(confidence)
    rows = {}
    for name, values in _columns("evaluations", evaluations).items():
        mean, n = fmean(values), len(values)
        if n == 1 or not math.isfinite(mean):
            rows[name] = Spread(name, mean, None, None, None, n)
        else:
            sd = stdev(values)
            half = student(confidence, n - 1) * sd / math.sqrt(n)
            rows[name] = Spread(name, mean, sd, mean - half, mean + half, n)
    return Figures(rows)


def compare_seeds(
    a: Sequence[Mapping[str, float]],
    b: Sequence[Mapping[str, float]],
    *,
    confidence: float = 0.95,
    holm: bool = True,
    higher_is_better: Mapping[str, bool] | None = None,
) -> Figures[Comparison]:
    """Whether method `b` is better than method `a` over the same seeds, by a paired t-test.

    A single seed tells nothing of the spread: there is no interval then, and p is 1.

    Args:
        a: the figures of each seed of the first method.
        b: those of the second, in the same order of the seeds.
        confidence: of the intervals; a difference is shown if p is below 1 - confidence.
        holm: as of `compare`.
        higher_is_better: for figures of your own, by the last part of their name.

    >>> a = [{"nll": 0.40}, {"nll": 0.42}, {"nll": 0.41}]
    >>> b = [{"nll": 0.30}, {"nll": 0.33}, {"nll": 0.31}]
    >>> print(compare_seeds(a, b))
    figure       a       b  difference      low     high       p  verdict
    nll     0.4100  0.3133     -0.0967  -0.1110  -0.0823  0.0012  better
    """
    check_confidence(confidence)
    if len(a) != len(b):
        raise ValueError(
            f"There are {len(a)} seeds of a and {len(b)} of b, so they are not the same seeds; "
            "give one evaluation of each for every seed."
        )
    first, second = _columns("a", a), _columns("b", b)
    if first.keys() != second.keys():
        raise ValueError(
            f"Only one of a and b has {_names(first.keys() ^ second.keys())}; give the same "
            "figures of both."
        )
    directions = {**HIGHER_IS_BETTER, **(higher_is_better or {})}
    for name in first:
        if (kind := last_part(name)) not in directions:
            raise ValueError(
                f"It is not known whether a higher or a lower {kind} is better; say so, as in "
                f'higher_is_better={{"{kind}": True}}.'
            )
    tests = {name: _paired(values, second[name], confidence) for name, values in first.items()}
    return comparisons(tests, confidence, holm, directions)


def _paired(a: Sequence[float], b: Sequence[float], confidence: float) -> Test:
    differences = [y - x for x, y in zip(a, b, strict=True)]
    mean, n = fmean(b) - fmean(a), len(differences)
    low, high, p = math.nan, math.nan, 1.0
    if n > 1 and math.isfinite(mean):
        mean = fmean(differences)
        error = stdev(differences) / math.sqrt(n)
        half = student(confidence, n - 1) * error
        low, high = mean - half, mean + half
        # Equal differences have no spread: 0 is nothing, anything else can't be chance.
        t = abs(mean) / error if error else math.inf if mean else 0.0
        p = 1 - t_within(t, n - 1)
    return Test(fmean(a), fmean(b), mean, low, high, p)


def _columns(name: str, seeds: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """The values of each figure over the seeds."""
    if not seeds:
        raise ValueError(f"{name} is empty; give the figures of at least one seed.")
    for i, figures in enumerate(seeds):
        if figures.keys() != seeds[0].keys():
            raise ValueError(
                f"Evaluations 0 and {i} of {name} differ in having "
                f"{_names(figures.keys() ^ seeds[0].keys())}; give the same figures of all seeds."
            )
        if bad := [k for k, v in figures.items() if math.isnan(v)]:
            raise ValueError(f"{_names(bad)} of evaluation {i} of {name} is NaN; leave it out.")
    return {figure: [float(seed[figure]) for seed in seeds] for figure in seeds[0]}


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
