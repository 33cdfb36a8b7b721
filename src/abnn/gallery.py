"""The inputs that are most worth looking at: sure mistakes, the unsure, and sure strangers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from abnn.files import write
from abnn.prediction import Prediction

# Of labelled data, and of out-of-distribution data.
KINDS, OOD_KINDS = ("mistakes", "uncertain"), ("confident",)


@dataclass(frozen=True, eq=False)
class Striking:
    """One input, and why it stands out.

    Args:
        kind: "mistakes", "uncertain" or "confident".
        key: how much so: the confidence, or the entropy of the uncertain.
        index: its row in the record of its dataset.
        image: `[C, H, W]`, values from 0 to 255, if the inputs are images.
        members: probabilities of every member, `[S, K]`, if they were kept.
    """

    kind: str
    key: float
    index: int
    image: Tensor | None = None
    members: Tensor | None = None


def striking(
    prediction: Prediction,
    labels: Tensor | None,
    most: int,
    image: Callable[[int], Tensor | None] = lambda row: None,
) -> list[Striking]:
    """Of the inputs of one batch, those that may be among the `most` striking ones of their kinds.

    Args:
        prediction: one row for every input.
        labels: their labels; none of out-of-distribution data.
        most: how many of each kind.
        image: the image of a row, if it is one.

    >>> prediction = Prediction.from_logits(torch.tensor([[[9.0, 0.0], [1.0, 0.0]]]))
    >>> [(s.kind, s.index) for s in striking(prediction, torch.tensor([1, 0]), most=1)]
    [('mistakes', 0), ('uncertain', 1)]
    """
    if labels is None:
        ranked = {OOD_KINDS[0]: prediction.confidence}
    else:
        wrong = prediction.label != labels
        ranked = {
            KINDS[0]: prediction.confidence.where(wrong, -torch.inf),
            KINDS[1]: prediction.total,
        }
    found = []
    for kind, keys in ranked.items():
        best = keys.sort(descending=True, stable=True)
        for key, row in zip(best.values[:most].tolist(), best.indices[:most].tolist(), strict=True):
            if key == -math.inf:  # no mistake
                break
            members = prediction.members
            own = None if members is None else members[:, row].float()
            found.append(Striking(kind, key, row, image(row), own))
    return found


def merged(before: Sequence[Striking], more: Sequence[Striking], most: int) -> list[Striking]:
    """The most striking of both, kind by kind; of equal ones the first."""
    best: list[Striking] = []
    for kind in (*KINDS, *OOD_KINDS):
        both = [one for one in (*before, *more) if one.kind == kind]
        best += sorted(both, key=lambda one: (-one.key, one.index))[:most]
    return best


def moved(found: Sequence[Striking], offset: int) -> list[Striking]:
    """The same, of a batch whose first row is row `offset` of its dataset."""
    return [replace(one, index=one.index + offset) for one in found]


def save(path: Path, found: Sequence[Striking]) -> None:
    """Write images and members as one safetensors file."""
    tensors, notes = {}, {"inputs": str(len(found))}
    for number, one in enumerate(found):
        notes[str(number)] = f"{one.kind} {one.key!r} {one.index}"
        for name in ("image", "members"):
            tensor = getattr(one, name)
            if tensor is not None:
                tensors[f"{number}/{name}"] = tensor.clone(memory_format=torch.contiguous_format)
    write(path, safetensors.torch.save(tensors, notes))


def load(path: Path) -> list[Striking]:
    """Read what `save` wrote."""
    found = []
    try:
        with safetensors.safe_open(path, "pt") as file:
            names, notes = set(file.keys()), file.metadata()
            for number in range(int(notes["inputs"])):
                kind, key, index = notes[str(number)].split()
                image, members = (
                    file.get_tensor(name) if (name := f"{number}/{part}") in names else None
                    for part in ("image", "members")
                )
                found.append(Striking(kind, float(key), int(index), image, members))
    except (OSError, safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged or missing ({error}); evaluate again.") from error
    return found
