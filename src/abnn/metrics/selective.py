"""What is gained by leaving the least confident predictions to someone else.

Accepting all predictions above a threshold of confidence gives a coverage (share accepted) and a
risk (share of errors among them). Any score will do as confidence, if higher means more confident.
Everything can be computed from two tensors, or from `Counts` of two columns, right and wrong, that
were filled batch by batch. Examples of equal confidence are accepted in random order, and figures
are expectations over that order: no result depends on the order of the data.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from abnn.metrics.counts import Counts, Floats, Ints, dot, graded

# Where the series of the harmonic numbers takes over: its first missing term is 1e-17 there.
_FROM = 64
_HARMONIC = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, _FROM + 1))])


def risk_coverage(
    confidence: Tensor | Counts, correct: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Coverage and risk at every distinct threshold, from the highest on.

    Args:
        confidence: how sure each prediction is, any shape; or Counts of right and wrong.
        correct: whether each prediction is right, same shape; nothing beside Counts.

    >>> coverage, risk = risk_coverage(torch.tensor([0.9, 0.8]), torch.tensor([True, False]))
    >>> coverage.tolist(), risk.tolist()
    ([0.5, 1.0], [0.0, 0.5])
    """
    right, wrong = _ranked(confidence, correct)
    accepted = (right + wrong).cumsum(0)
    return accepted.double() / accepted[-1], wrong.cumsum(0).double() / accepted


def aurc(confidence: Tensor | Counts, correct: Tensor | None = None) -> float:
    """Area under the risk-coverage curve: the mean over k of the risk of the k most confident.

    Of m tied examples with w errors, after n accepted ones with e errors, let r = w / m. Their
    risks sum to `m r + (e - r n) (H(n + m) - H(n))` on average, with the harmonic numbers H.

    >>> aurc(torch.tensor([0.9, 0.8]), torch.tensor([True, False]))
    0.25
    """
    right, wrong = (column.numpy() for column in _ranked(confidence, correct))
    tied = right + wrong
    after = tied.cumsum()
    before = after - tied
    rate = wrong / tied
    excess = (wrong.cumsum() - wrong) - rate * before
    terms = wrong + excess * _harmonic(before, after)
    return float(terms.sum() / after[-1])


def augrc(confidence: Tensor | Counts, correct: Tensor | None = None) -> float:
    """Area under the generalised risk-coverage curve: errors accepted, as a share of all.

    The mean over all coverages of the chance that an example is both accepted and wrong, from 0
    to 1/2 (Traub et al., 2024, "Overcoming Common Flaws in the Evaluation of Selective
    Classification Systems").

    >>> augrc(torch.tensor([0.9, 0.8]), torch.tensor([True, False]))
    0.125
    """
    right, wrong = _ranked(confidence, correct)
    tied = right + wrong
    # Trapezoids between the thresholds, in whole numbers.
    return dot(tied, 2 * wrong.cumsum(0) - wrong) / (2 * int(tied.sum()) ** 2)


def accuracy_at_coverage(
    confidence: Tensor | Counts, correct: Tensor | None = None, coverage: float = 0.9
) -> float:
    """Share of right ones among the most confident predictions.

    Args:
        confidence: how sure each prediction is, any shape; or Counts of right and wrong.
        correct: whether each prediction is right, same shape; nothing beside Counts.
        coverage: share of the examples to accept, at least.

    >>> accuracy_at_coverage(torch.tensor([0.9, 0.8]), torch.tensor([True, False]), 0.5)
    1.0
    """
    if not 0 < coverage <= 1:
        raise ValueError(f"coverage is {coverage}; give a share above 0 and up to 1, such as 0.9.")
    right, wrong = _ranked(confidence, correct)
    accepted = (right + wrong).cumsum(0)
    n = int(accepted[-1])
    k = min(math.ceil(coverage * n), n)
    # 0.07 * 100 is rounded to more than 7, though 7 of 100 are 0.07.
    if k > 1 and (k - 1) / n >= coverage:
        k -= 1
    last = int(torch.searchsorted(accepted, k))
    tied, hits = int(right[last] + wrong[last]), int(right[last])
    before = int(accepted[last]) - tied
    hits_before = int(right[:last].sum())
    return (hits_before * tied + hits * (k - before)) / (tied * k)


def coverage_at_risk(
    confidence: Tensor | Counts, correct: Tensor | None = None, risk: float = 0.05
) -> float:
    """Largest coverage that a threshold reaches with at most this risk; 0 if none does.

    Args:
        confidence: how sure each prediction is, any shape; or Counts of right and wrong.
        correct: whether each prediction is right, same shape; nothing beside Counts.
        risk: share of errors to tolerate among the accepted.

    >>> coverage_at_risk(torch.tensor([0.9, 0.8]), torch.tensor([True, False]), 0.1)
    0.5
    """
    if not 0 <= risk <= 1:
        raise ValueError(f"risk is {risk}; give a share of errors from 0 to 1, such as 0.05.")
    coverage, risks = risk_coverage(confidence, correct)
    return max(coverage[risks <= risk].tolist(), default=0.0)


def _ranked(confidence: Tensor | Counts, correct: Tensor | None) -> tuple[Tensor, Tensor]:
    """How many right and wrong ones have each distinct confidence, the highest first."""
    right, wrong = graded(confidence, correct).table()[1].flip(0).unbind(1)
    return right, wrong


def _harmonic(a: Ints, b: Ints) -> Floats:
    """`1 / (a + 1) + ... + 1 / b`, without the cancellation of H(b) - H(a)."""
    low = _HARMONIC[np.minimum(b, _FROM)] - _HARMONIC[np.minimum(a, _FROM)]
    start, end = (np.maximum(k, _FROM).astype(np.float64) for k in (a, b))
    high: Floats = low + np.log1p((end - start) / start) + _tail(end) - _tail(start)
    return high


def _tail(k: Floats) -> Floats:
    """What is left of H(k) after the logarithm and Euler's constant."""
    series: Floats = 1 / (2 * k) - 1 / (12 * k**2) + 1 / (120 * k**4) - 1 / (252 * k**6)
    return series
