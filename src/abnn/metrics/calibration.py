"""Whether confidence means what it says: the expected calibration error."""

from __future__ import annotations

import torch
from torch import Tensor


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
    if bins < 1:
        raise ValueError(f"bins is {bins}; give at least one bin.")
    if confidence.shape != correct.shape:
        raise ValueError(
            f"confidence has shape {list(confidence.shape)} and correct {list(correct.shape)}; "
            "give one of each per example."
        )
    if confidence.numel() == 0:
        raise ValueError("There are no examples to score; give at least one.")
    # Not written as "< 0 or > 1", which NaN would pass. Rounding may carry a sum of
    # probabilities slightly past 1.
    if not ((confidence >= 0) & (confidence <= 1.001)).all():
        raise ValueError("A confidence is NaN or outside 0..1; give probabilities, not logits.")
    if not ((correct == 0) | (correct == 1)).all():
        raise ValueError("correct must hold True or False (1 or 0) for each example.")
    # The edges are rounded as the confidences are, so that k/bins opens bin k in any precision.
    edges = (torch.arange(1, bins, dtype=torch.float64) / bins).to(confidence.dtype).double()
    confidence = confidence.flatten().cpu().double()
    index = torch.bucketize(confidence, edges, right=True)
    gaps = torch.bincount(index, weights=correct.flatten().cpu().double() - confidence)
    return gaps.abs().sum().item() / confidence.numel()
