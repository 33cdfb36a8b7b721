"""BCa: percentiles of resampled figures, moved for their bias and skewness (Efron, 1987)."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from abnn.metrics.counts import Floats

_NORMAL = NormalDist()


class BCa:
    """How sure a figure is.

    Args:
        value: the figure itself.
        drawn: the figures of the resampled sets.
        influence: how far single examples, or groups of them, move the figure: a sixth of its
            skewness is the acceleration.

    >>> low, high = BCa(3.0, np.linspace(2, 4, 2001), np.array([-1.0, 1.0])).interval(0.9)
    >>> round(low, 3), round(high, 3)
    (2.1, 3.9)
    """

    def __init__(self, value: float, drawn: Floats, influence: Floats) -> None:
        self._value = value
        self._drawn = drawn
        B = len(drawn)
        # A tie counts half: figures of few examples have few values.
        below = ((drawn < value).sum() + (drawn <= value).sum()) / (2 * B)
        self._bias = _NORMAL.inv_cdf(min(max(below, 1 / (B + 1)), B / (B + 1)))
        square = (influence**2).sum()
        self._acceleration = (influence**3).sum() / (6 * square**1.5) if square > 0 else 0.0

    def interval(self, confidence: float) -> tuple[float, float]:
        """The confidence interval; it always holds the value."""
        tail = (1 - confidence) / 2
        low, high = np.quantile(self._drawn, [self._level(tail), self._level(1 - tail)]).tolist()
        return min(low, self._value), max(high, self._value)

    def p(self) -> float:
        """Two-sided: the level at which the interval just touches 0.

        One is added to the resampled figures that are not on the value's side of 0, so that p is
        never below `2 / (B + 1)`.
        """
        B = len(self._drawn)
        if self._value == 0:
            return 1.0
        if self._value > 0:
            tail = self._tail(((self._drawn <= 0).sum() + 1) / (B + 1))
        else:
            tail = 1 - self._tail(1 - ((self._drawn >= 0).sum() + 1) / (B + 1))
        return min(1.0, max(2 * tail, 2 / (B + 1)))

    def _level(self, tail: float) -> float:
        """Which share of the drawn values lies below the end of the interval."""
        w = self._bias + _NORMAL.inv_cdf(tail)
        shrink = 1 - self._acceleration * w
        return _NORMAL.cdf(self._bias + w / shrink) if shrink > 0 else float(w > 0)

    def _tail(self, level: float) -> float:
        """The inverse of `_level`."""
        if not 0 < level < 1:
            return level
        y = _NORMAL.inv_cdf(level) - self._bias
        stretch = 1 + self._acceleration * y
        return _NORMAL.cdf(y / stretch - self._bias) if stretch > 0 else float(y > 0)
