"""Validation data that is neither training data nor test data."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from abnn.data.checks import missing
from abnn.data.dataset import Images, Rows, classes_of
from abnn.data.opening import open_data, parts_of
from abnn.data.stored import some
from abnn.data.view import View
from abnn.draws import generator


def held_out_split(
    data: Dataset[Any], size: float, seed: int = 0
) -> tuple[Subset[Any], Subset[Any]]:
    """What is left of a dataset, and what is held out of it, drawn by the seed alone.

    Args:
        data: a dataset that knows its length. `Images` are augmented only in what is left.
        size: how many examples to hold out; below 1, which share of them.
        seed: the same seed holds out the same examples.

    >>> from torch.utils.data import TensorDataset
    >>> rest, held_out = held_out_split(TensorDataset(torch.arange(10)), 0.2)
    >>> len(rest), len(held_out), sorted({*rest.indices, *held_out.indices}) == list(range(10))
    (8, 2, True)
    """
    if not isinstance(data, Dataset) or isinstance(data, IterableDataset):
        raise ValueError(
            f"A part can't be held out of a {type(data).__name__}; give a Dataset that knows its "
            "length."
        )
    n = len(data)  # type: ignore[arg-type]
    count = round(size * n) if 0 < size < 1 else int(size)
    if (count != size and size >= 1) or not 0 < count < n:
        raise ValueError(
            f"size={size} of {n} examples can't be held out; give a share between 0 and 1 or a "
            "whole number, which leaves some on both sides."
        )
    shuffled = generator("data", seed).permutation(n)
    held, rest = sorted(shuffled[:count].tolist()), sorted(shuffled[count:].tolist())
    return Subset(data, rest), Subset(data.plain() if isinstance(data, Images) else data, held)


def train_and_validation(
    source: str,
    view: View = View(),  # noqa: B008  (frozen)
    size: float = 0.1,
    seed: int = 0,
    *,
    skip_broken: bool = False,
    void: int | None = None,
    as_is: bool = False,
) -> tuple[Dataset[Any], Dataset[Any], str]:
    """Training data, validation data that is neither that nor test data, and where this is from.

    A source that has validation data of its own gives both; of any other, a part is held out.

    Args:
        source, view, skip_broken, void, as_is: as of `open_data`; validation data is not augmented.
        size, seed: as of `held_out_split`.

    >>> import numpy as np, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/d.npz", x_train=np.zeros((20, 4), np.float32), y_train=[0, 1] * 10)
    ...     train, validation, note = train_and_validation(f"npz:{folder}/d.npz")
    >>> len(train), len(validation), note
    (18, 2, 'validation: 2 of the 20 training examples, drawn by seed 0')
    """
    how: dict[str, Any] = {"skip_broken": skip_broken, "void": void, "as_is": as_is}
    train = open_data(source, "train", view, **how)
    if {"train", "validation"} <= set(parts_of(source)):
        validation = open_data(source, "validation", view.plain(), **how)
        assert isinstance(train, Dataset)
        assert isinstance(validation, Dataset)
        return train, validation, f"validation: that of {source}"
    if isinstance(train, DataLoader):
        raise ValueError(
            f"{source} is a DataLoader, of which no validation data can be held out; let the "
            "builder make a Dataset."
        )
    rest, held_out = held_out_split(train, size, seed)
    n = len(rest) + len(held_out)
    drawn = f"{len(held_out)} of the {n} training examples, drawn by seed {seed}"
    return rest, held_out, f"validation: {drawn}{_lost(rest)}"


def _lost(rest: Subset[Any]) -> str:
    """Which classes have lost all their examples to what was held out."""
    classes, data = classes_of(rest), rest.dataset
    labels = _labels(data)
    if labels is None or labels.ndim > 1:
        return ""
    left, before = (y[y >= 0].bincount() for y in (labels[rest.indices], labels))
    names = classes or [str(k) for k in range(len(before))]
    lost = sorted({*missing(left, names)} - {*missing(before, names)}, key=list(names).index)
    return f"; no training example is left of {some(lost)}" if lost else ""


def _labels(data: Dataset[Any]) -> Tensor | None:
    if isinstance(data, Images):
        return data.y
    return data.tensors[1] if isinstance(data, Rows) else None
