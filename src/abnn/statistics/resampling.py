"""Figures of one test set: how sure they are, and whether two methods differ, by resampling it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from zlib import crc32

import numpy as np

from abnn.draws import whole_number
from abnn.metrics.counts import Floats
from abnn.statistics.bca import BCa
from abnn.statistics.examples import Examples
from abnn.statistics.table import Comparison, Figures, Interval
from abnn.statistics.verdicts import Test, check_confidence, comparisons
from abnn.statistics.weighted import Weighted, figure_names

_CHUNK = 2**18  # weights held at a time: they stay in the cache
_GROUPS = 200  # of the jackknife


def figures_of(examples: Examples) -> dict[str, float]:
    """The figures themselves, those of `abnn.metrics`.

    >>> correct, p = torch.tensor([True, False]), torch.tensor([0.75, 0.5])
    >>> figures_of(Examples(p, correct, p.log(), 2 * (1 - p) ** 2))["accuracy"]
    50.0
    """
    return _values(examples, figure_names(examples))


def bootstrap(
    examples: Examples,
    figures: Sequence[str] | None = None,
    *,
    replicates: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Figures[Interval]:
    """Confidence intervals of the figures of one method, from resampled examples.

    Labelled and OOD examples are drawn anew with replacement, each set on its own. The intervals
    are BCa (Efron, 1987): percentiles of the resampled figures, moved for their bias and skewness.
    The skewness comes from a jackknife that leaves out one of 200 groups at a time, so it costs no
    more than some replicates. An interval always holds its value.

    Chance alone makes the ECE of n examples too large, and resampling adds as much again. That is
    taken out, so its interval is one for the ECE that n such examples have on average; without end
    of examples it would be lower, down to 0 where the predictions are calibrated.

    Args:
        examples: what the method said.
        figures: the figures to look at, such as "nll" or "ood/svhn/msp/auroc"; default: all.
        replicates: number of resampled sets.
        confidence: share of intervals that hold the true figure.
        seed: of the resampling.

    >>> g = torch.Generator().manual_seed(0)
    >>> p = torch.rand(500, generator=g) / 2 + 0.5
    >>> correct = torch.rand(500, generator=g) < p
    >>> examples = Examples(p, correct, torch.where(correct, p, 1 - p).log(), (1 - p) ** 2)
    >>> result = bootstrap(examples)["accuracy"]
    >>> result.low < result.value < result.high
    True
    """
    check_confidence(confidence)
    names = _chosen(figures, figure_names(examples), "these examples")
    B = whole_number("replicates", replicates)
    if (enough := _enough(1, confidence)) > B:
        raise ValueError(
            f"{B} replicates can't give an interval of {confidence:g} confidence; give at least "
            f"{enough}."
        )
    value = _values(examples, names)
    # An infinite NLL has no interval.
    method = Weighted(examples, [name for name in names if math.isfinite(value[name])])
    drawn, influence = _resampled([method], B, seed)[0], _influence(method)
    rows = {}
    for name in names:
        low = high = value[name]
        if name in drawn:
            bca = _bca(name, value[name], drawn[name], influence[name])
            low, high = bca.interval(confidence)
        if name == "ece":
            low = max(low, 0.0)  # it was shifted
        rows[name] = Interval(name, value[name], low, high)
    return Figures(rows)


def compare(
    a: Examples,
    b: Examples,
    figures: Sequence[str] | None = None,
    *,
    replicates: int | None = None,
    confidence: float = 0.95,
    holm: bool = True,
    seed: int = 0,
) -> Figures[Comparison]:
    """Whether method `b` is better than method `a` on the same examples, figure by figure.

    A paired bootstrap: each resampled set is the same for both, so what is hard for both cancels
    out. An interval is the BCa interval of the difference, and p the level at which it just
    touches 0, never below `2 / (replicates + 1)`.

    Args:
        a: what the first method said.
        b: what the second said of the same examples, in the same order.
        figures: the figures to test; default: all that both have.
        replicates: number of resampled sets; default: 2000, or more if many figures need them.
        confidence: of the intervals; a difference is shown if p is below 1 - confidence.
        holm: correct p for the number of figures (Holm, 1979), so that the chance of any false
            verdict among all of them is 1 - confidence. Without it each figure has that chance.
        seed: of the resampling.

    >>> p = torch.linspace(0.5, 0.99, 200)
    >>> right, wrong = torch.ones(200), torch.arange(200) % 4 > 0
    >>> a, b = (Examples(p, correct, p.log(), (1 - p) ** 2) for correct in (wrong, right))
    >>> result = compare(a, b)
    >>> result["accuracy"].verdict, result["nll"].verdict
    ('better', 'no difference shown')
    """
    _check_same(a, b)
    check_confidence(confidence)
    both = figure_names(b)
    names = _chosen(figures, [name for name in figure_names(a) if name in both], "both methods")
    count = len(names) if holm else 1
    enough = _enough(count, confidence)
    B = max(2000, 4 * enough) if replicates is None else whole_number("replicates", replicates)
    if enough > B:
        raise ValueError(
            f"{B} replicates can't show a difference at {confidence:g} confidence for {count} "
            f"figure(s); give at least {enough}, or test fewer figures."
        )
    before, after = _values(a, names), _values(b, names)
    # Against an infinite NLL there is nothing to test.
    finite = [name for name in names if math.isfinite(before[name]) and math.isfinite(after[name])]
    methods = [Weighted(a, finite), Weighted(b, finite)]
    drawn = _resampled(methods, B, seed)
    influence = [_influence(method) for method in methods]
    tests = {}
    for name in names:
        difference, low, high, p = after[name] - before[name], math.nan, math.nan, 1.0
        if name in finite:
            first, second = (moved[name] for moved in influence)
            bca = _bca(name, difference, drawn[1][name] - drawn[0][name], second - first)
            (low, high), p = bca.interval(confidence), bca.p()
        tests[name] = Test(before[name], after[name], difference, low, high, p)
    return comparisons(tests, confidence, holm)


def _enough(tests: int, confidence: float) -> int:
    """So few replicates show a difference only if not one of them speaks against it."""
    return math.ceil(2 * tests / (1 - confidence))


def _bca(name: str, value: float, drawn: Floats, influence: Floats) -> BCa:
    # Moving for so large a bias as that of the ECE would end below all that n examples can show.
    return BCa(value, drawn - drawn.mean() + value if name == "ece" else drawn, influence)


def _values(examples: Examples, names: Sequence[str]) -> dict[str, float]:
    method = Weighted(examples, names)
    ood = {dataset: np.ones((1, m)) for dataset, m in method.sizes.items()}
    found = method.figures(np.ones((1, method.n)), ood)
    return {name: found[name].item() for name in names}


def _resampled(methods: Sequence[Weighted], B: int, seed: int) -> list[dict[str, Floats]]:
    """The figures of each method on the same B resampled sets."""
    seed = whole_number("seed", seed, least=0)
    n, sizes = methods[0].n, methods[0].sizes
    # A dataset is drawn by its name, so its figures do not depend on what else is evaluated.
    known = np.random.default_rng([seed, 0])
    unknown = {name: np.random.default_rng([seed, 1, crc32(name.encode())]) for name in sizes}
    pieces: list[list[dict[str, Floats]]] = [[] for _ in methods]
    for rows in _pieces(B, n, sizes):
        weights = _drawn(known, len(rows), n)
        ood = {name: _drawn(unknown[name], len(rows), m) for name, m in sizes.items()}
        for method, piece in zip(methods, pieces, strict=True):
            piece.append(method.figures(weights, ood))
    return [_joined(piece) for piece in pieces]


def _drawn(rng: np.random.Generator, rows: int, n: int) -> Floats:
    """How often each of n examples is drawn when n are drawn with replacement, `[rows, n]`."""
    counts = np.empty((rows, n))
    for row in counts:
        row[:] = np.bincount(rng.integers(n, size=n), minlength=n)
    return counts


def _influence(method: Weighted) -> dict[str, Floats]:
    """How far each group of examples moves the figures, from leaving it out."""
    n, sizes = method.n, method.sizes
    known, unknown = [], []
    for groups in _pieces(_GROUPS, n, sizes):
        ones = {dataset: np.ones((len(groups), m)) for dataset, m in sizes.items()}
        known.append(method.figures(_without(groups, n), ones))
        less = {dataset: _without(groups, m) for dataset, m in sizes.items()}
        unknown.append(method.detection(np.ones((len(groups), n)), less))
    moved = {name: _moves(left_out, n) for name, left_out in _joined(known).items()}
    for name, left_out in _joined(unknown).items():
        moves = _moves(left_out, sizes[method.dataset(name)])
        moved[name] = np.concatenate([moved[name], moves])
    return moved


def _without(groups: range, n: int) -> Floats:
    """Weights of 1, but in each row 0 for the examples of one group, `[rows, n]`."""
    weights: Floats = (np.arange(n) % _GROUPS != np.array(groups)[:, None]).astype(np.float64)
    return weights


def _moves(left_out: Floats, n: int) -> Floats:
    left_out = left_out[:n]  # fewer examples are fewer groups
    G = len(left_out)
    moves: Floats = (left_out.mean() - left_out) * (G - 1) / G
    return moves


def _pieces(rows: int, n: int, sizes: Mapping[str, int]) -> Iterator[range]:
    """So many rows at a time as `_CHUNK` allows."""
    step = max(1, _CHUNK // (n + sum(sizes.values())))
    for start in range(0, rows, step):
        yield range(start, min(start + step, rows))


def _joined(pieces: Sequence[Mapping[str, Floats]]) -> dict[str, Floats]:
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def _chosen(figures: Sequence[str] | None, available: list[str], whose: str) -> list[str]:
    if figures is None:
        return available
    wanted = [figures] if isinstance(figures, str) else list(dict.fromkeys(figures))
    if not wanted:
        raise ValueError("figures is empty; name at least one, or leave it out for all.")
    if unknown := [name for name in wanted if name not in available]:
        raise ValueError(
            f"There is no figure {', '.join(unknown)} of {whose}; choose from "
            f"{', '.join(available)}."
        )
    return wanted


def _check_same(a: Examples, b: Examples) -> None:
    sizes = [("labelled data", len(a.correct), len(b.correct))]
    for dataset in sorted(a.ood.keys() & b.ood.keys()):
        first, second = (next(iter(x.ood[dataset].values())) for x in (a, b))
        sizes.append((dataset, len(first), len(second)))
    for name, n, m in sizes:
        if n != m:
            raise ValueError(
                f"Of the {name}, a has {n} examples and b has {m}, so they are not the same "
                "examples; evaluate both methods on the same ones."
            )
    if a.digest is not None and b.digest is not None and a.digest != b.digest:
        raise ValueError(
            "a and b have different digests, so they are not the same examples in the same order; "
            "evaluate both methods on the same ones, without shuffling."
        )
