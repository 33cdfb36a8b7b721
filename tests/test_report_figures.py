"""The figures of a report as files and within the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from abnn.report.data import Method, ReportData
from abnn.report.drawing import VARIABLES, Drawing, inline, looks, svg
from abnn.report.figures import drawings, price, robustness_lines, write_figures
from abnn.robustness import Figures, Robustness
from report_data import HOSTILE, full, hostile, minimal

CASES: dict[str, Callable[[], ReportData]] = {"full": full, "minimal": minimal, "hostile": hostile}


def small(data: ReportData) -> ReportData:
    """The reference and the method that has everything; the others look alike."""
    return replace(data, methods=[data.methods[0], *data.methods[2:3]])


@cache
def made(case: str) -> list[Drawing]:
    return drawings(small(CASES[case]()))


def texts(content: str) -> list[str]:
    return ["".join(e.itertext()) for e in ElementTree.fromstring(content).iter() if e.text]


def test_every_figure_of_the_full_report_is_there() -> None:
    keys = {d.key for d in made("full")}
    assert {
        "reliability", "risk-coverage", "roc-svhn", "pr-svhn", "roc-textures", "pr-textures",
        "robustness-accuracy", "robustness-ece", "cost-milliseconds-auroc-svhn",
        "cost-parameters-nll", "histograms-1", "histograms-2", "scatter-2", "samples-2", "fit-2",
        "modes-tsne-2", "modes-pca-2", "drift-2", "disagreement-2",
    } <= keys  # fmt: skip
    assert len(keys) == len(made("full"))


def test_a_minimal_report_has_what_its_data_give() -> None:
    assert [d.key for d in made("minimal")] == ["reliability", "risk-coverage", "histograms-1"]


@pytest.mark.parametrize("case", ["minimal", "full"])
def test_files_are_the_same_whenever_they_are_written(case: str, tmp_path: Path) -> None:
    data = CASES[case]()
    # Of the full report one method is enough: it has every kind of figure but the comparison.
    data = replace(data, methods=data.methods[2:3]) if case == "full" else data
    first, second = (write_figures(data, tmp_path / name) for name in "ab")
    assert [p.name for p in first] == [p.name for p in second]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(first, second, strict=True))
    assert all(p.read_bytes()[:4] == b"\x89PNG" for p in first if p.suffix == ".png")
    assert {p.suffix for p in first} == {".svg", ".png"}


@pytest.mark.parametrize("case", CASES)
def test_drawings_hold_real_text_and_say_what_they_show(case: str) -> None:
    for drawing in made(case):
        assert texts(svg(drawing.figure))
        assert drawing.how.endswith(".")
        assert any(c.isdigit() for c in drawing.alt)


def test_names_are_text_in_drawings_even_with_dollars_and_line_separators() -> None:
    drawing = next(d for d in made("hostile") if d.key == "reliability")
    for content in (svg(drawing.figure), inline(drawing.figure, "a", drawing.alt)):
        assert not [e for e in ElementTree.fromstring(content).iter() if e.tag.endswith("img")]
        assert any(t.startswith(HOSTILE[:20]) for t in texts(content))


def test_in_the_page_every_colour_is_a_variable_and_every_id_has_the_prefix() -> None:
    for drawing in made("full"):
        root = ElementTree.fromstring(inline(drawing.figure, "here", drawing.alt))
        styles = " ".join(e.get("style", "") for e in root.iter())
        assert not [colour for colour in VARIABLES if colour in styles]
        assert "#" not in styles
        assert all(e.get("id", "here-").startswith("here-") for e in root.iter())
        assert root.get("aria-label") == drawing.alt


def test_the_page_is_told_where_the_axes_are() -> None:
    drawing = next(d for d in made("full") if d.key == "roc-svhn")
    root = ElementTree.fromstring(inline(drawing.figure, "a", "", drawing.link))
    left, right, bottom, top, *limits = map(float, root.attrib["data-axes"].strip("[]").split(","))
    assert limits == [0, 1, 0, 1]
    # The dotted line of chance goes from corner to corner.
    assert any(
        e.get("d") == f"M{left:g} {bottom:g}L{right:g} {top:g}" for e in root.iter() if e.get("d")
    )


def test_the_tables_have_the_numbers_of_the_data() -> None:
    table = next(d for d in made("full") if d.key == "reliability").table
    assert table is not None
    assert len(table.rows) == sum(len(m.reliability) for m in small(full()).methods)
    drawing = next(d for d in made("full") if d.key == "disagreement-2")
    value = 100 * full().methods[2].disagreement[0][1]
    assert drawing.table is not None
    assert drawing.table.rows[0][2] == f"{value:.1f}\u00a0%"


def test_a_method_looks_the_same_in_every_run_but_for_its_dash() -> None:
    def named(name: str, run: str) -> Method:
        return replace(minimal().methods[0], name=name, run=run, reference=name + run == "aone")

    found = looks([named(name, run) for run in ("one", "two") for name in "ab"])
    assert (found[0].colour, found[0].marker) == (found[2].colour, found[2].marker)
    assert found[0].dash != found[2].dash
    assert found[0].dash == found[1].dash
    assert found[0].colour != found[1].colour


def test_corruptions_are_averaged_at_each_severity() -> None:
    clean, half, most = Figures(95.0, 0.2, 1.0), Figures(80.0, 0.5, 2.0), Figures(90.0, 0.4, 1.5)
    lines = robustness_lines(Robustness(9, clean, {"fog": {1: half}, "blur": {1: most}}))
    assert lines["accuracy"] == [(0, 95.0), (1, 85.0)]
    assert lines["ece"] == [(0, 1.0), (1, 1.75)]


def test_times_are_multiples_of_the_reference() -> None:
    assert price(small(full()), "milliseconds") == {0: 1.0, 1: 9.8 / 1.4}
    assert price(minimal(), "milliseconds") == {}
