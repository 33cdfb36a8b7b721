"""A comparison table in LaTeX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from abnn.compare.table import Column, ComparisonTable

_MARKS = {"best": r"\textbf{%s}", "second": r"\underline{%s}"}
_NAMES = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def latex(table: ComparisonTable) -> str:
    r"""A `tabular` for the package booktabs: the best is bold, the second best underlined."""
    lines = [
        *(f"% {line}" for line in table.legend("Bold:", "underlined:")),
        rf"\begin{{tabular}}{{l{'c' * len(table.columns)}}}",
        r"\toprule",
        *_groups(table.columns),
        " & ".join(["Method", *map(_title, table.columns)]) + r" \\",
        r"\midrule",
    ]
    marks = [table.marks(column) for column in table.columns]
    for method in table.figures:
        row = [escaped(method)]
        for column, marked in zip(table.columns, marks, strict=True):
            cell = table.cell(method, column, r"$\pm$").replace("inf", r"$\infty$")
            row.append(_MARKS[marked[method]] % cell if method in marked else cell)
        lines.append(" & ".join(row) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def escaped(text: str) -> str:
    r"""A name as LaTeX prints it.

    >>> print(escaped("50 % of A & B_1"))
    50 \% of A \& B\_1
    """
    return "".join(_NAMES.get(character, character) for character in " ".join(text.split()))


def _groups(table_columns: Sequence[Column]) -> Iterator[str]:
    """The line of LaTeX above the titles, if there are groups, and the rules below it."""
    if not any(column.group for column in table_columns):
        return
    cells, rules, at = [""], [], 2
    for group, columns in groupby(table_columns, key=lambda column: column.group):
        width = len(list(columns))
        cells.append(rf"\multicolumn{{{width}}}{{c}}{{{escaped(group)}}}")
        rules += [rf"\cmidrule(lr){{{at}-{at + width - 1}}}"] if group else []
        at += width
    yield " & ".join(cells) + r" \\"
    yield "".join(rules)


def _title(column: Column) -> str:
    arrows = {True: r" $\uparrow$", False: r" $\downarrow$", None: ""}
    return escaped(column.title) + arrows[column.higher_is_better]
