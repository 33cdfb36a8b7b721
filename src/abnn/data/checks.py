"""What can be wrong with labels and classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from abnn.data.augmentation import IGNORED
from abnn.data.stored import Stored, some


def numbers_of_classes(labels: Tensor, name: str) -> Tensor:
    """Labels as whole numbers; those of maps stay as small as they are stored.

    A column `[N, 1]`, as Keras has it, is a list.

    >>> numbers_of_classes(torch.tensor([[0.0], [2.0]]), "d.npz")
    tensor([0, 2])
    """
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.is_complex() or (
        labels.is_floating_point() and not torch.equal(labels, labels.trunc())
    ):
        raise ValueError(f"The labels of {name} are {kind(labels)}; give the numbers of classes.")
    small = labels.ndim == 3 and labels.dtype in (torch.uint8, torch.int8, torch.int16)
    return labels if small else labels.long()


def checked(stored: Stored, absent_allowed: bool = False) -> tuple[str, ...]:
    """Look at the labels of a part; what a user should know of them.

    Args:
        stored: the part.
        absent_allowed: tell of classes without an example, which are an error otherwise. Where
            labels are maps they never are.

    >>> x, y = torch.zeros(2, 4), torch.tensor([0, 2])
    >>> checked(Stored("d.npz", x, y, ("cat", "dog", "cow")), absent_allowed=True)
    ('d.npz has no example of the class dog',)
    """
    labels, classes, name = stored.labels, stored.classes, stored.name
    if labels is None:
        raise ValueError(f"{name} has no labels; give data that has.")
    if len(stored.images) != len(labels):
        raise ValueError(f"{name} has {len(stored.images)} inputs but {len(labels)} labels.")
    counts = _counts(labels, stored.void, name)
    if classes is None:
        return ()
    if len(counts) > len(classes):
        raise ValueError(
            f"A label of {name} is {len(counts) - 1}, but there are the names of {len(classes)} "
            f"classes; labels are 0 to {len(classes) - 1}."
        )
    absent = missing(counts, classes)
    if not absent:
        return ()
    text = f"{name} has no example of the class{'es' if len(absent) > 1 else ''} {some(absent)}"
    if not absent_allowed and labels.ndim == 1:
        raise ValueError(f"{text}; add examples, or go on without by skip_broken (--skip-broken).")
    return (text,)


def missing(counts: Tensor, classes: Sequence[str]) -> list[str]:
    """The names of classes without an example.

    >>> missing(torch.tensor([3, 0]), ["cat", "dog", "cow"])
    ['dog', 'cow']
    """
    return [name for k, name in enumerate(classes) if k >= len(counts) or not counts[k]]


def kind(x: Tensor) -> str:
    """What an array holds, for an error message.

    >>> kind(torch.zeros(2, 3))
    'float32 of the shape [2, 3]'
    """
    return f"{str(x.dtype).removeprefix('torch.')} of the shape {list(x.shape)}"


def _counts(labels: Tensor, void: int | None, name: str) -> Tensor:
    """How often every class is there. Maps are looked at one by one, as they may be large."""
    counts = torch.zeros(0, dtype=torch.long)
    for part in labels if labels.ndim > 1 else [labels]:
        flat = part.flatten().long()
        flat = flat[(flat != IGNORED) & (flat != (IGNORED if void is None else void))]
        if not len(flat):
            continue
        if flat.min() < 0:
            raise ValueError(
                f"A label of {name} is {int(flat.min())}; labels are numbers from 0, or {IGNORED} "
                "where there is none."
            )
        more = flat.bincount(minlength=len(counts))
        counts = torch.cat([counts, counts.new_zeros(len(more) - len(counts))]) + more
    return counts
