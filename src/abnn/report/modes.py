"""The figures about the modes of one method: how they were fitted, and how different they are."""

from __future__ import annotations

from statistics import fmean

from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from abnn.report.data import ReportData
from abnn.report.drawing import (
    INK,
    PALETTE,
    SOFT,
    Drawing,
    Look,
    Table,
    name_axes,
    panel,
    style,
)
from abnn.report.names import figure_name, label, number, percent
from abnn.trajectory import Trajectory


def looks_of_modes(n: int) -> list[Look]:
    """A look for every mode: a colour, and another marker and dash when the colours are used up."""
    markers, dashes = "osD^vPX", ("-", (0, (5, 1.5)), (0, (1.5, 1.2)))
    return [
        Look(PALETTE[j % 6], markers[j % len(markers)], dashes[j // 6 % len(dashes)])
        for j in range(n)
    ]


@style()
def losses(data: ReportData, i: int) -> Drawing | None:
    """The loss of every mode over the steps of its fit."""
    method = data.methods[i]
    if method.fit is None:
        return None
    found = method.fit
    marks = looks_of_modes(len(found.losses))
    figure, axes = panel([f"Mode {j}" for j in range(len(marks))], marks)
    for j, (line, look) in enumerate(zip(found.losses, marks, strict=True)):
        points = [(s, v) for s, v in zip(found.steps, line, strict=True) if v is not None]
        if points:
            steps, values = zip(*points, strict=True)
            axes.plot(
                steps, values, color=look.colour, linestyle=look.dash, marker=look.marker,
                markevery=(j * len(points) // (6 * len(marks)), max(1, len(points) // 6)),
                linewidth=1.5,
            )  # fmt: skip
    name_axes(axes, "Step of the fit", "Training loss")
    names = list(dict.fromkeys(n for row in found.validation.values() for n in row))
    table = Table(
        ["On held-out data", *map(figure_name, names)],
        [
            [who, *(number(n, row[n]) if n in row else "–" for n in names)]
            for who, row in found.validation.items()
        ],
    )
    ends = [
        f"mode {j} from {trained[0]:.3g} to {trained[-1]:.3g}"
        for j, line in enumerate(found.losses)
        if (trained := [v for v in line if v is not None])
    ]
    return Drawing(
        f"fit-{i + 1}",
        f"The fit of {label(method)}",
        "Each line is a mode, which learns under a random prior of its own; lines that have become "
        "flat have learned what they can.",
        f"Training loss of {len(found.losses)} modes. " + "; ".join(ends) + ".",
        figure,
        table if found.validation else None,
        method=i,
    )


@style()
def modes(data: ReportData, i: int) -> Drawing | None:
    """The ways of the modes from their common start, as the t-SNE of what they answer."""
    way = data.methods[i].trajectory
    if way is None or not way.points:
        return None
    return _ways(
        data, i, way, way.points, "tsne", "t-SNE",
        f"Where the modes of {label(data.methods[i])} went",
        "Every mode starts as the original network and leaves it for answers of its own; marks "
        "close together stand for similar answers, and longer distances mean nothing.",
    )  # fmt: skip


@style()
def components(data: ReportData, i: int) -> Drawing | None:
    """The same ways, as principal components."""
    way = data.methods[i].trajectory
    if way is None or not way.pca:
        return None
    return _ways(
        data, i, way, way.pca, "pca", "Two principal components",
        f"How far the modes of {label(data.methods[i])} went",
        "The further apart two marks are, the more the logits of two modes differ, as far as two "
        "dimensions can show it.",
    )  # fmt: skip


def _ways(
    data: ReportData,
    i: int,
    way: Trajectory,
    places: list[list[list[float]]],
    key: str,
    kind: str,
    title: str,
    how: str,
) -> Drawing:
    marks = looks_of_modes(way.modes)
    figure, axes = panel([f"Mode {j}" for j in range(way.modes)], marks, left=16)
    last = max(1, len(way.steps) - 1)
    for j, look in enumerate(marks):
        x, y = zip(*(points[j] for points in places), strict=True)
        axes.plot(x, y, color=look.colour, linewidth=1.2, linestyle=look.dash)
        shades = [to_rgba(look.colour, 0.25 + 0.75 * t / last) for t in range(len(x))]
        axes.scatter(x, y, 30, color=shades, marker=look.marker, linewidths=0, zorder=3)
        axes.annotate(
            f"{way.steps[-1]:,}", (x[-1], y[-1]), (6, 5), textcoords="offset points",
            color=SOFT, fontsize=10,
        )  # fmt: skip
    x0, y0 = (fmean(p[k] for p in places[0]) for k in (0, 1))
    axes.annotate("start", (x0, y0), (7, 7), textcoords="offset points", color=INK, fontsize=10.5)
    axes.margins(0.14)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_xlabel(f"{kind} of the logits; numbers count steps")
    return Drawing(
        f"modes-{key}-{i + 1}",
        title,
        how,
        f"Logits of {way.modes} modes at {len(way.steps)} steps, from {way.steps[0]} to "
        f"{way.steps[-1]}, in two dimensions. {_apart(way)}",
        figure,
        method=i,
    )


def _apart(way: Trajectory) -> str:
    return (
        f"The mean distance of two modes goes from {way.distance[0]:.3g} to "
        f"{way.distance[-1]:.3g}, the share of inputs that they label differently from "
        f"{percent(100 * way.disagreement[0])} to {percent(100 * way.disagreement[-1])}."
    )


@style()
def drift(data: ReportData, i: int) -> Drawing | None:
    """Distance and disagreement of the modes over the steps of the fit."""
    method = data.methods[i]
    way = method.trajectory
    if way is None or len(way.steps) < 2:
        return None
    figure = Figure(figsize=(400 / 72, 300 / 72))
    for j, (values, title) in enumerate(
        (
            (way.distance, "Mean distance of two modes"),
            (way.disagreement, "Inputs they disagree on"),
        )
    ):
        axes = figure.add_axes((46 / 400, (188 - 144 * j) / 300, 338 / 400, 84 / 300))
        axes.plot(way.steps, values, color=PALETTE[0], marker="o", markersize=4.5)
        axes.set_ylim(0, None)
        axes.yaxis.set_major_locator(MaxNLocator(3))
        axes.set_title(title, fontsize=11, loc="left", color=INK)
        if j:
            axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{100 * v:.3g} %"))
            axes.set_xlabel("Step of the fit")
        else:
            axes.tick_params(labelbottom=False)
    return Drawing(
        f"drift-{i + 1}",
        f"How the modes of {label(method)} grew apart",
        "Both rise from 0 as the modes become different networks; where they are flat, a longer "
        "fit would add no diversity.",
        _apart(way),
        figure,
        Table(
            ["Step", "Mean distance", "Disagreement", "Differs from the start"],
            [
                [f"{s:,}", f"{d:.3g}", percent(100 * q), percent(100 * start)]
                for s, d, q, start in zip(
                    way.steps, way.distance, way.disagreement, way.from_start, strict=True
                )
            ],
        ),
        method=i,
    )


@style()
def disagreement(data: ReportData, i: int) -> Drawing | None:
    """On how many inputs two members differ, as a matrix."""
    method = data.methods[i]
    matrix = method.disagreement
    n = len(matrix)
    if n < 2:
        return None
    side = min(300.0, 56.0 * n)
    left = (400 - side) / 2
    figure = Figure(figsize=(400 / 72, (side + 34) / 72))
    axes = figure.add_axes((left / 400, 8 / (side + 34), side / 400, side / (side + 34)))
    most = max(max(row) for row in matrix) or 1.0
    gap = 0.03
    for a, row in enumerate(matrix):
        for b, value in enumerate(row):
            if value:
                shade = to_rgba(PALETTE[0], 0.06 + 0.5 * value / most)
                axes.fill(
                    [b + gap, b + 1 - gap, b + 1 - gap, b + gap],
                    [a + gap, a + gap, a + 1 - gap, a + 1 - gap],
                    color=shade, linewidth=0,
                )  # fmt: skip
            if n <= 12:
                axes.text(
                    b + 0.5, a + 0.5, f"{100 * value:.1f}" if value or a != b else "–",
                    ha="center", va="center", fontsize=min(11.0, 90.0 / n), color=INK,
                )  # fmt: skip
    axes.set_xlim(0, n)
    axes.set_ylim(n, 0)
    axes.grid(False)
    axes.spines["bottom"].set_visible(False)
    axes.xaxis.tick_top()
    ticks = range(0, n, -(-n // 16))
    axes.set_xticks([t + 0.5 for t in ticks], [str(t) for t in ticks])
    axes.set_yticks([t + 0.5 for t in ticks], [str(t) for t in ticks])
    others = [value for a, row in enumerate(matrix) for b, value in enumerate(row) if a != b]
    own = any(matrix[a][a] for a in range(n))
    within = " (on the diagonal: two draws of one mode)" if own else ""
    return Drawing(
        f"disagreement-{i + 1}",
        f"How often the members of {label(method)} disagree",
        "Each cell is the share of inputs, in percent, for which two members name different "
        f"classes{within}; the darker, the more they differ.",
        f"Disagreement of {n} members: from {percent(100 * min(others))} to "
        f"{percent(100 * max(others))} of the inputs, {percent(100 * fmean(others))} on average.",
        figure,
        Table(
            ["Member", *map(str, range(n))],
            [[str(a), *(percent(100 * v) for v in row)] for a, row in enumerate(matrix)],
        ),
        method=i,
    )
