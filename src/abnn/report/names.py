"""What things are called, and how numbers are written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from abnn.report.data import Curve, Method
from abnn.statistics import HIGHER_IS_BETTER

# A number and its unit stay on one line.
PERCENT = "\u00a0%"

SCORES = {
    "msp": "1 − confidence",
    "entropy": "total uncertainty",
    "epistemic": "epistemic uncertainty",
    "aleatoric": "aleatoric uncertainty",
    "max_logit": "− greatest logit",
    "energy": "energy",
    "variation_ratio": "disagreement of the draws",
}
# Of every kind of cost: in a sentence, and on an axis.
COSTS = {
    "milliseconds": ("time of a prediction", "Time of a prediction (network alone = 1)"),
    "passes": ("passes of a prediction", "Forward passes for one input"),
    "parameters": ("parameters added", "Parameters added to the network"),
    "bytes": ("bytes to store", "Bytes to store beside the network"),
    "fit_seconds": ("time of fitting", "Time of fitting, in seconds"),
}
_NAMES = {
    "accuracy": "Accuracy",
    "nll": "NLL",
    "brier": "Brier score",
    "ece": "ECE",
    "aurc": "AURC",
    "coverage": "Coverage",
    "size": "Classes",
    "auroc": "AUROC",
    "aupr": "AUPR",
    "fpr95": "FPR95",
    "aupr_in": "AUPR (in)",
    "fpr95_in": "FPR95 (in)",
}
_PERCENT = {"accuracy", "coverage", "ece", "auroc", "aupr", "fpr95", "aupr_in", "fpr95_in"}
_DIGITS = {"nll": 3, "brier": 3, "aurc": 4, "size": 2}


def label(method: Method) -> str:
    """The name of a method, with its run where there are several."""
    return f"{method.name} ({method.run})" if method.run else method.name


def part(name: str) -> str:
    """The last part of a figure's name, which says what kind of figure it is."""
    return name.rpartition("/")[2]


def dataset(name: str) -> tuple[str, str] | None:
    """The OOD dataset and the score of a figure's name, if it is one of detection.

    >>> dataset("ood/svhn/msp/auroc")
    ('svhn', 'msp')
    """
    if not name.startswith("ood/") or name.count("/") < 3:
        return None
    where, score, _ = name[4:].rsplit("/", 2)
    return where, score


def figure_name(name: str) -> str:
    """What people call a figure.

    >>> figure_name("ood/svhn/msp/auroc")
    'AUROC of svhn'
    """
    kind = _NAMES.get(part(name), part(name))
    found = dataset(name)
    if found is None:
        return kind
    where, score = found
    return f"{kind} of {where}" + ("" if score == "msp" else f" by {SCORES.get(score, score)}")


def unit(name: str) -> str:
    """The sign of percent where a figure is in it."""
    return PERCENT if part(name) in _PERCENT else ""


def better_is_more(name: str) -> bool:
    """Whether a figure should be high."""
    return HIGHER_IS_BETTER.get(part(name), True)


def headline(names: Iterable[str], detection: Sequence[str] = ("auroc",)) -> list[str]:
    """The figures that a judgement looks at, of those given; of detection, those of these kinds."""
    kinds = ("accuracy", "nll", "ece", "aurc")
    given = list(names)
    plain_ones = [kind for kind in kinds if kind in given]
    return plain_ones + [
        name
        for name in given
        if part(name) in detection and (found := dataset(name)) and found[1] == "msp"
    ]


def number(name: str, value: float) -> str:
    r"""A figure in as many digits as it deserves.

    >>> number("accuracy", 91.53), number("nll", 0.3456)
    ('91.5\xa0%', '0.346')
    """
    if part(name) in _PERCENT:
        return percent(value)
    return plain(value, _DIGITS.get(part(name), 3))


def plain(value: float, digits: int) -> str:
    """A number; what is none, or has no end, in one character."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:.{digits}f}".replace("-", "−")


def percent(value: float) -> str:
    r"""A number of percent.

    >>> percent(5.0)
    '5.0\xa0%'
    """
    return plain(value, 1) + PERCENT


def count(value: float) -> str:
    """A whole number with its thousands apart."""
    return f"{value:,.0f}"


def rounded(value: float) -> str:
    """A number of any size in three digits or in whole.

    >>> rounded(5.1429), rounded(13500)
    ('5.14', '13,500')
    """
    return count(value) if value >= 100 else f"{value:.3g}"


def size(value: float) -> str:
    r"""A number of bytes.

    >>> size(54_000)
    '54\xa0kB'
    """
    for name, least in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= least:
            return f"{value / least:.3g}\u00a0{name}"
    return f"{value:.0f}\u00a0bytes"


def duration(seconds: float) -> str:
    r"""A time.

    >>> duration(212), duration(0.02)
    ('3.5\xa0min', '20\xa0ms')
    """
    for name, least in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= least:
            return f"{seconds / least:.{2 if seconds < 36000 else 3}g}\u00a0{name}"
    return f"{1000 * seconds:.3g}\u00a0ms"


def times(ratio: float) -> str:
    """How often as much: "7 times", or "1.4 times".

    >>> times(7.02), times(1.41), times(0.017)
    ('7 times', '1.4 times', '0.017 times')
    """
    if ratio < 0.95:
        return f"{ratio:.2g} times"
    return (
        f"{ratio:.0f} times"
        if ratio >= 9.95 or abs(ratio - round(ratio)) < 0.05
        else f"{ratio:.1f} times"
    )


def joined(words: Iterable[str]) -> str:
    """Words in a row: "a, b and c"."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def at(curve: Curve, x: float) -> float | None:
    """The value of a curve at the last of its points up to x; `None` if all are beyond."""
    pairs = zip(curve.x[::-1], curve.y[::-1], strict=True)
    return next((v for u, v in pairs if u <= x + 1e-9), None)
