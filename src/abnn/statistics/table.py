"""What the statistics give back: rows by figure, as a table and as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

_PERCENT = {
    "accuracy",
    "top5",
    "ece",
    "adaptive_ece",
    "classwise_ece",
    "coverage",
    "auroc",
    "aupr",
    "fpr95",
    "aupr_in",
    "fpr95_in",
}


@dataclass(frozen=True)
class Interval:
    """One figure and its confidence interval.

    >>> Interval("accuracy", value=91.7, low=91.1, high=92.2).high
    92.2
    """

    figure: str
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """One figure of two methods.

    Args:
        figure: its name.
        a: value of the first method.
        b: value of the second.
        difference: `b - a`.
        low: where the confidence interval of the difference starts; it holds for this figure alone,
            whatever else is compared.
        high: where it ends. Both are NaN where there is none.
        p: two-sided, corrected for the number of figures compared, unless that was turned off.
        verdict: what `b` is beside `a`: "better", "worse" or "no difference shown".

    >>> Comparison("nll", 0.4, 0.3, -0.1, -0.12, -0.08, 0.001, "better").verdict
    'better'
    """

    figure: str
    a: float
    b: float
    difference: float
    low: float
    high: float
    p: float
    verdict: str


@dataclass(frozen=True)
class Spread:
    """One figure over several seeds.

    Args:
        figure: its name.
        mean: over the seeds.
        sd: standard deviation, with n - 1; `None` with one seed.
        low: where the confidence interval of the mean starts; `None` with one seed.
        high: where it ends.
        n: number of seeds.

    >>> Spread("nll", mean=0.4, sd=None, low=None, high=None, n=1).n
    1
    """

    figure: str
    mean: float
    sd: float | None
    low: float | None
    high: float | None
    n: int


Row = TypeVar("Row", Interval, Comparison, Spread)


class Figures(dict[str, Row], Generic[Row]):
    """Results by the name of their figure, as "accuracy" or "ood/svhn/msp/auroc".

    Accuracy, ECE and detection figures are in percent; NLL, Brier score and AURC are plain.

    >>> result = Figures(nll=Interval("nll", 0.373, 0.36, 0.39))
    >>> print(result)
    figure   value     low    high
    nll     0.3730  0.3600  0.3900
    >>> result["nll"].low
    0.36
    """

    def to_table(self) -> str:
        """Aligned plain text, one row for each figure.

        >>> print(Figures(ece=Interval("ece", 5.3, 5, 5.6)).to_table())
        figure  value   low  high
        ece %    5.30  5.00  5.60
        """
        data = {name: asdict(row) for name, row in self.items()}
        header = list(next(iter(data.values()), ["figure"]))
        rows: list[list[str]] = [
            [_cell(name, k, v) for k, v in row.items()] for name, row in data.items()
        ]
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        # Words to the left, numbers to the right.
        left = [name in ("figure", "verdict") for name in header]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if words else cell.rjust(width)
                for cell, width, words in zip(row, widths, left, strict=True)
            ).rstrip()
            for row in (header, *rows)
        )

    def to_json(self) -> str:
        """A JSON object of the figures; what is infinite or NaN is written as text.

        >>> print(Figures(nll=Interval("nll", float("inf"), 1.0, 2.0)).to_json())
        {
          "nll": {
            "value": "inf",
            "low": 1.0,
            "high": 2.0
          }
        }
        """
        data = {
            name: {k: _plain(v) for k, v in asdict(row).items() if k != "figure"}
            for name, row in self.items()
        }
        return json.dumps(data, indent=2, allow_nan=False)

    def __str__(self) -> str:
        """The table."""
        return self.to_table()


def last_part(figure: str) -> str:
    """What kind of figure it is.

    >>> last_part("ood/svhn/msp/auroc")
    'auroc'
    """
    return figure.rpartition("/")[2]


def _cell(figure: str, column: str, value: Any) -> str:
    percent = last_part(figure) in _PERCENT
    if column == "figure":
        return f"{figure} %" if percent else figure
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if column in ("verdict", "n"):
        return str(value)
    return f"{value:.{2 if percent and column != 'p' else 4}f}"


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
