"""When a difference counts as shown, and whether it is one for the better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from abnn.statistics.table import Comparison, Figures, last_part

# By the last part of a figure's name: "auroc" of "ood/svhn/msp/auroc".
HIGHER_IS_BETTER = {
    "accuracy": True,
    "top5": True,
    "nll": False,
    "brier": False,
    "ece": False,
    "adaptive_ece": False,
    "classwise_ece": False,
    "aurc": False,
    "augrc": False,
    "coverage": True,
    "size": False,
    "auroc": True,
    "aupr": True,
    "fpr95": False,
    "aupr_in": True,
    "fpr95_in": False,
}


class Test(NamedTuple):
    """A `Comparison` before it is known what else was tested: p holds for this figure alone."""

    a: float
    b: float
    difference: float
    low: float
    high: float
    p: float


def comparisons(
    tests: Mapping[str, Test],
    confidence: float,
    holm: bool,
    directions: Mapping[str, bool] = HIGHER_IS_BETTER,
) -> Figures[Comparison]:
    """Tests with their verdicts, and with p corrected for their number if `holm`.

    >>> tests = {"nll": Test(0.4, 0.3, -0.1, -0.2, 0.0, p=0.03)}
    >>> comparisons(tests, confidence=0.95, holm=True)["nll"].verdict
    'better'
    """
    p = {name: test.p for name, test in tests.items()}
    p = holm_corrected(p) if holm else p
    rows = {}
    for name, test in tests.items():
        verdict = "no difference shown"
        if p[name] < 1 - confidence:
            higher = directions[last_part(name)]
            verdict = "better" if (test.difference > 0) == higher else "worse"
        rows[name] = Comparison(name, *test[:-1], p=p[name], verdict=verdict)
    return Figures(rows)


def holm_corrected(p: Mapping[str, float]) -> dict[str, float]:
    """Such p that the chance of any false verdict is the level tested at (Holm, 1979).

    The i-th smallest of n is multiplied by `n - i + 1`, and is no smaller than those before it.

    >>> holm_corrected({"nll": 0.5, "ece": 0.0625, "brier": 0.375})
    {'ece': 0.1875, 'brier': 0.75, 'nll': 0.75}
    """
    corrected, largest = {}, 0.0
    for i, name in enumerate(sorted(p, key=lambda name: p[name])):
        largest = max(largest, min(1.0, (len(p) - i) * p[name]))
        corrected[name] = largest
    return corrected


def check_confidence(confidence: float) -> None:
    """Refuse what is no share."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence is {confidence}; give a share between 0 and 1, as 0.95.")
