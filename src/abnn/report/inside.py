"""The figures about one method alone."""

from __future__ import annotations

import math
from statistics import median

from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from abnn.report.data import Dots, ReportData, Thresholds
from abnn.report.drawing import (
    FOREIGN,
    INK,
    PALETTE,
    RIGHT,
    SOFT,
    WRONG,
    Drawing,
    Look,
    Table,
    name_axes,
    panel,
    short,
    style,
)
from abnn.report.modes import components, disagreement, drift, losses, modes
from abnn.report.names import SCORES, count, label, percent, plain

_HEADS = {
    "nll": "NLL",
    "accuracy": "Accuracy, %",
    "ece": "ECE, %",
    "epistemic": "Epistemic uncertainty",
    "difference": "Change of a probability",
}


def inside(data: ReportData, i: int) -> list[Drawing]:
    """All figures about the method with this number."""
    makers = (histograms, scatter, samples, losses, modes, components, drift, disagreement)
    return [drawing for make in makers if (drawing := make(data, i)) is not None]


def look_of_kind(kind: str, data: ReportData) -> Look:
    """The look of right and wrong predictions, and of each OOD dataset."""
    if kind == "right":
        return Look(RIGHT, "o", "-")
    if kind == "wrong":
        return Look(WRONG, "X", "-")
    i = list(data.ood).index(kind) if kind in data.ood else 0
    return Look(FOREIGN[i % len(FOREIGN)], "s^Dv"[i % 4], "-")


def kind_name(kind: str) -> str:
    """What people call a kind of example."""
    return {"right": "Right predictions", "wrong": "Wrong predictions"}.get(kind, kind)


@style()
def histograms(data: ReportData, i: int) -> Drawing | None:
    """How right, wrong and foreign inputs score, one row each."""
    method = data.methods[i]
    if not method.thresholds:
        return None
    score = "msp" if "msp" in method.thresholds else next(iter(method.thresholds))
    found = method.thresholds[score]
    rows = [
        ("right", found.right_bins),
        ("wrong", found.wrong_bins),
        *((name, bins) for name, bins in found.ood_bins.items()),
    ]
    height = 66.0 * len(rows) + 46
    figure = Figure(figsize=(400 / 72, height / 72))
    edges = found.edges
    for j, (kind, bins) in enumerate(rows):
        axes = figure.add_axes((16 / 400, (height - 66 * (j + 1)) / height, 368 / 400, 42 / height))
        tall = [math.sqrt(b / max(*bins, 1)) for b in bins]
        axes.stairs(tall, edges, fill=True, color=look_of_kind(kind, data).colour)
        axes.set_xlim(edges[0], edges[-1])
        axes.set_ylim(0, 1)
        axes.set_yticks([])
        axes.grid(False)
        axes.annotate(
            f"{short(kind_name(kind), 40)} ({count(sum(bins))})", (0, 1), (0, 5),
            xycoords="axes fraction", textcoords="offset points", fontsize=11,
        )  # fmt: skip
        if j < len(rows) - 1:
            axes.tick_params(labelbottom=False)
        else:
            axes.set_xlabel(f"Uncertainty ({SCORES.get(score, score)})")
    parts = [
        f"{kind_name(k)}: median about {_median(found, bins)}" for k, bins in rows if sum(bins)
    ]
    return Drawing(
        f"histograms-{i + 1}",
        f"How uncertain {label(method)} is",
        "The further apart the rows lie, the better a threshold can tell them; heights are square "
        "roots of numbers, so that few stay visible beside many.",
        f"Histograms of the score {score}. " + "; ".join(parts) + ".",
        figure,
        method=i,
    )


def _median(found: Thresholds, bins: list[int]) -> str:
    total, seen = sum(bins), 0
    for value, low, high in zip(bins, found.edges[:-1], found.edges[1:], strict=True):
        seen += value
        if 2 * seen >= total:
            return plain((low + high) / 2, 2)
    return "–"


@style()
def scatter(data: ReportData, i: int) -> Drawing | None:
    """Confidence against epistemic uncertainty, by what the examples are."""
    method = data.methods[i]
    dots = [d for d in method.dots if d.confidence]
    # A single network contradicts nobody; what is left is rounding.
    if not any(max(d.epistemic) > 1e-5 for d in dots):
        return None
    pairs = [(d, look_of_kind(d.kind, data)) for d in dots]
    figure, axes = panel(
        [kind_name(d.kind) for d in dots], [look for _, look in pairs], lines=False
    )
    for d, look in pairs:
        shade = to_rgba(look.colour, 0.55)
        axes.scatter(d.confidence, d.epistemic, 16, marker=look.marker, color=shade, linewidths=0)
    axes.set_xlim(None, 1.01)
    axes.set_ylim(0, None)
    name_axes(axes, "Confidence", "Epistemic uncertainty, nats")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.0f} %"))
    return Drawing(
        f"scatter-{i + 1}",
        f"What {label(method)} is sure of, and what its members disagree about",
        "Each mark is an input; low and to the right the network is sure and its members agree, "
        "high up they contradict each other, as they should on mistakes and foreign inputs.",
        "Confidence and epistemic uncertainty. " + "; ".join(map(_middle, dots)) + ".",
        figure,
        method=i,
    )


def _middle(d: Dots) -> str:
    return (
        f"{kind_name(d.kind)}: median confidence {percent(100 * median(d.confidence))}, "
        f"median epistemic uncertainty {plain(median(d.epistemic), 3)}"
    )


@style()
def samples(data: ReportData, i: int) -> Drawing | None:
    """Figures over the number of draws."""
    method = data.methods[i]
    curve = method.samples_curve
    if curve is None:
        return None
    names = [n for n in ("nll", "ece", "epistemic", "difference") if n in curve.figures]
    rows = -(-len(names) // 2)
    figure = Figure(figsize=(400 / 72, 170 * rows / 72))
    total = 170.0 * rows
    for j, name in enumerate(names):
        axes = figure.add_axes(
            ((44 + 200 * (j % 2)) / 400, 1 - (170 * (j // 2) + 132) / total, 146 / 400, 104 / total)
        )
        axes.errorbar(
            curve.samples, curve.figures[name], curve.spread[name],
            color=PALETTE[0], marker="o", markersize=4, elinewidth=1,
        )  # fmt: skip
        if curve.recommended is not None:
            axes.axvline(curve.recommended, color=SOFT, linewidth=1, linestyle=(0, (2, 3)))
        axes.set_xscale("log", base=2)
        axes.set_xticks(curve.samples, [str(L) for L in curve.samples])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.4g}"))
        axes.set_title(_HEADS[name], fontsize=11, loc="left", color=INK)
        if j >= len(names) - 2:
            axes.set_xlabel("Draws of every mode")
    digits = {"accuracy": 2, "ece": 2, "nll": 4}
    shown = [n for n in _HEADS if n in curve.figures]
    return Drawing(
        f"samples-{i + 1}",
        f"How many draws {label(method)} needs",
        f"Where a line is flat, more draws only cost time. {curve.advice}",
        f"Figures over the draws of every mode, from {curve.samples[0]} to {curve.samples[-1]}. "
        + "; ".join(
            f"{_HEADS[n]} from {curve.figures[n][0]:.3g} to {curve.figures[n][-1]:.3g}"
            for n in names
        )
        + ".",
        figure,
        Table(
            ["Draws of every mode", *(_HEADS[n] for n in shown)],
            [
                [
                    str(L),
                    *(
                        f"{curve.figures[n][k]:.{digits.get(n, 5)}f}"
                        f" ± {curve.spread[n][k]:.{digits.get(n, 5)}f}"
                        for n in shown
                    ),
                ]
                for k, L in enumerate(curve.samples)
            ],
        ),
        method=i,
    )
