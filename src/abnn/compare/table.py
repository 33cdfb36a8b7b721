"""The comparison table of the paper: a row for every method, mean and spread over seeds."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from numbers import Integral
from typing import Any

from abnn.compare.latex import latex
from abnn.evaluation import Evaluation
from abnn.statistics import HIGHER_IS_BETTER, Spread, over_seeds
from abnn.table import aligned

BEST, SECOND = "best", "second"
_TEXT = {BEST: "*", SECOND: "'"}


@dataclass(frozen=True)
class Column:
    """One figure of all methods.

    Args:
        figure: its name.
        title: what the table calls it.
        group: what it has in common with its neighbours, such as the OOD dataset.
        digits: behind the point.
        higher_is_better: which is the best; None marks none.

    >>> Column("ood/svhn/msp/auroc", "AUROC", group="svhn", higher_is_better=True).name
    'svhn AUROC'
    """

    figure: str
    title: str
    group: str = ""
    digits: int = 2
    higher_is_better: bool | None = None

    @property
    def name(self) -> str:
        """Group and title in one."""
        return f"{self.group} {self.title}".strip()


@dataclass(frozen=True)
class ComparisonTable:
    """Figures of several methods over seeds.

    A cell is the mean and the standard deviation (n - 1) over the seeds; where some of these are
    missing, it says over how many it is, and where all are, it is "-". The best and the second best
    of a column are those as they are printed: what looks the same is marked the same.

    Args:
        columns: what is shown, in this order.
        figures: for every method its figures by name, of every seed; None, or a figure left out or
            NaN, is not there.

    >>> columns = [Column("accuracy", "Acc", higher_is_better=True), Column("seconds", "s")]
    >>> first = [{"accuracy": 90.0, "seconds": 8}, {"accuracy": 92.0, "seconds": 8}]
    >>> print(ComparisonTable(columns, {"ours": first, "theirs": [{"accuracy": 93.5}]}))
    method           Acc             s
    ours    91.00 ± 1.41'  8.00 ± 0.00
    theirs     93.50 (1)*            -
    <BLANKLINE>
    * best of the column, ' second best.
    Mean ± standard deviation over 2 seeds.
    (n): over so many of them; the others are missing.
    """

    columns: Sequence[Column]
    figures: Mapping[str, Sequence[Mapping[str, float] | None]]

    def __post_init__(self) -> None:
        if not self.columns or not self.figures:
            what = "figures" if self.figures else "methods"
            raise ValueError(f"The table has no {what}; give at least one of each.")

    @property
    def seeds(self) -> int:
        """The most seeds of any method."""
        return max(map(len, self.figures.values()))

    def values(self, method: str, figure: str) -> list[float | None]:
        """A figure of every seed; None where it is missing."""
        seeds = self.figures[method]
        found = [None if seed is None or figure not in seed else seed[figure] for seed in seeds]
        missing: list[float | None] = [None] * (self.seeds - len(found))
        return [None if value is None else _number(value) for value in found] + missing

    def spread(self, method: str, figure: str) -> Spread | None:
        """Mean and spread of a figure over the seeds that have it; None where none has."""
        values = [v for v in self.values(method, figure) if v is not None and not math.isnan(v)]
        return over_seeds([{figure: v} for v in values])[figure] if values else None

    def marks(self, column: Column) -> dict[str, str]:
        """The methods that are best and second best in a column, if it has several."""
        spreads = {method: self.spread(method, column.figure) for method in self.figures}
        means = {m: float(f"{s.mean:.{column.digits}f}") for m, s in spreads.items() if s}
        if column.higher_is_better is None or len(means) < 2:
            return {}
        ranked = sorted(set(means.values()), reverse=column.higher_is_better)
        places = dict(zip(ranked, (BEST, SECOND), strict=False))
        return {method: places[mean] for method, mean in means.items() if mean in places}

    def to_text(self, width: int = 120) -> str:
        """Aligned plain text: the best has a `*`, the second best a `'`.

        Args:
            width: of a line; what is wider goes on below, if possible between two groups.
        """
        blocks: list[list[list[str]]] = []
        names = ["method", *self.figures]
        for _, columns in groupby(self.columns, key=lambda column: column.group):
            more = [self._column(column) for column in columns]
            if not blocks or _width([names, *blocks[-1], *more]) > width:
                blocks.append([])
            blocks[-1] += more
        tables = []
        for block in blocks:
            header, *rows = (list(row) for row in zip(names, *block, strict=True))
            lines = aligned(header, *rows, named=True).splitlines()
            tables.append("\n".join(line.rstrip() for line in lines))
        legend = self.legend()
        return "\n\n".join([*tables, *(["\n".join(legend)] if legend else [])])

    def _column(self, column: Column) -> list[str]:
        """The title and the cells of a column of the text."""
        marks = self.marks(column)
        # Marks hang out to the right, so that the digits stay below each other.
        blank = "" if column.higher_is_better is None else " "
        cells = [
            self.cell(method, column) + (_TEXT[marks[method]] if method in marks else blank)
            for method in self.figures
        ]
        return [column.name + blank, *cells]

    def to_csv(self) -> str:
        """A line for every method and column, with all digits, and the value of every seed."""
        file = io.StringIO()
        write = csv.writer(file, lineterminator="\n").writerow
        seeds = range(self.seeds)
        write(["method", "column", "mean", "sd", "n", *(f"value_{i}" for i in seeds)])
        for method, column, spread in self._all():
            found = [spread.mean, spread.sd, spread.n] if spread else [None, None, 0]
            write([method, column.figure, *found, *self.values(method, column.figure)])
        return file.getvalue()

    def to_json(self) -> str:
        """A JSON object of the columns and of the methods; what is infinite is written as text."""
        methods: dict[str, dict[str, Any]] = {method: {} for method in self.figures}
        marks = {column.figure: self.marks(column) for column in self.columns}
        for method, column, spread in self._all():
            methods[method][column.figure] = {
                "mean": _plain(spread.mean if spread else None),
                "sd": _plain(spread.sd if spread else None),
                "n": spread.n if spread else 0,
                "values": [_plain(value) for value in self.values(method, column.figure)],
                "mark": marks[column.figure].get(method),
            }
        columns = [asdict(column) for column in self.columns]
        whole = {"seeds": self.seeds, "columns": columns, "methods": methods}
        return json.dumps(whole, indent=2, allow_nan=False)

    def to_latex(self) -> str:
        """A `tabular` for LaTeX with booktabs: the best is bold, the second best underlined."""
        return latex(self)

    def __str__(self) -> str:
        """The table as text."""
        return self.to_text()

    def _all(self) -> Iterator[tuple[str, Column, Spread | None]]:
        for method in self.figures:
            for column in self.columns:
                yield method, column, self.spread(method, column.figure)

    def cell(self, method: str, column: Column, plus_minus: str = "±") -> str:
        """What a cell says, without its mark."""
        spread = self.spread(method, column.figure)
        if spread is None:
            return "-"
        cell = f"{spread.mean:,.{column.digits}f}"
        # Of what is counted, and the same for every seed, there is no spread to tell.
        if spread.sd is not None and (spread.sd or column.digits):
            cell += f" {plus_minus} {spread.sd:,.{column.digits}f}"
        return cell + (f" ({spread.n})" if spread.n < self.seeds else "")

    def legend(self, best: str = _TEXT[BEST], second: str = _TEXT[SECOND]) -> list[str]:
        """What marks and numbers mean, in lines."""
        lines = []
        if any(self.marks(column) for column in self.columns):
            lines.append(f"{best} best of the column, {second} second best.")
        if self.seeds > 1:
            lines.append(f"Mean ± standard deviation over {self.seeds} seeds.")
        if any(spread and spread.n < self.seeds for _, _, spread in self._all()):
            lines.append("(n): over so many of them; the others are missing.")
        return lines


def table_of(
    evaluations: Mapping[str, Sequence[Evaluation | None]], ood: Sequence[str], score: str = "msp"
) -> ComparisonTable:
    """The table of the paper: quality, detection of every OOD dataset, and cost.

    Args:
        evaluations: of every method one for every seed; None where there is none yet.
        ood: the OOD datasets, by the names that they have in the evaluations.
        score: by which they are told from in-distribution data, one of `abnn.scores`.

    >>> single = Evaluation(n=100, accuracy=91.7, nll=0.373, brier=0.136, ece=5.3)
    >>> ours = Evaluation(n=100, accuracy=92.2, nll=0.280, brier=0.120, ece=2.9)
    >>> table = table_of({"Single model": [single], "ABNN": [ours]}, ood=[])
    >>> table.marks(table.columns[0])
    {'Single model': 'second', 'ABNN': 'best'}
    """
    columns = [
        Column("accuracy", "Acc", higher_is_better=True),
        Column("nll", "NLL", digits=4, higher_is_better=False),
        Column("ece", "ECE", higher_is_better=False),
    ]
    for dataset in ood:
        for kind in ("aupr", "auroc", "fpr95"):
            figure = f"ood/{dataset}/{score}/{kind}"
            better = HIGHER_IS_BETTER[kind]
            columns.append(Column(figure, kind.upper(), dataset, higher_is_better=better))
    columns += [
        Column("cost/parameters", "parameters added", digits=0),
        Column("cost/fit_seconds", "training s", digits=1),
        Column("cost/milliseconds", "prediction ms"),
    ]
    figures = {m: [_figures(e) for e in seeds] for m, seeds in evaluations.items()}
    there = {name for seeds in figures.values() for seed in seeds if seed for name in seed}
    for dataset in ood:
        if there and not any(name.startswith(f"ood/{dataset}/{score}/") for name in there):
            raise ValueError(
                f"No evaluation has the score {score!r} of OOD data {dataset!r}; give names that "
                "evaluate was given."
            )
    return ComparisonTable(columns, figures)


def _figures(evaluation: Evaluation | None) -> dict[str, float] | None:
    if evaluation is None:
        return None
    cost = asdict(evaluation.cost) if evaluation.cost else {}
    return evaluation.figures() | {f"cost/{k}": v for k, v in cost.items() if v is not None}


def _number(value: Any) -> float:
    """A plain number: one of numpy's is written as something else."""
    return int(value) if isinstance(value, Integral) else float(value)


def _width(columns: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) + 2 for column in columns) - 2


def _plain(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
