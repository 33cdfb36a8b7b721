"""All that the figures of a data set are made of, in memory that does not grow with it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from abnn.evaluation import Diversity, Selective, Sets
from abnn.metrics import (
    Bins,
    Counts,
    Mean,
    accuracy_at_coverage,
    adaptive_ece,
    augrc,
    aurc,
    coverage_at_risk,
    label_rank,
    log_likelihood,
    set_coverage,
    set_size,
    squared_error,
)
from abnn.prediction import Prediction
from abnn.scores import SCORES

_CELLS = 2**18  # of a score: some 10 MB


class Tally:
    """Counts and exact sums over predictions, batch by batch; merges with that of other processes.

    Nothing depends on the order of the batches and merges. What ranks examples is exact for up to
    262,144 distinct values, beyond which they lose their last bits (see `abnn.metrics.Counts`); all
    else is always exact.

    >>> tally = Tally()
    >>> tally.add(Prediction.from_logits(torch.randn(4, 10, 3)), torch.arange(10) % 3)
    >>> tally.n
    10
    """

    def __init__(self) -> None:
        self.classes: int | None = None
        self.means: dict[str, Mean] = defaultdict(Mean)
        self.scores: dict[str, Counts] = defaultdict(partial(Counts, capacity=_CELLS))
        self.confidence = Counts(columns=2, capacity=_CELLS)  # right and wrong
        self.top = Bins()
        self.each: Bins | None = None  # of every class
        self.covered = torch.zeros(2, 0, dtype=torch.int64)  # by class: labels, and those in sets
        self.several = False  # whether any prediction is of more than one member

    def add(
        self,
        prediction: Prediction,
        labels: Tensor | None = None,
        ignore_index: int = -100,
        scored: bool = True,
    ) -> None:
        """Take in the predictions of a batch.

        Args:
            prediction: of the batch.
            labels: their labels, `[B, ...]`; none of what is out-of-distribution.
            ignore_index: the label of what is left out.
            scored: count the scores of `abnn.scores` too, for detection.
        """
        self._fit_classes(prediction.log_probs.shape[1])
        used = prediction.used_by_input()
        self.means["passes"].update(used)
        self.several |= bool((used > 1).any())
        if labels is None:
            keep = torch.ones_like(prediction.label, dtype=torch.bool)
        else:
            labels = labels.to(prediction.log_probs.device)
            keep = labels != ignore_index
            self._add_labelled(prediction, labels, keep)
        for name in ("epistemic", "disagreement"):
            self.means[name].update(getattr(prediction, name)[keep])
        if scored:
            for name, score in SCORES.items():
                self.scores[name].update(score(prediction)[keep])

    def _fit_classes(self, classes: int) -> None:
        if self.classes is None:
            self.classes, self.each = classes, Bins(classes=classes)
            self.covered = torch.zeros(2, classes, dtype=torch.int64)
        elif self.classes != classes:
            raise ValueError(
                f"Some predictions have {self.classes} classes and others {classes}; give data "
                "of which all batches have the same."
            )

    def _add_labelled(self, prediction: Prediction, labels: Tensor, keep: Tensor) -> None:
        terms = terms_of(prediction, labels, keep)
        for name in ("correct", "log_likelihood", "squared_error"):
            self.means[name].update(terms[name])
        self.confidence.update(terms["confidence"], (~terms["correct"]).int())
        self.top.update(terms["confidence"], terms["correct"])
        kept = labels[keep]
        probs = prediction.probs.movedim(1, -1)[keep]
        assert self.each is not None
        self.each.update(probs, kept)
        if len(kept):
            self.means["top5"].update(label_rank(probs, kept) < 5)
        if prediction.sets is not None and len(kept):
            sets = prediction.sets.movedim(1, -1)[keep]
            size, covered = set_size(sets), set_coverage(sets, kept)
            self.means["set_size"].update(size)
            self.means["empty"].update(size == 0)
            assert self.classes is not None
            self.covered += torch.stack(
                [
                    kept.cpu().bincount(minlength=self.classes),
                    kept[covered].cpu().bincount(minlength=self.classes),
                ]
            )

    def merge(self, other: Tally) -> None:
        """Take in all that `other` has seen; `other` stays as it is.

        >>> a, b = Tally(), Tally()
        >>> a.add(Prediction.from_logits(torch.zeros(1, 2, 3)), torch.tensor([0, 1]))
        >>> b.merge(a)
        >>> b.n
        2
        """
        if other.classes is None:
            return
        self._fit_classes(other.classes)
        for name, mean in other.means.items():
            self.means[name].merge(mean)
        for name, counts in other.scores.items():
            self.scores[name].merge(counts)
        self.confidence.merge(other.confidence)
        self.top.merge(other.top)
        assert self.each is not None
        assert other.each is not None
        self.each.merge(other.each)
        self.covered = self.covered + other.covered
        self.several |= other.several

    @property
    def n(self) -> int:
        """Number of labelled examples: of pixels or tokens, where these carry the labels."""
        return self.means["correct"].n

    def labelled(self) -> dict[str, float]:
        """The figures of labelled data, by the names of `Evaluation`; shares in percent."""
        assert self.classes is not None
        assert self.each is not None
        top5 = {"top5": 100 * self.means["top5"].value()} if self.classes > 5 else {}
        return {
            "accuracy": 100 * self.means["correct"].value(),
            "nll": -self.means["log_likelihood"].value(),
            "brier": self.means["squared_error"].value(),
            "ece": 100 * self.top.ece(),
            **top5,
            "adaptive_ece": 100 * adaptive_ece(self.confidence),
            "classwise_ece": 100 * self.each.ece(),
        }

    def selective(self, coverages: Sequence[float], risks: Sequence[float]) -> Selective:
        """What leaving the least confident predictions to someone else would gain."""
        graded = self.confidence
        return Selective(
            aurc=aurc(graded),
            augrc=augrc(graded),
            accuracy={c: 100 * accuracy_at_coverage(graded, coverage=c) for c in coverages},
            coverage={r: 100 * coverage_at_risk(graded, risk=r) for r in risks},
        )

    def sets(self) -> Sets | None:
        """What the prediction sets hold, if there are any."""
        if "set_size" not in self.means:
            return None
        labels, covered = self.covered
        return Sets(
            coverage=100 * int(covered.sum()) / int(labels.sum()),
            size=self.means["set_size"].value(),
            empty=100 * self.means["empty"].value(),
            by_class=[
                100 * c / n if n else None
                for n, c in zip(labels.tolist(), covered.tolist(), strict=True)
            ],
        )

    def diversity(self, known: Tally | None = None) -> Diversity | None:
        """How much the members differ, and how much more than on `known` data."""
        if not self.several:
            return None
        epistemic, base = (
            None if tally is None else tally.means["epistemic"].value() for tally in (self, known)
        )
        assert epistemic is not None
        return Diversity(
            disagreement=100 * self.means["disagreement"].value(),
            epistemic=epistemic,
            ratio=epistemic / base if base else None,
        )


def terms_of(prediction: Prediction, labels: Tensor, keep: Tensor) -> dict[str, Tensor]:
    """The few numbers of each example that figures are made of, of those to keep."""
    safe = labels.where(keep, 0)  # any class will do: these terms are dropped
    maps = {
        "log_likelihood": log_likelihood(prediction.log_probs, safe),
        "squared_error": squared_error(prediction.probs, safe),
        "confidence": prediction.confidence,
        "correct": prediction.label == labels,
    }
    return {name: values[keep] for name, values in maps.items()}
