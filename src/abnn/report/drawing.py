"""How every figure is drawn: one style, one palette, and the way to SVG and PNG.

A figure is drawn once, by matplotlib, in light colours. In a file it stays like that. In the
page, `inline` puts a CSS variable in the place of each colour, so that the same drawing works in
the dark.
"""

from __future__ import annotations

import io
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from abnn.report.data import Method

INK, SOFT, RULE, PAPER = "#1d2329", "#59636e", "#dfe3e8", "#fefefe"
# Okabe and Ito's colours, the pale ones darkened until they stand out from white.
PALETTE = ("#0072b2", "#d55e00", "#008a64", "#b5588f", "#a87800", "#2b8cc4")
ALONE = "#4b545e"
RIGHT, WRONG = "#6a8296", "#c8501e"
FOREIGN = ("#7d5ba6", "#96700f", "#b0477a")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h")
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)), (0, (3, 3)))

# What stands for each colour in the page; page.css gives it a light and a dark value.
VARIABLES = {
    INK: "--ink",
    SOFT: "--soft",
    RULE: "--rule",
    PAPER: "--paper",
    ALONE: "--alone",
    RIGHT: "--right",
    WRONG: "--wrong",
    **{colour: f"--c{i}" for i, colour in enumerate(PALETTE)},
    **{colour: f"--ood{i}" for i, colour in enumerate(FOREIGN)},
}

_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": SOFT,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": SOFT,
    "axes.labelpad": 6.0,
    "axes.labelsize": 11.0,
    "axes.linewidth": 0.8,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.dpi": 72.0,
    "figure.facecolor": PAPER,
    "font.size": 11.0,
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "legend.fontsize": 11.0,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    "svg.hashsalt": "abnn",
    # A name is not a formula, even with two dollar signs.
    "text.parse_math": False,
    "text.color": INK,
    "xtick.color": SOFT,
    "xtick.labelsize": 10.5,
    "xtick.major.pad": 7.0,
    "xtick.major.size": 0.0,
    "xtick.minor.size": 0.0,
    "ytick.color": SOFT,
    "ytick.labelsize": 10.5,
    "ytick.major.pad": 6.0,
    "ytick.major.size": 0.0,
    "ytick.minor.size": 0.0,
}


@dataclass(frozen=True)
class Table:
    """The numbers of a figure."""

    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True, eq=False)
class Drawing:
    """One figure with its words.

    Args:
        key: a name for files and ids, such as "roc-svhn".
        title: what it shows.
        how: how to read it, in a sentence.
        alt: its content in words and numbers.
        figure: the drawing itself.
        table: its numbers, where they are few.
        method: which of the methods it is about, if it is about one.
        link: what the page's script does with it: "risk" or "roc/" and the name of a dataset, where
            the threshold is marked, or "cost/", the kind of cost, "/" and the figure to choose by.
    """

    key: str
    title: str
    how: str
    alt: str
    figure: Figure
    table: Table | None = None
    method: int | None = None
    link: str | None = None


@dataclass(frozen=True)
class Look:
    """What a method looks like in every figure."""

    colour: str
    marker: str
    dash: Any


@contextmanager
def style() -> Iterator[None]:
    """Our style and nothing of the user's; a decorator of all that draws."""
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        # A name in another script is drawn as boxes in a PNG; in SVG the reader's fonts have it.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from", category=UserWarning)
        yield


def short(text: str, most: int = 26) -> str:
    """The text, cut where a figure has no room for it, with nothing in it that can't be drawn."""
    text = "".join(c if c.isprintable() else "\ufffd" for c in text)
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def looks(methods: Sequence[Method]) -> list[Look]:
    """A look for every method: colour and marker go with its name, the dash with its run."""
    names = list(dict.fromkeys(m.name for m in methods))
    runs = list(dict.fromkeys(m.run for m in methods))
    first = next((m.name for m in methods if m.reference), None)
    others = [name for name in names if name != first]

    def look(method: Method) -> Look:
        i = names.index(method.name)
        j = runs.index(method.run) if len(runs) > 1 else i
        colour = ALONE if method.name == first else PALETTE[others.index(method.name) % 6]
        return Look(colour, _MARKERS[i % len(_MARKERS)], _DASHES[j % len(_DASHES)])

    return [look(method) for method in methods]


def panel(
    names: Sequence[str] = (),
    marks: Sequence[Look] = (),
    *,
    height: float = 280,
    left: float = 48,
    lines: bool = True,
    marked: bool = True,
) -> tuple[Figure, Axes]:
    """A figure 400 units wide with one pair of axes, and a legend above them.

    Args:
        names, marks: of the legend.
        height: without the legend.
        left: room for the numbers of the vertical axis.
        lines, marked: whether the legend shows lines, and markers.
    """
    head = 18.0 * -(-len(names) // 2) + 26
    total = height + head
    figure = Figure(figsize=(400 / 72, total / 72))
    box = (left / 400, 44 / total, (384 - left) / 400, (height - 50) / total)
    axes = figure.add_axes(box)
    if names:
        handles = [
            Line2D(
                [],
                [],
                color=look.colour,
                marker=look.marker if marked else None,
                linestyle=look.dash if lines else "none",
            )
            for look in marks
        ]
        legend(figure, handles, names, top=1 - 4 / total)
    return figure, axes


def name_axes(axes: Axes, x: str, y: str) -> None:
    """Say what the axes are; the vertical one above its end, where it is read without a twist."""
    axes.set_xlabel(x)
    axes.annotate(
        y, (6 / 400, 1), (0, 9), xycoords=("figure fraction", "axes fraction"),
        textcoords="offset points", color=SOFT, fontsize=11,
    )  # fmt: skip


def legend(figure: Figure, handles: Sequence[Any], names: Sequence[str], top: float) -> None:
    """A legend in two columns at the top left."""
    made = figure.legend(
        handles,
        # A name that starts with "_" would be left out.
        [f"{i}" for i in range(len(names))],
        loc="upper left",
        bbox_to_anchor=(6 / 400, top),
        ncols=2,
        borderpad=0,
        borderaxespad=0,
        handlelength=2.4,
        labelspacing=0.45,
        columnspacing=1.6,
    )
    for text, name in zip(made.get_texts(), names, strict=True):
        text.set_text(short(name))


@style()
def svg(figure: Figure) -> str:
    """The figure as SVG, the same text for the same figure, with real text in it."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(file, format="svg", metadata=nothing)
    return file.getvalue()


@style()
def png(figure: Figure) -> bytes:
    """The figure as PNG, at twice the size of the page."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=200, metadata={"Software": None})
    return file.getvalue()


def inline(figure: Figure, prefix: str, alt: str, link: str | None = None) -> str:
    """The figure as SVG for a page that has many: small, named, and in the page's colours.

    Args:
        figure: the figure.
        prefix: of its ids.
        alt: what it shows, for those who can't see it.
        link: as of `Drawing`; with it, the page is told where the axes are.
    """
    root = ElementTree.fromstring(svg(figure))
    for parent in root.iter():
        for child in list(parent):
            # matplotlib's style sheet would apply to the whole page.
            if child.tag.endswith(("metadata", "style")):
                parent.remove(child)
    _prune(root)
    text = " ".join(value for e in root.iter() for value in e.attrib.values())
    used = {name: f"{prefix}-{i}" for i, name in enumerate(sorted(set(_reference(text))))}
    for element in root.iter():
        _hoist(element)
        element.tag = element.tag.rpartition("}")[2]
        attributes = {k.rpartition("}")[2]: v for k, v in element.attrib.items()}
        element.attrib.clear()
        if (attributes.get("transform") or "").startswith("rotate(-0 "):
            del attributes["transform"]
        if attributes.get("id") in used:
            element.set("id", used[attributes["id"]])
        for name, value in attributes.items():
            if name != "id":
                element.set(name, _attribute(name, value, used))
    box = root.attrib["viewBox"]
    root.attrib.clear()
    root.attrib.update({"viewBox": box, "role": "img", "aria-label": alt})
    if link is not None:
        root.attrib.update({"data-link": link, "data-axes": json.dumps(_axes(figure))})
    return ElementTree.tostring(root, encoding="unicode", short_empty_elements=True)


def _reference(text: str) -> list[str]:
    return re.findall(r"#([\w-]+)\)", text) + re.findall(r"(?:^|\s)#(\w+)(?=\s|$)", text)


def _attribute(name: str, value: str, used: dict[str, str]) -> str:
    if name == "href":
        return f"#{used[value[1:]]}"
    if name == "clip-path":
        return f"url(#{used[value[5:-1]]})"
    if name == "style":
        value = re.sub(r"font: ([\d.]+px)[^;]*", r"font-size: \1", value)
        value = re.sub(r"font-family: [^;]*(; |$)", "", value)
        return re.sub(r"#[0-9a-f]{6}", lambda m: _variable(m[0]), value)
    if name in ("d", "transform", "x", "y", "width", "height"):
        value = re.sub(r" *\n?([a-zA-Z]) +", r"\1", value).strip() if name == "d" else value
        return re.sub(r"-?\d+\.\d+", lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), value)
    return value


def _variable(colour: str) -> str:
    return f"var({VARIABLES[colour]})" if colour in VARIABLES else colour


def _prune(element: ElementTree.Element) -> None:
    """Leave out white space, empty groups and what is drawn in no colour."""
    for child in list(element):
        _prune(child)
        bare = child.get("style") == "fill: none"
        if bare or (child.tag.endswith(("}g", "}defs")) and not len(child)):
            element.remove(child)
        child.tail = None
    if not (element.text or "").strip():
        element.text = None


def _hoist(element: ElementTree.Element) -> None:
    """Say a style that all children share once, which makes a cloud of dots a third as long."""
    styles = {child.get("style") for child in element}
    if (
        len(element) > 1
        and len(styles) == 1
        and None not in styles
        and element.get("style") is None
    ):
        element.set("style", element[0].attrib["style"])
        for child in element:
            del child.attrib["style"]


def _axes(figure: Figure) -> list[float]:
    """Where the corner of the least values of the axes is in the SVG, and that of the greatest."""
    axes = figure.axes[0]
    width, height = figure.get_size_inches() * 72
    box = axes.get_position()
    (x0, x1), (y0, y1) = axes.get_xlim(), axes.get_ylim()
    corners = [box.x0 * width, box.x1 * width, (1 - box.y0) * height, (1 - box.y1) * height]
    return [round(float(v), 4) for v in (*corners, x0, x1, y0, y1)]
