"""The report as one HTML page that needs nothing but itself."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from abnn.report import names, words
from abnn.report.data import Example, Method, ReportData, Spread, Thresholds
from abnn.report.drawing import Drawing, inline
from abnn.report.figures import drawings

HERE = Path(__file__).parent
# Enlarged pixels of an image up to this width are shown as squares instead of being blurred.
_TINY = 96
# What would end the script element, or a line of it, as text that means the same in JSON.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


@dataclass(frozen=True)
class Cell:
    """One number of a table: what is printed, and what is said about it."""

    text: str
    small: str = ""
    best: bool = False
    second: bool = False
    symbol: str = ""
    verdict: str = ""
    title: str = ""
    room: bool = False


def render(data: ReportData) -> str:
    """The page as text."""
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": names.percent,
        "count": names.count,
        "plain": names.plain,
        "ticks": ticks,
    }
    found = drawings(data)
    return environment.get_template("template.html.j2").render(
        data=data,
        css=Markup((HERE / "page.css").read_text(encoding="utf-8")),
        js=Markup((HERE / "page.js").read_text(encoding="utf-8")),
        json=embedded(data),
        labels=[names.label(m) for m in data.methods],
        summary=words.summary(data),
        judgements=[
            (i, names.label(m), words.judge(m, data), words.sentences(m, data))
            for i, m in enumerate(data.methods)
            if not m.reference
        ],
        rule=words.RULE,
        symbols=words.SYMBOLS,
        columns=columns(data),
        table=[cells(m, data) for m in data.methods],
        seeds=seed_table(data),
        shown=[(d, Markup(inline(d.figure, d.key, d.alt, d.link))) for d in found],
        costs=cost_choices(found),
        missing=words.missing(data),
        prices=[(names.label(m), words.costs(m, data)) for m in data.methods],
        first=first_choice(data),
        tiny=tiny,
    )


def embedded(data: ReportData) -> Markup:
    """What the script needs, as JSON that can't leave its script element."""
    content = {
        "methods": [
            {
                "label": names.label(m),
                "scores": {k: _columns(t) for k, t in m.thresholds.items() if _finite(t)},
            }
            for m in data.methods
        ],
        "scores": names.SCORES,
        "ood": list(data.ood),
        "first": first_choice(data),
    }
    return Markup(json.dumps(content, allow_nan=False).translate(_ESCAPES))


def _columns(t: Thresholds) -> dict[str, Any]:
    """Right, wrong and OOD examples in one shape; the script treats all rows alike."""
    return {
        # As many digits as a single-precision number has.
        "values": [float(f"{v:.9g}") for v in t.values],
        "edges": t.edges,
        "kept": {"right": t.right, "wrong": t.wrong},
        "bins": {"right": t.right_bins, "wrong": t.wrong_bins},
        "ood": {name: {"kept": kept, "bins": t.ood_bins[name]} for name, kept in t.ood.items()},
    }


def _finite(t: Thresholds) -> bool:
    return bool(t.values) and all(map(math.isfinite, (*t.values, *t.edges)))


def first_choice(data: ReportData) -> int:
    """The method to start with: the first that was fitted, else the first beside the reference."""
    others = [i for i, m in enumerate(data.methods) if not m.reference]
    fitted = [i for i in others if data.methods[i].fit or data.methods[i].samples_curve]
    return next(iter([*fitted, *others, 0]))


def columns(data: ReportData) -> list[tuple[str, list[tuple[str, str]]]]:
    """Groups of columns of the table: a head, and for each column its figure and its name."""
    given = {name for m in data.methods for name in m.figures}
    quality = [n for n in ("accuracy", "nll", "ece", "aurc") if n in given]
    groups = [("Quality", [(str(n), names.figure_name(n)) for n in quality])]
    for name in data.ood:
        found = [
            (figure, head)
            for kind, head in (("auroc", "AUROC"), ("fpr95", "FPR95"))
            if (figure := f"ood/{name}/msp/{kind}") in given
        ]
        groups.append((name, found))
    sets = [n for n in ("sets/coverage", "sets/size") if n in given]
    groups.append(("Prediction sets", [(n, names.figure_name(n)) for n in sets]))
    prices = [
        (kind, head)
        for kind, head in (
            ("parameters", "Parameters"),
            ("bytes", "Storage"),
            ("milliseconds", "Prediction"),
            ("passes", "Passes"),
            ("fit_seconds", "Fitting"),
        )
        if any(getattr(m.cost, kind) is not None for m in data.methods)
    ]
    groups.append(("Cost", prices))
    return [(head, found) for head, found in groups if found]


def cells(method: Method, data: ReportData) -> list[Cell]:
    """The row of a method."""
    return [
        _price(method, name) if head == "Cost" and "/" not in name else _figure(method, name, data)
        for head, group in columns(data)
        for name, _ in group
    ]


def _figure(method: Method, name: str, data: ReportData) -> Cell:
    if name not in method.figures:
        return Cell("–", room=True)
    value = method.figures[name]
    # "92.3 %" in a column of percents: the sign stands in the head.
    text = names.number(name, value).removesuffix(names.PERCENT)
    low, high = method.intervals.get(name, (math.nan, math.nan))
    small = "" if math.isnan(low) else f"{_bare(name, low)}–{_bare(name, high)}"
    values = [m.figures[name] for m in data.methods if name in m.figures]
    # Sets of another coverage are other sets, not better or worse ones.
    rivals = len(values) > 1 and not name.startswith("sets/")
    best = rivals and value == (max if names.better_is_more(name) else min)(values)
    verdict = method.verdicts.get(name)
    base = words.reference(data)
    if verdict is None or base is None:
        return Cell(text, small, best, room=True)
    return Cell(
        text,
        small,
        best,
        False,
        words.SYMBOLS.get(verdict.verdict, ""),
        verdict.verdict,
        f"{verdict.verdict} ({names.label(base)} as reference): difference "
        f"{_bare(name, verdict.difference)}, interval {_bare(name, verdict.low)} to "
        f"{_bare(name, verdict.high)}, p = {verdict.p:.2g}",
    )


def _bare(name: str, value: float) -> str:
    return names.number(name, value).removesuffix(names.PERCENT)


def _price(method: Method, kind: str) -> Cell:
    value = getattr(method.cost, kind)
    if value is None:
        return Cell("–")
    if kind == "parameters":
        return Cell(f"+{names.count(value)}" if value else "0")
    if kind == "bytes":
        return Cell(names.size(value) if value else "0")
    if kind == "passes":
        return Cell(f"{value:.3g}")
    seconds = value / 1000 if kind == "milliseconds" else value
    return Cell(names.duration(seconds) if seconds else "–")


def seed_table(data: ReportData) -> dict[str, Any] | None:
    """Mean ± standard deviation over runs, where there are several."""
    if not data.seeds:
        return None
    given = [name for row in data.seeds.values() for name in row]
    kept = names.headline(dict.fromkeys(given), detection=("aupr", "auroc", "fpr95"))
    columns = [
        _seed_column(name, [found.get(name) for found in data.seeds.values()]) for name in kept
    ]
    rows = [
        (who, max((s.n for s in found.values()), default=0), list(row))
        for (who, found), row in zip(data.seeds.items(), zip(*columns, strict=True), strict=True)
    ]
    heads = [names.figure_name(n) + (", %" if names.unit(n) else "") for n in kept]
    return {"heads": heads, "rows": rows}


def _seed_column(name: str, spreads: Sequence[Spread | None]) -> list[Cell]:
    """A figure of all methods; what is printed alike is marked alike."""
    found = [s for s in spreads if s is not None and not math.isnan(s.mean)]
    found.sort(key=lambda s: s.mean, reverse=names.better_is_more(name))
    ranked = list(dict.fromkeys(_bare(name, s.mean) for s in found))
    best, second = ranked[:2] if len(ranked) > 1 else ("", "")
    cells = []
    for spread in spreads:
        if spread is None:
            cells.append(Cell("–"))
            continue
        verdict, mean = spread.verdict or "", _bare(name, spread.mean)
        text = f"{mean} ± {_bare(name, spread.sd)}"
        symbol = words.SYMBOLS.get(verdict, "")
        cells.append(
            Cell(text, "", mean == best, mean == second, symbol, verdict, verdict, room=True)
        )
    return cells


def cost_choices(found: Sequence[Drawing]) -> dict[str, dict[str, str]]:
    """The kinds of cost and of quality that are drawn against each other, and their names."""
    links = [d.link.split("/", 2)[1:] for d in found if d.link and d.link.startswith("cost/")]
    return {
        "cost": {kind: names.COSTS[kind][0] for kind, _ in links},
        "quality": {name: names.figure_name(name) for _, name in links},
    }


def tiny(example: Example) -> bool:
    """Whether an image is so small that its pixels should be seen."""
    head = (example.image or "").partition("base64,")[2][:32]
    try:
        width = int.from_bytes(base64.b64decode(head)[16:20])
    except ValueError:
        return False
    return 0 < width <= _TINY


def ticks(example: Example, k: int) -> Iterator[str]:
    """For every mode the path of its draws' marks on the bar of a class, in a lane of its own."""
    height = 12 / max(1, len(example.members))
    for j, draws in enumerate(example.members):
        y = j * height
        yield "".join(f"M{100 * draw[k]:.1f} {y:.3g}v{height:.3g}" for draw in draws)
