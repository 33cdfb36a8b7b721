"""The figures that compare methods, and all figures of a report as files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from abnn.report.data import Curve, Method, ReportData
from abnn.report.drawing import (
    SOFT,
    Drawing,
    Look,
    Table,
    looks,
    name_axes,
    panel,
    png,
    style,
    svg,
)
from abnn.report.inside import inside
from abnn.report.names import (
    COSTS,
    at,
    better_is_more,
    dataset,
    figure_name,
    headline,
    label,
    number,
    part,
    percent,
    rounded,
    unit,
)
from abnn.robustness import Robustness

SHARES = FuncFormatter(lambda v, _: f"{100 * v:.0f} %")
PLAIN = FuncFormatter(lambda v, _: f"{v / 1e6:.3g} M" if v >= 1e6 else f"{v:,.6g}")
# Areas of the dots of bins, of one with hardly any example and one with all of them.
_LEAST, _MOST = 2.0, 150.0
# Lines join the bins with at least so large a share of the examples; fewer tell of chance.
_FIRM = 0.01


def drawings(data: ReportData) -> list[Drawing]:
    """Every figure that there are numbers for: first those of all methods, then those of each."""
    return [
        *reliability(data),
        *risk_coverage(data),
        *detection(data),
        *robustness(data),
        *cost(data),
        *(drawing for i, _ in enumerate(data.methods) for drawing in inside(data, i)),
    ]


def write_figures(data: ReportData, folder: str | PathLike[str]) -> list[Path]:
    """Write every figure as SVG and as PNG, in light colours.

    Args:
        data: what to draw.
        folder: where to; it is made if need be, and files of the same names are overwritten.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for drawing in drawings(data):
        for kind, content in (
            ("svg", svg(drawing.figure).encode()),
            ("png", png(drawing.figure)),
        ):
            path = folder / f"{drawing.key}.{kind}"
            path.write_bytes(content)
            paths.append(path)
    return paths


@style()
def reliability(data: ReportData) -> list[Drawing]:
    """Accuracy against confidence, bin by bin."""
    methods = [m for m in data.methods if m.reliability]
    if not methods:
        return []
    figure, axes = _panel(data, methods)
    axes.plot([0, 1], [0, 1], color=SOFT, linewidth=1, linestyle=(0, (2, 3)))
    for method, look in _with_looks(data, methods):
        n = sum(count for *_, count in method.reliability)
        confidence, accuracy, counts = zip(*method.reliability, strict=True)
        area = [_LEAST + (_MOST - _LEAST) * math.sqrt(count / n) for count in counts]
        firm = [(c, a) for c, a, count in method.reliability if count >= _FIRM * n]
        x, y = zip(*firm, strict=True)
        _line(axes, x, y, look, linewidth=1.2, color=to_rgba(look.colour, 0.6))
        axes.scatter(
            confidence, accuracy, area, marker=look.marker, color=look.colour, linewidths=0
        )
    _shares(axes, "Confidence", "Share that is right")
    rows = [
        [label(m), percent(100 * c), percent(100 * a), f"{count:,}"]
        for m in methods
        for c, a, count in m.reliability
    ]
    return [
        Drawing(
            "reliability",
            "Does its confidence hold?",
            "On the dotted line, 80 % confidence means 80 % right; below it a method is too sure "
            "of itself, above it too modest. Larger dots stand for more predictions; lines leave "
            "out bins with less than 1 % of them.",
            _alt("Share of right predictions over confidence.", methods, _ece),
            figure,
            Table(["Method", "Mean confidence", "Right", "Predictions"], rows),
        )
    ]


@style()
def risk_coverage(data: ReportData) -> list[Drawing]:
    """Share of mistakes among the most confident predictions."""
    methods = [m for m in data.methods if m.risk_coverage.x]
    if not methods:
        return []
    figure, axes = _panel(data, methods, marked=False)
    for method, look in _with_looks(data, methods):
        _line(axes, method.risk_coverage.x, method.risk_coverage.y, look)
    _shares(axes, "Share of predictions kept, most confident first", "Mistakes among these")
    axes.set_ylim(0, 1.05 * max(max(m.risk_coverage.y) for m in methods) or 1)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.3g} %"))

    def content(method: Method) -> str:
        risks = [(c, at(method.risk_coverage, c)) for c in (0.5, 0.8, 1.0)]
        return ", ".join(
            f"{percent(100 * r)} mistakes with {percent(100 * c)} kept"
            for c, r in risks
            if r is not None
        )

    return [
        Drawing(
            "risk-coverage",
            "What is gained by leaving the least certain ones out?",
            "Going left, the least confident predictions are left to somebody else; the lower a "
            "line falls, the fewer mistakes are among the rest.",
            _alt("Share of mistakes over the share of predictions kept.", methods, content),
            figure,
            link="risk",
        )
    ]


@style()
def detection(data: ReportData) -> list[Drawing]:
    """ROC and precision-recall curves of each OOD dataset."""
    found = []
    for name in data.ood:
        for kind in ("roc", "pr"):
            methods = [m for m in data.methods if name in _curves(m, kind)]
            if not methods:
                continue
            figure, axes = _panel(data, methods, marked=False)
            for method, look in _with_looks(data, methods):
                curve = _curves(method, kind)[name]
                _line(axes, curve.x, curve.y, look)
            kinds = ("auroc", "fpr95") if kind == "roc" else ("aupr",)
            figures = [f"ood/{name}/msp/{k}" for k in kinds]
            if kind == "roc":
                axes.plot([0, 1], [0, 1], color=SOFT, linewidth=1, linestyle=(0, (2, 3)))
                _shares(axes, "Familiar inputs flagged by mistake", "Foreign inputs flagged")
                title = f"Does it notice {name}?"
                how = (
                    "Each point is a threshold of confidence: the nearer to the top left corner, "
                    "the more foreign inputs are noticed for few false alarms; the dotted line is "
                    "chance."
                )
            else:
                _shares(axes, "Foreign inputs flagged", "Flagged inputs that are foreign")
                title = f"If it flags an input, is it from {name}?"
                how = (
                    "The nearer to the top right corner, the fewer of the flagged inputs are false "
                    "alarms; this depends on how many foreign inputs there are."
                )
            found.append(
                Drawing(
                    _key(kind, name, data.ood),
                    title,
                    how,
                    _alt(title, methods, partial(_figures, names=figures)),
                    figure,
                    link=f"roc/{name}" if kind == "roc" else None,
                )
            )
    return found


@style()
def robustness(data: ReportData) -> list[Drawing]:
    """Accuracy and ECE over the severity of corruptions."""
    lines = {
        i: robustness_lines(m.robustness)
        for i, m in enumerate(data.methods)
        if m.robustness is not None
    }
    found = []
    for name, title in (
        ("accuracy", "How fast does it lose accuracy on worse inputs?"),
        ("ece", "Does its confidence still hold on worse inputs?"),
    ):
        shown = {i: line[name] for i, line in lines.items() if line.get(name)}
        if not shown:
            continue
        methods = [data.methods[i] for i in shown]
        figure, axes = _panel(data, methods)
        for (_, look), points in zip(_with_looks(data, methods), shown.values(), strict=True):
            severity, mean = zip(*points, strict=True)
            _line(axes, severity, mean, look, marker=look.marker)
        name_axes(
            axes,
            "Severity of the corruption (0: none)",
            figure_name(name) + (", %" if unit(name) else ""),
        )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        severities = sorted({s for points in shown.values() for s, _ in points})
        rows = [
            [label(method), *(_number_at(points, s, name) for s in severities)]
            for method, points in zip(methods, shown.values(), strict=True)
        ]
        content = {
            label(m): f"{number(name, p[0][1])} at severity {p[0][0]}, "
            f"{number(name, p[-1][1])} at severity {p[-1][0]}"
            for m, p in zip(methods, shown.values(), strict=True)
        }
        found.append(
            Drawing(
                f"robustness-{name}",
                title,
                "A mean over all kinds of corruption; a method that keeps "
                + ("more of its accuracy" if name == "accuracy" else "a low error of confidence")
                + " to the right can be trusted longer.",
                _alt(f"{figure_name(name)} by severity.", methods, partial(_told, content)),
                figure,
                Table(["Method", *(f"Severity {s}" for s in severities)], rows),
            )
        )
    return found


def robustness_lines(robustness: Robustness) -> dict[str, list[tuple[int, float]]]:
    """For each figure its mean over the corruptions at each severity; 0 is the clean data."""
    rows = {0: robustness.clean, **robustness.by_severity()}
    return {
        name: [(severity, getattr(row, name)) for severity, row in sorted(rows.items())]
        for name in ("accuracy", "nll", "ece")
    }


@style()
def cost(data: ReportData) -> list[Drawing]:
    """Every figure of quality over every kind of cost; the first is the one to start with."""
    found = []
    prices_of = {kind: price(data, kind) for kind in COSTS}
    # Passes tell the same as time and bytes the same as parameters.
    for kind, other in (("passes", "milliseconds"), ("bytes", "parameters")):
        if len(prices_of[other]) >= len(prices_of[kind]):
            del prices_of[kind]
    for kind, prices in prices_of.items():
        what, axis = COSTS[kind]
        if len(set(prices.values())) < 2:
            continue
        for name in _qualities(data):
            shown = [i for i in prices if name in data.methods[i].figures]
            methods = [data.methods[i] for i in shown]
            if len(methods) < 2:
                continue
            figure, axes = _panel(data, methods, lines=False)
            for i, (method, look) in zip(shown, _with_looks(data, methods), strict=True):
                value = method.figures[name]
                low, high = method.intervals.get(name, (value, value))
                axes.plot([prices[i]] * 2, [low, high], color=look.colour, linewidth=1.2)
                axes.plot(prices[i], value, color=look.colour, marker=look.marker, markersize=8.5)
            _scale(axes, [prices[i] for i in shown])
            name_axes(axes, axis, figure_name(name) + (", %" if unit(name) else ""))
            way = "higher" if better_is_more(name) else "lower"
            content = {
                label(data.methods[i]): f"{number(name, data.methods[i].figures[name])} "
                f"for {rounded(prices[i])}"
                for i in shown
            }
            found.append(
                Drawing(
                    f"cost-{kind}-{_key(part(name), (dataset(name) or [None])[0], data.ood)}",
                    f"{figure_name(name)} and {what}",
                    f"Further left costs less and {way} is better; a bar is the confidence "
                    "interval of a figure on this data.",
                    _alt(
                        f"{figure_name(name)} over: {axis}.",
                        methods,
                        partial(_told, content),
                    ),
                    figure,
                    link=f"cost/{kind}/{name}",
                )
            )
    return found


def price(data: ReportData, kind: str) -> dict[int, float]:
    """What each method costs, where it is known; times as multiples of the reference's."""
    values = {
        i: float(value)
        for i, m in enumerate(data.methods)
        if (value := getattr(m.cost, kind)) is not None
    }
    if kind == "milliseconds":
        base = next((values.get(i) for i, m in enumerate(data.methods) if m.reference), None)
        return {i: value / base for i, value in values.items()} if base else {}
    return values


def _qualities(data: ReportData) -> list[str]:
    """Detection first: it is what such methods are for."""
    names = headline(list(dict.fromkeys(name for m in data.methods for name in m.figures)))
    return sorted(names, key=lambda name: not name.startswith("ood/"))


def _scale(axes: Axes, values: Sequence[float]) -> None:
    positive = [v for v in values if v > 0]
    if positive and max(positive) > 20 * min(positive):
        if len(positive) < len(values):
            axes.set_xscale("symlog", linthresh=min(positive), linscale=0.5)
            axes.set_xlim(-0.35 * min(positive), 3 * max(positive))
        else:
            axes.set_xscale("log")
            axes.set_xlim(min(positive) / 2, 2 * max(positive))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(0, 1.12 * max([*values, 1e-9]))
    axes.xaxis.set_major_formatter(PLAIN)


def _panel(data: ReportData, methods: Iterable[Method], **shown: bool) -> tuple[Figure, Axes]:
    pairs = _with_looks(data, methods)
    return panel([label(m) for m, _ in pairs], [look for _, look in pairs], **shown)


def _with_looks(data: ReportData, methods: Iterable[Method]) -> list[tuple[Method, Look]]:
    by_id = {id(m): look for m, look in zip(data.methods, looks(data.methods), strict=True)}
    return [(m, by_id[id(m)]) for m in methods]


def _line(axes: Axes, x: Sequence[float], y: Sequence[float], look: Look, **more: Any) -> None:
    axes.plot(x, y, **{"color": look.colour, "linestyle": look.dash, **more})


def _shares(axes: Axes, x: str, y: str) -> None:
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    name_axes(axes, x, y)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5))
        axis.set_major_formatter(SHARES)


def _alt(what: str, methods: Iterable[Method], content: Callable[[Method], str]) -> str:
    parts = [f"{label(m)}: {text}" for m in methods if (text := content(m))]
    return f"{what} " + ("; ".join(parts) + "." if parts else "")


def _ece(method: Method) -> str:
    return _figures(method, ["ece"])


def _figures(method: Method, names: Iterable[str]) -> str:
    return ", ".join(
        f"{figure_name(name)} {number(name, method.figures[name])}"
        for name in names
        if name in method.figures
    )


def _told(content: Mapping[str, str], method: Method) -> str:
    return content[label(method)]


def _number_at(points: Sequence[tuple[int, float]], severity: int, name: str) -> str:
    return next((number(name, value) for s, value in points if s == severity), "–")


def _curves(method: Method, kind: str) -> dict[str, Curve]:
    return method.roc if kind == "roc" else method.pr


def _key(kind: str, name: str | None, names: Iterable[str]) -> str:
    """A name for files; what is left of two datasets' names may be the same."""
    if name is None:
        return kind
    slugs = [re.sub(r"[^a-z0-9]+", "-", n.lower()).strip("-")[:40] for n in names]
    i = list(names).index(name)
    return f"{kind}-{slugs[i]}" if slugs[i] and slugs.count(slugs[i]) == 1 else f"{kind}-{i + 1}"
