"""Whether confidence means what it says: calibration errors and reliability diagrams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from abnn.metrics.classification import check, check_normalised
from abnn.metrics.counts import Counts, check_correct, graded

# Confidences are summed as whole multiples of 2^-53, in two limbs of 27 bits. A chunk's sums then
# have fewer than the 53 bits that bincount keeps exactly.
_LIMB = 27
_CHUNK = 2**22


class Reliability(NamedTuple):
    """What is drawn in a reliability diagram, for each bin.

    Args:
        confidence: mean confidence, NaN in an empty bin.
        accuracy: share that came true, NaN in an empty bin.
        n: number of examples.
    """

    confidence: Tensor
    accuracy: Tensor
    n: Tensor


class Bins:
    """Confidences and what came of them, summed in equal-width bins, batch by batch.

    A bin holds `low <= confidence < high`; the last one holds a confidence of 1, too. All sums are
    whole numbers, so the result is the same whatever the order of batches and merges.

    Args:
        bins: number of bins between 0 and 1.
        classes: none for the confidence in the predicted class; or the number of classes, to look
            at the probabilities of each of them.

    >>> bins = Bins(bins=2)
    >>> bins.update(torch.tensor([0.75, 0.75, 0.25]), torch.tensor([True, False, False]))
    >>> bins.ece()
    0.25
    """

    def __init__(self, bins: int = 15, classes: int | None = None) -> None:
        if bins < 1:
            raise ValueError(f"bins is {bins}; give at least one bin.")
        if classes is not None and classes < 1:
            raise ValueError(f"classes is {classes}; give at least one class, or None.")
        self.bins = bins
        self.classes = classes
        # Number, number that came true, and both limbs of the confidence, per class and bin.
        self._sums = torch.zeros(4, classes or 1, bins, dtype=torch.int64)

    def update(self, confidence: Tensor, truth: Tensor) -> None:
        """Add some examples.

        Args:
            confidence: probability of the predicted class, any shape; of all classes,
                `[B, K, ...]`, if these Bins have classes.
            truth: whether the predicted class is the label, same shape; the labels, `[B, ...]`,
                if these Bins have classes.

        >>> bins = Bins(classes=2)
        >>> bins.update(torch.tensor([[0.75, 0.25]]), torch.tensor([0]))
        >>> bins.ece()
        0.25
        """
        if self.classes is None:
            check_correct(confidence, truth)
            # Not written as "< 0 or > 1", which NaN would pass. Rounding may carry a sum of
            # probabilities slightly past 1.
            if not ((confidence >= 0) & (confidence <= 1.001)).all():
                raise ValueError(
                    "A confidence is NaN or outside 0..1; give probabilities, not logits."
                )
            rows = confidence.reshape(-1, 1)
        elif confidence.dim() < 2 or confidence.shape[1] != self.classes:
            raise ValueError(
                f"Probabilities of shape {list(confidence.shape)} do not have the "
                f"{self.classes} classes of these Bins at dimension 1; give all of them."
            )
        else:
            if confidence.numel() == truth.numel() == 0:
                return
            check(confidence, truth)
            check_normalised(confidence, "probabilities")
            rows = confidence.movedim(1, -1).reshape(-1, self.classes)
        edges = bin_edges(self.bins, rows.dtype)
        step = max(1, _CHUNK // rows.shape[1])
        chunks = zip(rows.detach().split(step), truth.flatten().split(step), strict=True)
        for some, came in chunks:
            # On the CPU first: some accelerators have no float64.
            self._add(some.cpu().double(), came.cpu().long(), edges)

    def _add(self, rows: Tensor, came: Tensor, edges: Tensor) -> None:
        _, classes, bins = self._sums.shape
        place = torch.bucketize(rows.contiguous(), edges, right=True) + bins * torch.arange(classes)
        true = place[came == 1] if self.classes is None else place.gather(1, came.unsqueeze(1))
        whole = (rows * 2.0 ** (2 * _LIMB - 1)).round().long().flatten()
        for i, (index, weights) in enumerate(
            [
                (place, None),
                (true, None),
                (place, whole >> _LIMB),
                (place, whole & (2**_LIMB - 1)),
            ]
        ):
            exact = weights if weights is None else weights.double()
            sums = torch.bincount(index.flatten(), exact, minlength=classes * bins)
            self._sums[i] += sums.long().view(classes, bins)

    def merge(self, other: Bins) -> None:
        """Add all examples of `other`.

        >>> a, b = Bins(), Bins()
        >>> b.update(torch.tensor([0.5]), torch.tensor([True]))
        >>> a.merge(b)
        >>> a.n
        1
        """
        if (self.bins, self.classes) != (other.bins, other.classes):
            raise ValueError(
                f"Bins with bins={self.bins}, classes={self.classes} cannot take those with "
                f"bins={other.bins}, classes={other.classes}; make both alike."
            )
        self._sums += other._sums

    @property
    def n(self) -> int:
        """Number of examples.

        >>> Bins().n
        0
        """
        return int(self._sums[0, 0].sum())

    def ece(self) -> float:
        """Expected calibration error; with classes, its mean over them.

        >>> bins = Bins()
        >>> bins.update(torch.tensor([0.5]), torch.tensor([True]))
        >>> bins.ece()
        0.5
        """
        self._check_filled()
        _, right, high, low = self._sums
        # The larger parts cancel as whole numbers.
        gaps = ((right << _LIMB - 1) - high).double() - low.double() / 2**_LIMB
        total = gaps.abs().sum().item()
        return float(total / 2 ** (_LIMB - 1) / int(self._sums[0].sum()))

    def reliability(self) -> Reliability:
        """What a reliability diagram shows of each bin, `[bins]`; with classes, `[K, bins]`.

        >>> bins = Bins(bins=2)
        >>> bins.update(torch.tensor([0.75, 0.75]), torch.tensor([True, False]))
        >>> bins.reliability().accuracy
        tensor([   nan, 0.5000], dtype=torch.float64)
        """
        self._check_filled()
        n, right, high, low = self._sums if self.classes is not None else self._sums[:, 0]
        total = (high.double() + low.double() / 2**_LIMB) / 2 ** (_LIMB - 1)
        return Reliability(total / n, right.double() / n, n.clone())

    def state(self) -> dict[str, Tensor]:
        """All of it as tensors, to be stored or sent to another process.

        >>> sorted(Bins().state())
        ['shape', 'sums']
        """
        return {"shape": torch.tensor([self.bins, self.classes or 0]), "sums": self._sums.clone()}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Bins:
        """The Bins that `state` is of.

        >>> Bins.from_state(Bins(bins=7).state()).bins
        7
        """
        if set(state) != {"shape", "sums"}:
            raise ValueError(
                f"A state with the entries {sorted(state)} is none of Bins; give what "
                "Bins.state() returned."
            )
        bins, classes = state["shape"].tolist()
        made = cls(bins, classes or None)
        made._sums += state["sums"].cpu()
        return made

    def _check_filled(self) -> None:
        if self.n == 0:
            raise ValueError("There are no examples to score; give at least one.")


def ece(confidence: Tensor, correct: Tensor, bins: int = 15) -> float:
    """Expected calibration error of the top label, over equal-width bins.

        ECE = sum_b n_b / n * |accuracy_b - confidence_b|

    A bin holds `low <= confidence < high`; the last one holds a confidence of 1, too.

    Args:
        confidence: probability of the predicted class, any shape.
        correct: whether the predicted class is the label, same shape.
        bins: number of bins between 0 and 1.

    >>> round(ece(torch.tensor([0.9, 0.9]), torch.tensor([True, False])), 4)
    0.4
    """
    return _filled(confidence, correct, Bins(bins)).ece()


def classwise_ece(probs: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Expected calibration error of the probability of each class, averaged over the classes.

        mean_k sum_b n_kb / n * |frequency_kb - probability_kb|

    Args:
        probs: probabilities, `[B, K, ...]`.
        labels: class indices, `[B, ...]`.
        bins: number of equal-width bins between 0 and 1.

    >>> classwise_ece(torch.tensor([[0.75, 0.25]]), torch.tensor([0]))
    0.25
    """
    check(probs, labels)
    return _filled(probs, labels, Bins(bins, probs.shape[1])).ece()


def reliability(confidence: Tensor, correct: Tensor, bins: int = 15) -> Reliability:
    """Mean confidence, accuracy and number in equal-width bins: a reliability diagram.

    Args:
        confidence: probability of the predicted class, any shape.
        correct: whether the predicted class is the label, same shape.
        bins: number of bins between 0 and 1; those that are empty give NaN.

    >>> diagram = reliability(torch.tensor([0.75, 0.75]), torch.tensor([True, False]), bins=1)
    >>> diagram.confidence.item(), diagram.accuracy.item(), diagram.n.item()
    (0.75, 0.5, 2)
    """
    return _filled(confidence, correct, Bins(bins)).reliability()


def adaptive_ece(
    confidence: Tensor | Counts, correct: Tensor | None = None, bins: int = 15
) -> float:
    """Expected calibration error over bins of equally many examples.

    The examples, in order of confidence, are cut into `bins` groups whose sizes differ by at most
    one, the larger ones first. Equal confidences on both sides of a cut are shared out as if each
    was right to the same degree, so the order of the examples does not matter.

    Args:
        confidence: probability of the predicted class, any shape; or Counts of right and wrong.
        correct: whether the predicted class is the label, same shape; nothing beside Counts.
        bins: number of bins; those beyond the number of examples stay empty.

    >>> adaptive_ece(torch.tensor([0.5, 1.0]), torch.tensor([True, True]), bins=2)
    0.25
    """
    if bins < 1:
        raise ValueError(f"bins is {bins}; give at least one bin.")
    values, counts = (column.numpy() for column in graded(confidence, correct).table())
    if values[0] < 0 or values[-1] > 1.001:
        raise ValueError("A confidence is outside 0..1; give probabilities, not logits.")
    tied = counts.sum(1)
    n = int(tied.sum())
    size, larger = divmod(n, bins)
    cut = np.arange(bins + 1)
    # Sums up to a cut through equal confidences lie on the line between those around them.
    gaps = np.concatenate([[0.0], np.cumsum(counts[:, 0] - values * tied)])
    at_cuts = np.interp(
        size * cut + np.minimum(cut, larger), np.concatenate([[0], tied.cumsum()]), gaps
    )
    return float(np.abs(np.diff(at_cuts)).sum() / n)


def bin_edges(bins: int, dtype: torch.dtype) -> Tensor:
    """Where all bins but the first start, as float64.

    They are rounded as numbers of `dtype` are, so that k/bins opens bin k in any precision.

    >>> bin_edges(4, torch.float32)
    tensor([0.2500, 0.5000, 0.7500], dtype=torch.float64)
    """
    edges = torch.arange(1, bins, dtype=torch.float64) / bins
    return edges.to(dtype).double() if dtype.is_floating_point else edges


def _filled(confidence: Tensor, truth: Tensor, bins: Bins) -> Bins:
    bins.update(confidence, truth)
    return bins
