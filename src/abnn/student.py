"""Student's t distribution for whole degrees of freedom, where it is a finite sum."""

from __future__ import annotations

import math


def student(level: float, degrees: int) -> float:
    """The t with P(|T| <= t) = `level`.

    >>> round(student(0.95, 4), 3), round(student(0.95, 1), 3)
    (2.776, 12.706)
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _within(angle, degrees) < level else (low, angle)
    return math.sqrt(degrees) * math.tan(low)


def t_within(t: float, degrees: int) -> float:
    """P(|T| <= t), of which `student` is the inverse.

    >>> round(t_within(2.776445, 4), 6)
    0.95
    """
    return min(1.0, _within(math.atan(t / math.sqrt(degrees)), degrees))


def _within(angle: float, degrees: int) -> float:
    """P(|T| <= t) with t = sqrt(degrees) tan(angle): a finite sum."""
    sin, cos = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term, total = (cos if odd else 1.0), 0.0
    for i in range(2 + odd, degrees + 1, 2):
        total += term
        term *= cos * cos * (i - 1) / i
    return 2 / math.pi * (angle + sin * total) if odd else sin * total
