"""The comparison table: which marks it sets, what it says is missing, and that its forms agree."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from statistics import mean, stdev

import numpy as np
import pytest

from abnn.compare.latex import escaped
from abnn.compare.table import Column, ComparisonTable, table_of
from abnn.evaluation import Cost, Evaluation
from abnn.metrics import Detection

ACC = Column("accuracy", "Acc", higher_is_better=True)
NLL = Column("nll", "NLL", digits=3, higher_is_better=False)
COST = Column("cost/parameters", "parameters added", digits=0)


def table(figures: Mapping[str, Sequence[float | None]], column: Column = ACC) -> ComparisonTable:
    seeds = {
        method: [None if v is None else {column.figure: v} for v in values]
        for method, values in figures.items()
    }
    return ComparisonTable([column], seeds)


def evaluation(accuracy: float, cost: Cost | None = None) -> Evaluation:
    detection = Detection(auroc=accuracy - 1, aupr=accuracy - 2, fpr95=30.0, aupr_in=1, fpr95_in=2)
    other = Detection(auroc=1, aupr=2, fpr95=3, aupr_in=4, fpr95_in=5)
    scores = {"msp": detection, "entropy": other}
    return Evaluation(9, accuracy, 0.3, 0.2, 5.0, ood={"a_b": scores, "far": scores}, cost=cost)


@pytest.mark.parametrize(
    "values, column, marked",
    [
        ([90.0, 92.0, 91.0], ACC, {"b": "best", "c": "second"}),
        ([90.0, 92.0, 91.0], NLL, {"a": "best", "c": "second"}),
        ([90.0, 92.0, 91.0], COST, {}),
        ([92.0, 92.0, 91.0], ACC, {"a": "best", "b": "best", "c": "second"}),
        ([92.0, 91.0, 91.0], ACC, {"a": "best", "b": "second", "c": "second"}),
        ([92.001, 91.999, 91.0], ACC, {"a": "best", "b": "best", "c": "second"}),
        ([0.3, math.inf, None], NLL, {"a": "best", "b": "second"}),
        ([None, 92.0, None], ACC, {}),
        ([None, None, None], ACC, {}),
    ],
)
def test_the_best_and_second_best_are_marked(
    values: Sequence[float | None], column: Column, marked: dict[str, str]
) -> None:
    made = table({name: [value] for name, value in zip("abc", values, strict=True)}, column)
    assert made.marks(column) == marked
    text = {line[0]: line for line in made.to_text().splitlines()[1:4]}
    for name, line in text.items():
        assert line.endswith("*") == (marked.get(name) == "best")
        assert line.endswith("'") == (marked.get(name) == "second")
    latex = made.to_latex()
    assert latex.count(r"\textbf{") == list(marked.values()).count("best")
    assert latex.count(r"\underline{") == list(marked.values()).count("second")


def test_a_cell_is_mean_and_standard_deviation() -> None:
    values = [90.1, 91.7, 93.0]
    made = table({"a": values})
    assert f"{mean(values):.2f} ± {stdev(values):.2f}" in made.to_text()
    assert rf"{mean(values):.2f} $\pm$ {stdev(values):.2f}" in made.to_latex()
    assert "over 3 seeds" in made.to_text()


def test_one_seed_has_no_spread() -> None:
    text = table({"a": [90.0], "b": [91.0]}).to_text()
    assert "±" not in text


def test_equal_counts_have_no_spread_and_others_do() -> None:
    text = table({"a": [1234567, 1234567], "b": [10, 14]}, COST).to_text()
    assert re.search(r"a +1,234,567$", text, re.MULTILINE)
    assert re.search(r"b +12 ± 3$", text, re.MULTILINE)


def test_what_is_missing_is_a_dash_and_what_is_incomplete_says_so() -> None:
    made = table({"a": [90.0, 91.0, 92.0], "b": [90.0, None, 94.0], "c": [], "d": [math.nan]})
    rows = dict(line.split(maxsplit=1) for line in made.to_text().splitlines()[1:5])
    assert rows["a"] == "91.00 ± 1.00'"
    assert rows["b"] == "92.00 ± 2.83 (2)*"
    assert rows["c"] == rows["d"] == "-"
    assert "(n): over so many of them" in made.to_text()
    assert "(n)" not in table({"a": [90.0, 91.0]}).to_text()


def test_csv_holds_the_exact_numbers() -> None:
    values = [1 / 3, np.float64(np.pi), 1e-17]
    made = table({'a, "b"': values, "c": [0.1, None], "d": [math.inf]}, NLL)
    rows = list(csv.DictReader(io.StringIO(made.to_csv())))
    assert [row["method"] for row in rows] == ['a, "b"', "c", "d"]
    assert {row["column"] for row in rows} == {"nll"}
    assert [float(rows[0][f"value_{i}"]) for i in range(3)] == values
    assert float(rows[0]["mean"]) == mean(map(float, values))
    assert float(rows[0]["sd"]) == stdev(map(float, values))
    assert (rows[1]["n"], rows[1]["sd"], rows[1]["value_0"], rows[1]["value_1"]) == (
        "1", "", "0.1", "",
    )  # fmt: skip
    assert float(rows[2]["mean"]) == math.inf


def test_json_holds_the_exact_numbers_and_the_marks() -> None:
    made = table({"a": [1 / 3, 0.7], "b": [math.inf, None]}, NLL)
    data = json.loads(made.to_json())
    assert data["seeds"] == 2
    assert data["columns"][0]["figure"] == "nll"
    a, b = data["methods"]["a"]["nll"], data["methods"]["b"]["nll"]
    assert (a["values"], a["n"], a["mark"]) == ([1 / 3, 0.7], 2, "best")
    assert a["sd"] == stdev([1 / 3, 0.7])
    assert (b["mean"], b["sd"], b["values"], b["mark"]) == ("inf", None, ["inf", None], "second")


def test_names_are_escaped_in_latex() -> None:
    assert escaped("a_b % c & d #1 {x} $y$ ~ ^ \\ <") == (
        r"a\_b \% c \& d \#1 \{x\} \$y\$ \textasciitilde{} \textasciicircum{} "
        r"\textbackslash{} \textless{}"
    )
    assert escaped("two\nlines") == "two lines"


def test_latex_has_the_same_number_of_cells_in_every_row() -> None:
    made = table_of({"50 % & more_#1": [evaluation(90.0)], "b": []}, ["a_b", "far"])
    lines = made.to_latex().splitlines()
    body = [line for line in lines if not line.startswith("%")]
    assert body[0] == rf"\begin{{tabular}}{{l{12 * 'c'}}}"
    assert [body[1], body[-2], body[-1]] == [r"\toprule", r"\bottomrule", r"\end{tabular}"]
    rows = [line.removesuffix(r" \\") for line in body if line.endswith(r"\\")]
    assert len(rows) == 4  # groups, titles, two methods
    for row in rows:
        cells = re.split(r"(?<!\\)&", row)
        spans = [int(n) for n in re.findall(r"\\multicolumn\{(\d+)\}", row)]
        assert len(cells) - len(spans) + sum(spans) == 13
    assert r"\multicolumn{3}{c}{a\_b}" in rows[0]
    assert r"\cmidrule(lr){5-7}\cmidrule(lr){8-10}" in body
    for line in body:
        plain = re.sub(r"\\[{}%&$#_\\]", "", line)
        assert plain.count("{") == plain.count("}")
        assert plain.count("$") % 2 == 0
        assert not re.search(r"[#%_]", plain)


def test_the_table_of_evaluations_has_the_columns_of_the_paper() -> None:
    cost = Cost(parameters=1500, bytes=6000, fit_seconds=12.5, milliseconds=0.75)
    made = table_of({"single": [evaluation(90.0)], "ours": [evaluation(91.0, cost)]}, ["far"])
    assert [column.name for column in made.columns] == [
        "Acc", "NLL", "ECE", "far AUPR", "far AUROC", "far FPR95",
        "parameters added", "training s", "prediction ms",
    ]  # fmt: skip
    rows = [line.split() for line in made.to_text(width=1000).splitlines()[1:3]]
    assert rows[0][1:7] == ["90.00'", "0.3000*", "5.00*", "88.00'", "89.00'", "30.00*"]
    assert rows[0][7:] == ["-", "-", "-"]
    assert rows[1][1:7] == ["91.00*", "0.3000*", "5.00*", "89.00*", "90.00*", "30.00*"]
    assert rows[1][7:] == ["1,500", "12.5", "0.75"]


def test_another_score_gives_other_figures() -> None:
    made = table_of({"a": [evaluation(90.0)]}, ["far"], score="entropy")
    assert made.values("a", "ood/far/entropy/aupr") == [2]
    assert "far AUPR" in made.to_text()


def test_unfinished_evaluations_keep_their_place() -> None:
    made = table_of({"a": [None, evaluation(90.0)], "b": [evaluation(80.0)]}, [])
    assert made.values("a", "accuracy") == [None, 90.0]
    assert made.values("b", "accuracy") == [80.0, None]


def test_a_wide_table_goes_on_below() -> None:
    made = table_of({"a method": [evaluation(90.0)], "b": [evaluation(91.0)]}, ["a_b", "far"])
    text = made.to_text(width=70)
    assert max(map(len, text.splitlines())) <= 70
    assert text.count("a method") == 3
    assert sorted(re.findall(r"\d+\.\d+[*']?", text)) == sorted(
        re.findall(r"\d+\.\d+[*']?", made.to_text(width=1000))
    )


def test_an_empty_table_and_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="The table has no methods"):
        table({})
    with pytest.raises(ValueError, match="The table has no figures"):
        ComparisonTable([], {"a": []})
    with pytest.raises(ValueError, match="has the score 'msp' of OOD data 'nearby'"):
        table_of({"a": [evaluation(90.0)]}, ["nearby"])
    with pytest.raises(ValueError, match="has the score 'mps' of OOD data 'far'"):
        table_of({"a": [evaluation(90.0)]}, ["far"], score="mps")
    assert "-" in table_of({"a": [None]}, ["far"]).to_text()
