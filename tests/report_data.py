"""Report data as `gather` would make it, from simulated networks: nothing here is measured."""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

from abnn.curve import SamplesCurve
from abnn.evaluation import Cost
from abnn.report.data import (
    Curve,
    Dots,
    Example,
    Fit,
    Gallery,
    Method,
    ReportData,
    Spread,
    Thresholds,
)
from abnn.robustness import Figures, Robustness
from abnn.statistics import Comparison, Examples, bootstrap, compare, figures_of
from abnn.trajectory import Trajectory

CLASSES = ["plane", "car", "bird", "cat", "deer", "dog", "ship", "truck"]
K, N, FOREIGN = len(CLASSES), 900, 400
Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Simulated:
    """What a method says: probabilities `[members, examples, classes]` of every dataset."""

    name: str
    modes: int
    known: Array
    foreign: dict[str, Array]
    cost: Cost
    more: dict[str, Any] = field(default_factory=dict)


def png(pixels: Array) -> str:
    """An RGB image in 0..1 as a data URI."""
    height, width, _ = pixels.shape
    rows = (np.clip(pixels, 0, 1) * 255).astype(np.uint8)
    raw = b"".join(b"\0" + row.tobytes() for row in rows)

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + crc

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    data = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(data).decode()


def picture(kind: int, seed: int, size: int = 16) -> str:
    """Blobs on a ground, in colours and places that depend on the kind."""
    rng = np.random.default_rng([kind, seed])
    y, x = np.mgrid[0:size, 0:size] / size
    style = np.random.default_rng(kind)
    image = np.ones((size, size, 3)) * style.uniform(0.3, 0.8, 3)
    for _ in range(4):
        cx, cy, r = style.uniform(0.2, 0.8), style.uniform(0.2, 0.8), style.uniform(0.1, 0.3)
        cx, cy = cx + rng.normal(0, 0.06), cy + rng.normal(0, 0.06)
        weight = np.exp(-((x - cx) ** 2 + (y - cy) ** 2) / r**2)[..., None]
        image = image * (1 - weight) + style.uniform(0, 1, 3) * weight
    return png(image + rng.normal(0, 0.05, image.shape))


def softmax(logits: Array) -> Array:
    e = np.exp(logits - logits.max(-1, keepdims=True))
    result: Array = e / e.sum(-1, keepdims=True)
    return result


def entropy(p: Array) -> Array:
    result: Array = -(p * np.log(p + 1e-12)).sum(-1)
    return result


def scores_of(members: Array) -> dict[str, Array]:
    mean = members.mean(0)
    scores = {"msp": 1 - mean.max(-1), "entropy": entropy(mean)}
    if len(members) > 1:
        scores["epistemic"] = np.maximum(entropy(mean) - entropy(members).mean(0), 0)
    return scores


def labels_and_logits() -> tuple[Any, Array, dict[str, Array]]:
    rng = np.random.default_rng(0)
    y = rng.integers(K, size=N)
    logits = rng.normal(0, 1, (N, K))
    logits[np.arange(N), y] += rng.gamma(4, 1.5, N)
    logits[np.arange(N), (y + rng.integers(1, K, N)) % K] += rng.gamma(2, 1.2, N)
    foreign = {}
    for name, strength in (("svhn", 2.4), ("textures", 3.2)):
        z = rng.normal(0, 1, (FOREIGN, K))
        z[np.arange(FOREIGN), rng.integers(K, size=FOREIGN)] += rng.gamma(2, strength / 2, FOREIGN)
        foreign[name] = z
    return y, logits, foreign


def simulate() -> tuple[Any, list[Simulated]]:
    y, logits, foreign = labels_and_logits()
    rng = np.random.default_rng(1)

    def members(z: Array, S: int, noise: float, scale: float) -> Array:
        return softmax(scale * (z + rng.normal(0, noise, (S, *z.shape))))

    def method(
        name: str, modes: int, S: int, noise: float, scale: float, cost: Cost, off: float
    ) -> Simulated:
        return Simulated(
            name,
            modes,
            members(logits, S, noise, scale),
            {k: members(z, S, off, scale) for k, z in foreign.items()},
            cost,
        )

    return y, [
        method("Network alone", 1, 1, 0.0, 2.1, Cost(0, 0, 0.0, 1.4, 1.0), 0.0),
        method("Temperature", 1, 1, 0.0, 1.25, Cost(1, 4, 2.1, 1.4, 1.0), 0.0),
        method("ABNN", 4, 12, 0.8, 1.5, Cost(13_500, 54_000, 212.0, 9.8, 12.0), 2.0),
        method("Deep ensemble", 5, 5, 0.6, 1.55, Cost(1_090_000, 4_360_000, 5400.0, 7.2, 5.0), 2.1),
    ]


def terms(y: Any, m: Simulated) -> Examples:
    mean = m.known.mean(0)
    right = torch.tensor(mean.argmax(-1) == y)
    target = np.eye(K)[y]
    return Examples(
        torch.tensor(mean.max(-1)),
        right,
        torch.tensor(np.log(mean[np.arange(N), y] + 1e-12)),
        torch.tensor(((mean - target) ** 2).sum(-1)),
        {"msp": torch.tensor(scores_of(m.known)["msp"])},
        {k: {"msp": torch.tensor(scores_of(p)["msp"])} for k, p in m.foreign.items()},
    )


def thresholds(right: Array, wrong: Array, ood: dict[str, Array]) -> Thresholds:
    everything = np.concatenate([right, wrong, *ood.values()])
    values = np.unique(everything)
    values = values[np.unique(np.linspace(0, len(values) - 1, 500).round().astype(int))]
    edges = np.linspace(everything.min(), everything.max(), 41)

    def kept(x: Array) -> list[int]:
        return [int(v) for v in np.searchsorted(np.sort(x), values, "right")]

    def bins(x: Array) -> list[int]:
        return [int(v) for v in np.histogram(x, edges)[0]]

    return Thresholds(
        values.tolist(),
        kept(right),
        kept(wrong),
        {k: kept(x) for k, x in ood.items()},
        edges.tolist(),
        bins(right),
        bins(wrong),
        {k: bins(x) for k, x in ood.items()},
    )


def reliability(confidence: Array, right: Any) -> list[tuple[float, float, int]]:
    bins = np.clip((confidence * 15).astype(int), 0, 14)
    found = [bins == i for i in range(15) if (bins == i).any()]
    return [(float(confidence[b].mean()), float(right[b].mean()), int(b.sum())) for b in found]


def thinned(x: Array, y: Array, most: int = 200) -> Curve:
    keep = np.unique(np.linspace(0, len(x) - 1, most).round().astype(int))
    return Curve(x[keep].tolist(), y[keep].tolist())


def roc_and_pr(known: Array, foreign: Array) -> tuple[Curve, Curve]:
    order = np.argsort(-np.concatenate([known, foreign]), kind="stable")
    positive = (order >= len(known)).astype(float)
    tp, fp = positive.cumsum(), (1 - positive).cumsum()
    zero = np.zeros(1)
    roc = thinned(
        np.concatenate([zero, fp / len(known)]), np.concatenate([zero, tp / len(foreign)])
    )
    return roc, thinned(tp / len(foreign), tp / (tp + fp))


def example(m: Simulated, members: Array, i: int, label: str | None, kind: int) -> Example:
    mean = members[:, i].mean(0)
    top = np.argsort(-mean)[:5]
    by_mode = members[:, i, top].reshape(m.modes, -1, len(top))
    scores = scores_of(members[:, i : i + 1])
    return Example(
        i,
        picture(kind, i),
        label,
        CLASSES[top[0]],
        float(mean.max()),
        float(scores["entropy"][0]),
        float(scores.get("epistemic", np.zeros(1))[0]),
        [CLASSES[k] for k in top],
        mean[top].tolist(),
        by_mode.tolist() if len(members) > 1 else [],
    )


def gallery(y: Any, m: Simulated) -> Gallery:
    mean = m.known.mean(0)
    confidence, wrong = mean.max(-1), mean.argmax(-1) != y
    sure = [i for i in np.argsort(-confidence) if wrong[i]][:8]
    torn = np.argsort(-scores_of(m.known)["entropy"])[:8]
    return Gallery(
        [example(m, m.known, i, CLASSES[y[i]], int(y[i])) for i in sure],
        [example(m, m.known, i, CLASSES[y[i]], int(y[i])) for i in torn],
        {
            name: [
                example(m, p, i, None, 20 + j) for i in np.argsort(-p.mean(0).max(-1))[:8].tolist()
            ]
            for j, (name, p) in enumerate(m.foreign.items())
        },
    )


def disagreement(m: Simulated) -> list[list[float]]:
    if len(m.known) == 1:
        return []
    labels = m.known.reshape(m.modes, -1, N, K).mean(1).argmax(-1)
    return [[float((a != b).mean()) for b in labels] for a in labels]


def robustness(figures: dict[str, float], softness: float) -> Robustness:
    def at(severity: int, weight: float) -> Figures:
        loss = weight * severity**1.4
        return Figures(
            figures["accuracy"] - 2.6 * loss,
            figures["nll"] + 0.13 * loss,
            figures["ece"] + softness * loss,
        )

    weights = {"noise": 1.5, "blur": 1.0, "fog": 0.6, "jpeg": 0.8}
    rows = {name: {s: at(s, w) for s in range(1, 6)} for name, w in weights.items()}
    return Robustness(N, at(0, 1.0), rows)


def fit(modes: int) -> Fit:
    rng = np.random.default_rng(3)
    steps = list(range(0, 600, 10))
    losses = [
        [float(0.9 + 0.1 * j + np.exp(-s / 150) + rng.normal(0, 0.03)) for j in range(modes)]
        for s in steps
    ]
    rows = {"original": (0.378, 89.1, 5.9), "all modes": (0.329, 89.4, 2.2)}
    rows |= {f"mode {j}": (0.36 + 0.01 * j, 88.7, 4.1) for j in range(modes)}
    order = ["original", *(f"mode {j}" for j in range(modes)), "all modes"]
    table = {k: dict(zip(("nll", "accuracy", "ece"), rows[k], strict=True)) for k in order}
    by_mode = [[row[j] for row in losses] for j in range(modes)]
    return Fit(steps, [list[float | None](column) for column in by_mode], table, 212.0)


def trajectory(modes: int) -> Trajectory:
    rng = np.random.default_rng(4)
    angles = np.arange(modes) * 2 * np.pi / modes + 0.4
    steps = [0, 50, 100, 200, 400, 600]
    points = [
        [
            [
                float(r * np.cos(a + 0.1 * t) + rng.normal(0, 0.2)),
                float(r * np.sin(a + 0.1 * t) + rng.normal(0, 0.2)),
            ]
            for a in angles
        ]
        for t, r in enumerate((0, 2, 4, 7, 10, 11))
    ]
    points[0] = [[0.0, 0.0]] * modes
    return Trajectory(
        steps,
        modes,
        points,
        [[[x / 3, y] for x, y in row] for row in points],
        [0.0, 0.06, 0.11, 0.15, 0.18, 0.19],
        [0.0, 0.02, 0.04, 0.055, 0.07, 0.074],
        [0.0, 0.015, 0.03, 0.04, 0.05, 0.055],
    )


def curve(m: Simulated, modes: int) -> SamplesCurve:
    samples = [1, 2, 4, 8, 16, 32]
    figures = {
        "epistemic": [0.041, 0.055, 0.062, 0.0655, 0.067, 0.068],
        "difference": [0.051, 0.033, 0.021, 0.012, 0.006, 0.0],
        "nll": [0.345, 0.331, 0.324, 0.321, 0.3195, 0.319],
        "accuracy": [89.0, 89.3, 89.5, 89.6, 89.6, 89.6],
        "ece": [2.9, 2.6, 2.3, 2.2, 2.1, 2.1],
    }
    spread = {k: [abs(v[0] - v[-1]) / (3 * (i + 1)) for i in range(6)] for k, v in figures.items()}
    return SamplesCurve(N, modes, 8, 0.02, samples, figures, spread)


def method_of(y: Any, m: Simulated, reference: Simulated, run: str = "") -> Method:
    mean = m.known.mean(0)
    confidence, right = mean.max(-1), mean.argmax(-1) == y
    scores, foreign = scores_of(m.known), {k: scores_of(p) for k, p in m.foreign.items()}
    examples = terms(y, m)
    figures = {k: float(v) for k, v in figures_of(examples).items()}
    curves = {k: roc_and_pr(scores["msp"], s["msp"]) for k, s in foreign.items()}
    order = np.argsort(-confidence, kind="stable")
    coverage = np.arange(1, N + 1) / N
    risk = (~right[order]).cumsum() / np.arange(1, N + 1)
    zeros = np.zeros(N)
    inside = scores.get("epistemic", zeros)
    many = len(m.known) > 1
    verdicts: dict[str, Comparison] = {}
    if m is not reference:
        verdicts = compare(terms(y, reference), examples, replicates=600)
    dots = [
        Dots("right", confidence[right][:250].tolist(), inside[right][:250].tolist()),
        Dots("wrong", confidence[~right][:250].tolist(), inside[~right][:250].tolist()),
        *(
            Dots(k, (1 - s["msp"])[:150].tolist(), s.get("epistemic", zeros)[:150].tolist())
            for k, s in foreign.items()
        ),
    ]
    is_abnn = m.name == "ABNN"
    return Method(
        m.name,
        run,
        m is reference,
        figures,
        {k: (v.low, v.high) for k, v in bootstrap(examples, replicates=200).items()},
        verdicts,
        m.cost,
        reliability(confidence, right),
        {
            k: thresholds(s[right], s[~right], {d: f[k] for d, f in foreign.items()})
            for k, s in scores.items()
        },
        {k: c[0] for k, c in curves.items()},
        {k: c[1] for k, c in curves.items()},
        thinned(coverage, risk),
        dots if many else [],
        disagreement(m),
        gallery(y, m),
        robustness(figures, {"ABNN": 1.0, "Deep ensemble": 0.9}.get(m.name, 1.9)),
        curve(m, 4) if is_abnn else None,
        fit(4) if is_abnn else None,
        trajectory(4) if is_abnn else None,
    )


@cache
def full() -> ReportData:
    """Four methods, two foreign datasets, and everything that is optional."""
    y, simulated = simulate()
    methods = [method_of(y, m, simulated[0]) for m in simulated]
    seeds = {
        m.name: {
            k: Spread(v, abs(v) / 60, 3, None if m.reference else "no difference shown")
            for k, v in m.figures.items()
        }
        for m in methods
    }
    return ReportData(
        "Eight classes of vehicles and animals",
        "2025-03-01 12:00",
        "0.1.0",
        N,
        K,
        dict.fromkeys(("svhn", "textures"), FOREIGN),
        methods,
        seeds,
        ["All numbers of this page are simulated."],
        272_474,
    )


def minimal() -> ReportData:
    """One method with nothing that is optional."""
    figures = {"accuracy": 75.0, "nll": 0.7, "ece": 6.0, "aurc": 0.1}
    kept = Thresholds([0.1, 0.4], [2, 3], [0, 1], {}, [0.0, 0.25, 0.5], [2, 1], [0, 1], {})
    method = Method(
        "Network alone",
        "",
        True,
        figures,
        {},
        {},
        Cost(),
        [(0.6, 0.5, 2), (0.9, 1.0, 2)],
        {"msp": kept},
        {},
        {},
        Curve([0.25, 0.5, 0.75, 1.0], [0.0, 0.0, 0.0, 0.25]),
        [],
    )
    return ReportData("One network", "2025-03-01 12:00", "0.1.0", 4, 2, {}, [method])


HOSTILE = '</script><img src=x onerror="window.hacked=1">&\'$x$\u2028'


@cache
def hostile() -> ReportData:
    """The full data with a hostile text wherever a user's text may be."""
    made: ReportData = _renamed(full(), {k: f"{HOSTILE}{k}" for k in _texts(full())})
    return made


def _texts(data: ReportData) -> list[str]:
    return [
        data.title,
        data.made,
        data.version,
        *data.notes,
        *data.ood,
        *CLASSES,
        *(m.name for m in data.methods),
    ]


def _renamed(value: Any, names: dict[str, str]) -> Any:
    """The value with texts replaced, also as keys and as a part of the names of figures."""
    if isinstance(value, str):
        if value.startswith("ood/"):
            head, name, rest = value.split("/", 2)
            return f"{head}/{names[name]}/{rest}"
        return names.get(value, value)
    if isinstance(value, list):
        return [_renamed(v, names) for v in value]
    if isinstance(value, tuple):
        return tuple(_renamed(v, names) for v in value)
    if isinstance(value, dict):
        return {_renamed(k, names): _renamed(v, names) for k, v in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        fields = {k: _renamed(getattr(value, k), names) for k in value.__dataclass_fields__}
        return type(value)(**fields)
    return value
