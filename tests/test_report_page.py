"""The page of a report: its structure, its safety, its numbers and its words."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any

import pytest

import report_data
from abnn.evaluation import Cost
from abnn.report import names, words
from abnn.report.data import Curve, Method, ReportData
from abnn.report.page import render
from abnn.statistics import Comparison
from report_data import HOSTILE, full, hostile, minimal


class Page(HTMLParser):
    """The elements of a page, their attributes, and the text of each that has any."""

    VOID = frozenset(("meta", "link", "img", "input", "br"))

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {k: v or "" for k, v in attrs}))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {k: v or "" for k, v in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    def values(self, attribute: str) -> list[str]:
        return [attrs[attribute] for _, attrs in self.elements if attribute in attrs]


CASES: dict[str, Callable[[], ReportData]] = {"full": full, "minimal": minimal, "hostile": hostile}


@cache
def text(case: str) -> str:
    return render(CASES[case]())


@cache
def page(case: str) -> Page:
    return Page(text(case))


@pytest.mark.parametrize("case", CASES)
def test_all_elements_are_closed_and_ids_are_unique(case: str) -> None:
    assert page(case).open == []
    assert [i for i, n in Counter(page(case).values("id")).items() if n > 1] == []


@pytest.mark.parametrize("case", CASES)
def test_what_is_referred_to_exists(case: str) -> None:
    found = page(case)
    used = [attrs["for"] for tag, attrs in found.elements if tag == "label"]
    used += found.values("aria-labelledby")
    used += [href[1:] for href in found.values("href") if href.startswith("#")]
    used += re.findall(r"url\(#([\w-]+)\)", " ".join(found.values("clip-path")))
    assert set(used) <= set(found.values("id"))


@pytest.mark.parametrize("case", CASES)
def test_every_control_has_a_name(case: str) -> None:
    found = page(case)
    labelled = {attrs["for"] for tag, attrs in found.elements if tag == "label"}
    for tag, attrs in found.elements:
        if tag in ("input", "select"):
            assert attrs["id"] in labelled or "aria-label" in attrs
        if tag == "img":
            assert attrs["alt"]
        if tag == "svg":
            assert "aria-label" in attrs or attrs.get("aria-hidden") == "true"


@pytest.mark.parametrize("case", CASES)
def test_headings_are_in_order(case: str) -> None:
    levels = [int(tag[1]) for tag, _ in page(case).elements if re.fullmatch(r"h\d", tag)]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_loaded(case: str) -> None:
    found = page(case)
    for name in ("src", "href", "srcset", "data", "action", "poster"):
        assert all(v.startswith(("#", "data:")) for v in found.values(name))
    css = "".join(data for tag, data in found.texts if tag == "style")
    assert "@import" not in css
    assert "url(" not in css
    policy = next(a["content"] for _, a in found.elements if "http-equiv" in a)
    assert policy.startswith("default-src 'none'; img-src data:;")


def test_hostile_names_are_text_everywhere() -> None:
    found, harmless = page("hostile"), page("full")
    assert Counter(tag for tag, _ in found.elements) == Counter(tag for tag, _ in harmless.elements)
    assert not any("onerror" in attrs for _, attrs in found.elements)
    assert ("h1", HOSTILE + full().title) in found.texts
    raw = next(data for tag, data in found.texts if tag == "script" and data.startswith("{"))
    assert not set("<>&\u2028") & set(raw)
    assert json.loads(raw)["methods"][0]["label"] == HOSTILE + "Network alone"


def test_the_same_data_give_the_same_page() -> None:
    assert render(minimal()) == text("minimal")
    assert render(replace(full(), methods=full().methods[2:3])) == render(
        replace(full(), methods=full().methods[2:3])
    )


def test_the_table_has_the_numbers_of_the_data() -> None:
    body = re.sub(r"<[^>]+>", " ", text("full").partition('id="figures"')[2])
    table = body.partition("Over seeds")[0]
    for method in full().methods:
        for name in ("accuracy", "nll", "ece", "aurc", "ood/svhn/msp/auroc", "ood/svhn/msp/fpr95"):
            shown = names.number(name, method.figures[name]).removesuffix(names.PERCENT)
            assert re.search(rf"(?<![\d.]){re.escape(shown)}(?![\d.])", table)
            low, high = (
                names.number(name, v).removesuffix(names.PERCENT) for v in method.intervals[name]
            )
            assert f"{low}–{high}" in table


def test_the_panel_gets_the_counts_of_the_data() -> None:
    raw = next(data for tag, data in page("full").texts if tag == "script" and data[0] == "{")
    for method, got in zip(full().methods, json.loads(raw)["methods"], strict=True):
        assert got["scores"].keys() == method.thresholds.keys()
        for score, t in method.thresholds.items():
            assert got["scores"][score]["values"] == pytest.approx(t.values, rel=1e-8)
            assert got["scores"][score]["kept"] == {"right": t.right, "wrong": t.wrong}
            assert got["scores"][score]["ood"]["svhn"]["kept"] == t.ood["svhn"]


def test_what_is_missing_is_said_with_how_to_get_it() -> None:
    assert "measure them with abnn.robustness(...)" in text("minimal")
    assert "measure it with bnn.samples_curve(...)" in text("minimal")
    assert "No curves over corruptions" not in text("full")


def test_a_page_of_a_method_stays_small() -> None:
    assert len(text("full").encode()) < 2_000_000


def test_a_tiny_image_keeps_its_pixels_and_a_large_one_does_not() -> None:
    assert text("full").count('class="tiny"') == text("full").count("<img")
    one = full().methods[2].gallery
    assert one is not None
    large = replace(one.mistakes[0], image=report_data.picture(0, 0, 128))
    method = replace(
        full().methods[2], gallery=replace(one, mistakes=[large], ood={}, uncertain=[])
    )
    assert 'class="tiny"' not in render(replace(full(), methods=[method]))


def test_inputs_without_an_image_show_their_place() -> None:
    one = full().methods[2].gallery
    assert one is not None
    bare = replace(one.mistakes[0], image=None, index=4711)
    method = replace(full().methods[2], gallery=replace(one, mistakes=[bare], ood={}, uncertain=[]))
    made = render(replace(full(), methods=[method]))
    assert "<span>input</span> 4711" in made
    assert "<img" not in made


FIGURES = {"accuracy": 90.0, "nll": 0.4, "ece": 5.0, "aurc": 0.02, "ood/svhn/msp/auroc": 80.0}
ALONE = Method(
    "Alone", "", True, FIGURES, {}, {}, Cost(0, 0, 0.0, 1.0, 1.0), [], {}, {}, {}, Curve([], []), []
)


def beside(*, better: str = "", worse: str = "", **more: Any) -> Method:
    """A method with verdicts on all figures; those named are better or worse by a bit."""
    verdicts, figures = {}, dict(FIGURES)
    for name in FIGURES:
        verdict = words.SAME
        for given, word, sign in ((better, words.BETTER, 1), (worse, words.WORSE, -1)):
            if name in given.split():
                verdict = word
                figures[name] *= 1 + 0.05 * sign * (1 if names.better_is_more(name) else -1)
        before, after = FIGURES[name], figures[name]
        verdicts[name] = Comparison(
            name, before, after, after - before, low=0.0, high=0.0, p=0.01, verdict=verdict
        )
    cost = Cost(100, 400, 10.0, 5.0, 5.0)
    mine = replace(
        ALONE, name="Mine", reference=False, figures=figures, verdicts=verdicts, cost=cost
    )
    return replace(mine, **more)


def word(*methods: Method, parameters: int | None = 1000) -> str:
    data = ReportData("", "", "", 100, 2, {"svhn": 10}, [ALONE, *methods], parameters=parameters)
    return words.judge(methods[0], data).word


@pytest.mark.parametrize(
    "better, worse, expected",
    [
        ("", "", "No difference shown"),
        ("", "accuracy", "Not worth it"),
        ("nll", "accuracy", "A trade-off"),
        ("nll ood/svhn/msp/auroc", "", "Worth it"),
    ],
)
def test_the_judgement_follows_the_verdicts(better: str, worse: str, expected: str) -> None:
    assert word(beside(better=better, worse=worse)) == expected


def test_without_a_test_there_is_no_judgement() -> None:
    assert word(beside(verdicts={})) == "Not compared"


@pytest.mark.parametrize(
    "cost, parameters, expected",
    [
        (Cost(100, 400, 10.0, 10.0, 5.0), 1000, "Worth it"),
        (Cost(100, 400, 10.0, 10.1, 5.0), 1000, "A trade-off"),
        (Cost(passes=11.0), 1000, "A trade-off"),
        (Cost(passes=9.0), None, "Worth it"),
        (Cost(), 1000, "A trade-off"),
        (Cost(1001, 400, 10.0, 5.0, 5.0), 1000, "A trade-off"),
        (Cost(1000, 400, 10.0, 5.0, 5.0), 1000, "Worth it"),
    ],
)
def test_a_high_or_unknown_price_makes_a_trade_off(
    cost: Cost, parameters: int | None, expected: str
) -> None:
    assert word(beside(better="nll", cost=cost), parameters=parameters) == expected


def test_a_method_is_not_worth_it_if_a_cheaper_one_is_as_good_at_all_it_gains() -> None:
    cheap = Cost(1, 4, 1.0, 1.0, 1.0)
    rival = beside(better="nll ece", name="Cheap", cost=cheap)
    assert word(beside(better="nll ece"), rival) == "Not worth it"
    assert word(beside(better="nll ece ood/svhn/msp/auroc"), rival) == "Worth it"
    assert (
        word(beside(better="nll ece"), replace(rival, cost=Cost(1, 4, 1.0, 5.0, 5.0))) == "Worth it"
    )
    assert word(beside(better="nll ece"), replace(rival, run="other")) == "Worth it"
    worse = beside(better="nll ece", worse="accuracy", name="Cheap", cost=cheap)
    assert word(beside(better="nll ece"), worse) == "Worth it"
    less = replace(rival, figures={**rival.figures, "nll": 0.39})
    assert word(beside(better="nll ece"), less) == "Worth it"


def told(method: Method, *others: Method) -> str:
    data = ReportData("", "", "", 100, 2, {"svhn": 10}, [ALONE, method, *others])
    return " ".join(f"{s.text} ({s.proof})" for s in words.sentences(method, data))


def test_a_figure_without_a_verdict_is_told_as_a_number_only() -> None:
    said = told(beside(better="accuracy", verdicts={})).replace("\u00a0", " ")
    assert "5.5 mistakes in 100 predictions; Alone: 10.0." in said
    assert "(Accuracy 94.5 % against 90.0 %)" in said
    assert not any(verdict in said for verdict in words.SYMBOLS)


def test_the_price_is_told_in_multiples_of_the_network() -> None:
    assert "A prediction takes 5 times as long (5\u00a0ms instead of 1\u00a0ms)" in told(beside())


def test_a_cheaper_method_that_calibrates_as_well_is_named() -> None:
    rival = beside(better="ece", name="Cheap", cost=Cost(1, 4, 1.0, 1.0, 1.0))
    assert "For calibration alone, Cheap costs less" in told(beside(better="ece"), rival)
    assert "For calibration alone" not in told(beside(better="ece"))


def test_the_summary_puts_every_method_under_one_word() -> None:
    methods = [ALONE, beside(better="nll"), beside(worse="nll", name="Other")]
    data = ReportData("", "", "", 1000, 2, {"svhn": 10}, methods)
    assert words.summary(data) == (
        "Compared with Alone, Mine is worth it; Other is not worth it. Measured on 1,000 labelled "
        "examples and 10 from svhn."
    )
    assert "nothing to compare" in words.summary(minimal())
