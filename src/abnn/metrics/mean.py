"""The mean of any number of values, exact whatever their order."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

# A float64 is a whole number of 53 bits times a power of two. For each power, these whole numbers
# are summed in two limbs, whose sums over a chunk have fewer than the 53 bits that bincount keeps.
_LIMB, _CHUNK = 27, 2**22
_POWERS, _LOWEST = 2099, -1126  # from the least subnormal number to the greatest


class Mean:
    """Sum and number of values, batch by batch, without rounding.

    The result does not depend on the order of the values, the batches and the merges: it is the
    float64 nearest to the true mean.

    >>> mean = Mean()
    >>> mean.update(torch.tensor([1e16, 1.0, -1e16], dtype=torch.float64))
    >>> mean.value() * 3
    1.0
    """

    def __init__(self) -> None:
        self._sums = np.zeros((2, _POWERS), dtype=np.int64)
        # Number of values, of infinite ones above, and of infinite ones below.
        self._n = np.zeros(3, dtype=np.int64)

    def update(self, values: Tensor) -> None:
        """Add some values, of any shape; infinities are welcome.

        >>> mean = Mean()
        >>> mean.update(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> mean.value()
        2.5
        """
        # On the CPU first: some accelerators have no float64.
        floats = values.detach().flatten().cpu().double().numpy()
        if np.isnan(floats).any():
            raise ValueError("The values contain NaN; check the predictions they are of.")
        self._n += (floats.size, np.sum(floats == np.inf), np.sum(floats == -np.inf))
        finite = floats[np.isfinite(floats)]
        for start in range(0, finite.size, _CHUNK):
            fraction, power = np.frexp(finite[start : start + _CHUNK])
            whole = np.ldexp(fraction, 53).astype(np.int64)
            place = power - 53 - _LOWEST
            for limb, part in enumerate((whole >> _LIMB, whole & (2**_LIMB - 1))):
                sums = np.bincount(place, part.astype(np.float64), minlength=_POWERS)
                self._sums[limb] += sums.astype(np.int64)

    def merge(self, other: Mean) -> None:
        """Add all that `other` has seen.

        >>> a, b = Mean(), Mean()
        >>> a.update(torch.tensor([1.0])), b.update(torch.tensor([2.0]))
        (None, None)
        >>> a.merge(b)
        >>> a.value()
        1.5
        """
        self._sums += other._sums
        self._n += other._n

    @property
    def n(self) -> int:
        """Number of values.

        >>> Mean().n
        0
        """
        return int(self._n[0])

    def value(self) -> float:
        """The mean; NaN if there are infinities of both signs.

        >>> mean = Mean()
        >>> mean.update(torch.tensor([1.0, float("inf")]))
        >>> mean.value()
        inf
        """
        n, above, below = self._n.tolist()
        if n == 0:
            raise ValueError("There are no values to average; give at least one.")
        if above or below:
            return float("nan") if above and below else float("inf" if above else "-inf")
        total = 0
        for power in np.flatnonzero(self._sums.any(0)).tolist():
            high, low = self._sums[:, power].tolist()
            total += ((high << _LIMB) + low) << power
        return float(Fraction(total, n) * Fraction(2) ** _LOWEST)

    def state(self) -> dict[str, Tensor]:
        """All of it as tensors, to be stored or sent to another process.

        >>> sorted(Mean().state())
        ['n', 'sums']
        """
        return {"n": torch.tensor(self._n), "sums": torch.tensor(self._sums)}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Mean:
        """The Mean that `state` is of.

        >>> mean = Mean()
        >>> mean.update(torch.tensor([3.0]))
        >>> Mean.from_state(mean.state()).value()
        3.0
        """
        if set(state) != {"n", "sums"}:
            raise ValueError(
                f"A state with the entries {sorted(state)} is none of Mean; give what "
                "Mean.state() returned."
            )
        mean = cls()
        mean._sums += state["sums"].cpu().numpy()
        mean._n += state["n"].cpu().numpy()
        return mean
