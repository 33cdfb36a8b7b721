"""The figures of weighted examples: of a resampled set, or of one where some are left out.

A weight is a whole number, how often the example is there. The figures are those of
`abnn.metrics` on examples repeated so often, computed for many sets of weights at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from abnn.metrics.calibration import bin_edges
from abnn.metrics.counts import Floats, Ints
from abnn.statistics.examples import Examples

BINS = 15
RECALL = 0.95

_LABELLED = ("accuracy", "nll", "brier", "ece", "aurc")
_DETECTION = ("auroc", "aupr", "fpr95")


def figure_names(examples: Examples) -> list[str]:
    """All figures that these examples have.

    >>> p = torch.tensor([0.5, 0.75])
    >>> figure_names(Examples(p, torch.ones(2), p.log(), (1 - p) ** 2))
    ['accuracy', 'nll', 'brier', 'ece', 'aurc']
    """
    pairs = [(dataset, score) for dataset, given in examples.ood.items() for score in given]
    return [*_LABELLED, *(f"ood/{d}/{s}/{kind}" for d, s in pairs for kind in _DETECTION)]


class Weighted:
    """The examples of one method, sorted once, so that any weights give figures in O(n).

    Args:
        examples: what the method said.
        names: the figures to compute.

    >>> p = torch.tensor([0.5, 0.75])
    >>> examples = Weighted(Examples(p, p > 0.5, p.log(), (1 - p) ** 2), ["accuracy"])
    >>> examples.figures(np.array([[1.0, 1.0], [1.0, 3.0]]), {})
    {'accuracy': array([50., 75.])}
    """

    def __init__(self, examples: Examples, names: Sequence[str]) -> None:
        self.n = len(examples.correct)
        self._names = names
        confidence, correct = _floats(examples.confidence), _floats(examples.correct)
        means = {
            "accuracy": 100 * correct,
            "nll": -_floats(examples.log_likelihood),
            "brier": _floats(examples.squared_error),
        }
        self._means = {name: terms for name, terms in means.items() if name in names}
        if "ece" in names:
            edges = bin_edges(BINS, examples.confidence.dtype).numpy()
            self._gaps = np.zeros((self.n, BINS))
            place = np.searchsorted(edges, confidence, side="right")
            self._gaps[np.arange(self.n), place] = 100 * (correct - confidence)
        if "aurc" in names:
            self._risk = _Risk(confidence, correct)
        # Which dataset, score and kind of figure a name stands for.
        self._detection = {
            name: (dataset, score, kind)
            for dataset, given in examples.ood.items()
            for score in given
            for kind in _DETECTION
            if (name := f"ood/{dataset}/{score}/{kind}") in names
        }
        self._order: dict[str, Ints] = {}
        self._detectors: dict[tuple[str, str], _Detector] = {}
        for dataset, score in {place[:2]: None for place in self._detection.values()}:
            known, unknown = examples.scores[score], examples.ood[dataset][score]
            ordered, order = (-known.double()).sort(stable=True)
            self._order[score] = order.numpy()
            self._detectors[dataset, score] = _Detector(ordered.numpy(), -_floats(unknown))
        # Number of examples of each OOD dataset that matters.
        self.sizes = {d: len(detector.order) for (d, _), detector in self._detectors.items()}

    def dataset(self, name: str) -> str:
        """The OOD dataset that a detection figure is of."""
        return self._detection[name][0]

    def figures(self, weights: Floats, ood: Mapping[str, Floats]) -> dict[str, Floats]:
        """Figures `[R]` from weights `[R, n]` and, for each OOD dataset, `[R, m]`."""
        total = weights.sum(1)
        found = {name: weights @ terms / total for name, terms in self._means.items()}
        if "ece" in self._names:
            found["ece"] = np.abs(weights @ self._gaps).sum(1) / total
        if "aurc" in self._names:
            found["aurc"] = self._risk.area(weights)
        return {**found, **self.detection(weights, ood)}

    def detection(self, weights: Floats, ood: Mapping[str, Floats]) -> dict[str, Floats]:
        """Those of the figures that need OOD examples."""
        found = {}
        for score, order in self._order.items():
            above = np.zeros((len(weights), self.n + 1))
            np.cumsum(weights.take(order, 1), 1, out=above[:, 1:])
            for (dataset, of), detector in self._detectors.items():
                if of == score:
                    found[dataset, score] = detector.figures(above, ood[dataset])
        return {
            name: 100 * found[dataset, score][kind]
            for name, (dataset, score, kind) in self._detection.items()
        }


class _Risk:
    """The area under the risk-coverage curve, as `abnn.metrics.aurc` defines it."""

    def __init__(self, confidence: Floats, correct: Floats) -> None:
        self._order = np.argsort(-confidence, kind="stable")
        ordered = confidence[self._order]
        self._wrong = 1 - correct[self._order]
        # Where each group of equal confidences starts.
        self._starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
        self._harmonic = np.r_[0.0, (1 / np.arange(1, len(ordered) + 1)).cumsum()]

    def area(self, weights: Floats) -> Floats:
        weights = weights.take(self._order, 1)
        tied = np.add.reduceat(weights, self._starts, 1)
        wrong = np.add.reduceat(weights * self._wrong, self._starts, 1)
        after = tied.cumsum(1)
        before = after - tied
        excess = wrong.cumsum(1) - wrong - wrong / np.maximum(tied, 1) * before
        harmonic = self._harmonic.take(after.astype(np.int64))
        between = np.diff(harmonic, axis=1, prepend=0.0)
        area: Floats = (wrong + excess * between).sum(1) / after[:, -1]
        return area


class _Detector:
    """How well one score detects one OOD dataset, as `abnn.metrics.detect` defines it.

    Args:
        known: negated scores of the labelled examples, in ascending order.
        unknown: negated scores of the OOD examples.
    """

    def __init__(self, known: Floats, unknown: Floats) -> None:
        self.order = np.argsort(unknown, kind="stable")
        unknown = unknown[self.order]
        # Of each OOD example, the last that ties; and how many labelled ones score at least as
        # high, and how many higher.
        self._last = np.searchsorted(unknown, unknown, side="right") - 1
        self._level = np.searchsorted(known, unknown, side="right")
        self._higher = np.searchsorted(known, unknown)

    def figures(self, above: Floats, weights: Floats) -> dict[str, Floats]:
        """From the weights `[R, m]`, and how many of the k highest are there, `[R, n + 1]`."""
        pos = weights.take(self.order, 1)
        caught, flagged = pos.cumsum(1), above.take(self._level, 1)
        P, N = caught[:, -1], above[:, -1]
        # Each positive beats the negatives that are not above it, and half of those it ties with.
        beaten = 2 * N[:, None] - flagged - above.take(self._higher, 1)
        true = caught.take(self._last, 1)
        precision = true / np.maximum(true + flagged, 1)
        first = (caught / P[:, None] < RECALL).sum(1)
        return {
            "auroc": (pos * beaten).sum(1) / (2 * P * N),
            "aupr": (pos * precision).sum(1) / P,
            "fpr95": flagged[np.arange(len(pos)), first] / N,
        }


def _floats(values: Tensor) -> Floats:
    array: Floats = values.to(torch.float64).numpy()
    return array
