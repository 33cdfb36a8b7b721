"""How often each value occurred, in memory that does not grow with the number of examples.

Metrics that rank examples need every score. `Counts` is what they are computed from: it takes the
scores batch by batch, and merges with the counts of other processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

CAPACITY = 2**20
# Sign and exponent are 12 bits of a number: 52 bits are the most that will ever be dropped, so
# that a cell never reaches from one power of two into the next.
LEAST_CAPACITY = 2**12
_NOT_SIGN = np.int64(2**63 - 1)
_LIMB = 26


class _Cells(NamedTuple):
    """What is known of each cell: its first key, counts `[n, columns]`, the bits it dropped.

    The dropped bits are summed as whole numbers in two limbs of 26 bits, `[n, 2]`: a sum of floats
    would depend on its order, and a single integer would overflow.
    """

    keys: Ints
    counts: Ints
    dropped: Ints


class Counts:
    """How often each distinct value occurred, in one or more columns.

    Up to `capacity` distinct values, all are kept. Beyond that, the numbers lose their lowest bits,
    as few as possible, and those that have become equal share a cell. The result is the same
    whatever the order of the values, the batches and the merges.

    Args:
        columns: number of kinds of examples that are counted apart, such as right and wrong.
        capacity: number of cells to keep at most, 4096 or more.

    >>> counts = Counts(columns=2)
    >>> counts.update(torch.tensor([0.5, 0.25, 0.5]), column=torch.tensor([0, 1, 1]))
    >>> counts.table()
    (tensor([0.2500, 0.5000], dtype=torch.float64), tensor([[0, 1],
            [1, 1]]))
    """

    def __init__(self, columns: int = 1, capacity: int = CAPACITY) -> None:
        if columns < 1:
            raise ValueError(f"columns is {columns}; give at least one column.")
        if capacity < LEAST_CAPACITY:
            raise ValueError(f"capacity is {capacity}; give at least {LEAST_CAPACITY} cells.")
        self.columns = columns
        self.capacity = capacity
        self._shift = 0
        self._cells = _empty(columns)
        self._pending: list[list[Ints]] = [[] for _ in range(columns)]
        self._waiting = 0

    def update(self, values: Tensor, column: Tensor | int = 0) -> None:
        """Count some more values.

        Args:
            values: numbers of any type, any shape; infinities are welcome.
            column: the column to count in, one for all values or one for each.

        >>> counts = Counts()
        >>> counts.update(torch.rand(4, 3))
        >>> counts.n
        (12,)
        """
        keys = _keys(values)
        if isinstance(column, int):
            parts = {column: keys}
        elif column.shape != values.shape or column.is_floating_point():
            raise ValueError(
                f"The values have shape {list(values.shape)} and their columns "
                f"{list(column.shape)}, of {column.dtype}; give one whole number per value."
            )
        else:
            place = column.detach().flatten().cpu().numpy()
            parts = {int(c): keys[place == c] for c in np.unique(place)}
        for c in parts:
            if not 0 <= c < self.columns:
                raise ValueError(
                    f"There is no column {c}; these Counts have the columns 0 to "
                    f"{self.columns - 1}."
                )
        for c, part in parts.items():
            self._pending[c].append(part)
        self._waiting += keys.size
        # Sorting now and then costs much less than sorting each batch.
        if self._waiting >= self.capacity:
            self._settle()

    def merge(self, other: Counts) -> None:
        """Count all that `other` has counted, too; `other` stays as it is.

        >>> a, b = Counts(), Counts()
        >>> a.update(torch.tensor([1.0])), b.update(torch.tensor([2.0]))
        (None, None)
        >>> a.merge(b)
        >>> a.table()[0]
        tensor([1., 2.], dtype=torch.float64)
        """
        if (self.columns, self.capacity) != (other.columns, other.capacity):
            raise ValueError(
                f"Counts with columns={self.columns}, capacity={self.capacity} cannot take those "
                f"with columns={other.columns}, capacity={other.capacity}; make both alike."
            )
        other._settle()
        self._shift = max(self._shift, other._shift)
        self._settle(other._cells)

    def table(self) -> tuple[Tensor, Tensor]:
        """The values in ascending order, `[n]`, and their counts, `[n, columns]`.

        The value of a cell that holds several is their mean.

        >>> counts = Counts()
        >>> counts.update(torch.tensor([3, -1, 3]))
        >>> counts.table()[1].flatten()
        tensor([1, 2])
        """
        self._settle()
        keys, counts, dropped = self._cells
        total = counts.sum(1, keepdims=True)
        whole, part = np.divmod(dropped, total)
        scale = np.array([2**_LIMB, 1])
        offset = (whole * scale).sum(1) + (part / total * scale).sum(1)
        # The cell of minus infinity holds nothing else, and begins with bits that are not a number.
        values = _values(keys)
        values[np.isnan(values)] = -np.inf
        # Within a cell the values are evenly spaced, so the mean of the bits is that of the values.
        several = dropped.any(1) & np.isfinite(values)
        first = values[several]
        values[several] = first + offset[several] * (np.nextafter(first, np.inf) - first)
        return torch.from_numpy(values), torch.tensor(counts)

    @property
    def exact(self) -> bool:
        """Whether every distinct value has a cell of its own.

        >>> Counts().exact
        True
        """
        self._settle()
        return self._shift == 0

    @property
    def n(self) -> tuple[int, ...]:
        """Number of values counted in each column.

        >>> Counts(columns=2).n
        (0, 0)
        """
        self._settle()
        return tuple(self._cells.counts.sum(0).tolist())

    def state(self) -> dict[str, Tensor]:
        """All of it as tensors, to be stored or sent to another process.

        >>> sorted(Counts().state())
        ['counts', 'dropped', 'keys', 'shape']
        """
        self._settle()
        shape = torch.tensor([self.columns, self.capacity, self._shift])
        cells = {name: torch.tensor(array) for name, array in self._cells._asdict().items()}
        return {"shape": shape, **cells}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> Counts:
        """The Counts that `state` is of.

        >>> counts = Counts()
        >>> counts.update(torch.tensor([1.0, 1.0]))
        >>> Counts.from_state(counts.state()).n
        (2,)
        """
        if set(state) != {"shape", *_Cells._fields}:
            raise ValueError(
                f"A state with the entries {sorted(state)} is none of Counts; give what "
                "Counts.state() returned."
            )
        columns, capacity, shift = state["shape"].tolist()
        counts = cls(columns, capacity)
        counts._shift = shift
        counts._cells = _Cells(*(state[name].cpu().numpy().copy() for name in _Cells._fields))
        return counts

    def _settle(self, other: _Cells | None = None) -> None:
        """Count what waits (and other cells), and drop bits until all fits."""
        if self._waiting == 0 and other is None:
            return
        new = [_count(parts, c, self.columns) for c, parts in enumerate(self._pending) if parts]
        self._pending = [[] for _ in range(self.columns)]
        self._waiting = 0
        cells = _group([self._cells, *new, *([other] if other else [])], self._shift)
        # Fewer values never need more bits dropped than all of them, so going up from what any part
        # needed ends at what the whole needs: this is why order and batches do not matter.
        differing = cells.keys[1:] ^ cells.keys[:-1]
        shift = self._shift
        while 1 + np.count_nonzero(differing >> shift) > self.capacity:
            shift += 1
        self._cells = cells if shift == self._shift else _group([cells], shift)
        self._shift = shift


def side_by_side(a: Counts, b: Counts) -> Tensor:
    """The counts of two states, all columns of `a` and then of `b`, ascending by value.

    Where one has dropped more bits than the other, both are read at the coarser resolution.

    >>> a, b = Counts(), Counts()
    >>> a.update(torch.tensor([1.0, 2.0])), b.update(torch.tensor([2.0]))
    (None, None)
    >>> side_by_side(a, b)
    tensor([[1, 0],
            [1, 1]])
    """
    a._settle()
    b._settle()
    left = a._cells._replace(counts=np.pad(a._cells.counts, ((0, 0), (0, b.columns))))
    right = b._cells._replace(counts=np.pad(b._cells.counts, ((0, 0), (a.columns, 0))))
    return torch.from_numpy(_group([left, right], max(a._shift, b._shift)).counts)


def graded(confidence: Tensor | Counts, correct: Tensor | None = None) -> Counts:
    """How often each confidence was right (column 0) and wrong (column 1).

    Args:
        confidence: any shape; or Counts of two columns, which are checked and returned.
        correct: whether the prediction is right, same shape; nothing beside Counts.

    >>> graded(torch.tensor([0.9, 0.8]), torch.tensor([True, False])).table()[1]
    tensor([[0, 1],
            [1, 0]])
    """
    if isinstance(confidence, Counts):
        if correct is not None:
            raise ValueError("Counts know already what was right; leave `correct` out.")
        if confidence.columns != 2:
            raise ValueError(
                f"The Counts have {confidence.columns} column(s); give two, for right and wrong."
            )
        counts = confidence
    elif correct is None:
        raise ValueError("`correct` is missing; give whether each example is right, or Counts.")
    else:
        check_correct(confidence, correct)
        counts = Counts(columns=2, capacity=max(LEAST_CAPACITY, confidence.numel()))
        counts.update(confidence, (correct == 0).int())
    if sum(counts.n) == 0:
        raise ValueError("There are no examples to score; give at least one.")
    return counts


def check_correct(confidence: Tensor, correct: Tensor) -> None:
    """Refuse anything but one `True` or `False` per confidence."""
    if confidence.shape != correct.shape:
        raise ValueError(
            f"confidence has shape {list(confidence.shape)} and correct {list(correct.shape)}; "
            "give one of each per example."
        )
    if not ((correct == 0) | (correct == 1)).all():
        raise ValueError("correct must hold True or False (1 or 0) for each example.")


def dot(a: Tensor, b: Tensor) -> int:
    """Sum of the products of two tensors of counts, without overflow.

    >>> dot(torch.tensor([2**40]), torch.tensor([2**30])) == 2**70
    True
    """
    high, low = b >> 24, b & (2**24 - 1)
    return (int((a * high).sum()) << 24) + int((a * low).sum())


def _keys(values: Tensor) -> Ints:
    """Integers in the order of the values, from the bits of their float64."""
    if values.is_complex():
        raise ValueError("The values are complex numbers, which have no order; give real ones.")
    # On the CPU first: some accelerators have no float64. Adding 0 turns -0 into 0.
    floats = (values.detach().flatten().cpu().double() + 0.0).numpy()
    if np.isnan(floats).any():
        raise ValueError("The values contain NaN; check the predictions they are of.")
    return _flip(floats.view(np.int64))


def _values(keys: Ints) -> Floats:
    return _flip(keys).view(np.float64)


def _flip(bits: Ints) -> Ints:
    # The bits of positive floats are in order; those of negative ones, read as integers, are in
    # the opposite order until all but the sign is flipped. Doing so twice does nothing.
    return bits ^ ((bits >> 63) & _NOT_SIGN)


def _empty(columns: int, n: int = 0) -> _Cells:
    shapes = ((n,), (n, columns), (n, 2))
    return _Cells(*(np.zeros(shape, dtype=np.int64) for shape in shapes))


def _count(parts: list[Ints], column: int, columns: int) -> _Cells:
    """Cells of some keys, all of one column."""
    keys, times = np.unique(np.concatenate(parts), return_counts=True)
    cells = _empty(columns, keys.size)._replace(keys=keys)
    cells.counts[:, column] = times
    return cells


def _group(parts: list[_Cells], shift: int) -> _Cells:
    """Bring cells together whose keys agree in all but the lowest `shift` bits, in order."""
    cells = _Cells(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    if cells.keys.size == 0:
        return cells
    first = cells.keys & np.int64(-1 << shift)
    dropped = cells.dropped
    if shift:
        rest = (cells.keys - first)[:, None] >> np.array([_LIMB, 0]) & (2**_LIMB - 1)
        dropped = dropped + cells.counts.sum(1, keepdims=True) * rest
    # A stable sort merges runs that are sorted already in a single pass.
    order = np.argsort(first, kind="stable")
    first = first[order]
    starts = np.flatnonzero(np.r_[True, first[1:] != first[:-1]])
    return _Cells(
        first[starts],
        np.add.reduceat(cells.counts[order], starts),
        np.add.reduceat(dropped[order], starts),
    )
