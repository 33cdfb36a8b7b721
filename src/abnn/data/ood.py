"""Out-of-distribution data, in the shape of the data that it is to be told from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from abnn.batches import inputs_of
from abnn.data.augmentation import IGNORED
from abnn.data.checks import kind
from abnn.data.dataset import Images, Rows, channels_first, conformed, is_images, whole
from abnn.data.opening import stored_part, without_broken
from abnn.data.stored import Encoded, Stored
from abnn.data.view import View
from abnn.folding import first_tensor


def open_ood(
    source: str,
    like: Dataset[Any] | DataLoader[Any],
    view: View = View(),  # noqa: B008  (frozen)
    *,
    skip_broken: bool = False,
) -> tuple[Dataset[Any] | DataLoader[Any], str]:
    """Out-of-distribution data in the shape of the in-distribution data, and what was done to it.

    Images become grey or of three channels, and are brought to the size of those that they are to
    be told from: by the size of their view, or else resized to theirs. They are rounded to bytes
    again, and normalised as the others. All labels are -100, which stands for none.

    Args:
        source: as of `open_data`; its test data, or all of it where it is not divided. What a
            builder of your own makes is left as it is.
        like: the in-distribution data.
        view: how that becomes inputs, where it is of your own making.
        skip_broken: leave out images that can't be read.

    >>> import numpy as np, tempfile
    >>> like = Images(torch.zeros(4, 28, 28, dtype=torch.uint8), torch.zeros(4).long())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/d.npz", x=np.zeros((9, 32, 32, 3), np.uint8))
    ...     data, note = open_ood(f"npz:{folder}/d.npz", like)
    >>> data[0][0].shape, note
    (torch.Size([1, 28, 28]), 'grey by luminance; resized from 32 x 32 to 28 x 28')
    """
    stored = stored_part(source, "test")
    if not isinstance(stored, Stored):
        return stored, "as its builder makes it"
    known = whole(like)
    if isinstance(known, Images):
        view = known.view
    if skip_broken:
        stored = without_broken(stored)
    x, name, shape = stored.images, stored.name, _shape(known)
    labels = torch.full((len(x),), IGNORED)
    of_bytes = isinstance(known, Images)
    if len(shape) == 3 and (isinstance(x, Encoded) or is_images(x)):
        if not (of_bytes or view.mean):
            raise ValueError(
                f"{name} holds images of bytes, and it is not known how the in-distribution data "
                "is normalised; give its mean and std, or a builder of your own (module:)."
            )
        return _images(x, labels, view, shape, stored.notes)
    if isinstance(x, Encoded) or of_bytes or not x.is_floating_point():
        wanted = "images of bytes" if of_bytes else "floating-point inputs"
        held = "images" if isinstance(x, Encoded) else kind(x)
        raise ValueError(
            f"{name} holds {held}, but the in-distribution data is of {wanted}; give OOD data of "
            "the same kind."
        )
    if x.shape[1:] != shape:
        raise ValueError(
            f"An example of {name} has the shape {list(x.shape[1:])}, but one of the "
            f"in-distribution data {list(shape)}; only images of bytes are brought to it."
        )
    return Rows(x, labels), "as it is"


def _images(
    x: Tensor | Encoded, labels: Tensor, view: View, shape: torch.Size, notes: tuple[str, ...]
) -> tuple[Images, str]:
    sized = view.size is not None
    C, H, W = shape
    if isinstance(x, Tensor) and not sized:
        x, note = conformed(channels_first(x), shape)
        return Images(x, labels, view.plain(), notes=notes), "; ".join([*notes, note])
    if not view.mean:  # which tells the channels
        view = replace(view, mean=(0.0,) * C, std=(1.0,) * C)
    view = replace(view.plain(), size=(H, W))
    data = Images(x, labels, view, notes=notes, grey_by_luminance=True)
    if isinstance(x, Encoded) or data.is_resized:
        data.notes = (*data.notes, f"brought to {H} x {W}, in proportion")
    return data, "; ".join(data.notes) or "as it is"


def _shape(data: Dataset[Any]) -> torch.Size:
    """The shape of an example's first input."""
    example = next(iter(data)) if isinstance(data, IterableDataset) else data[0]
    return first_tensor(inputs_of(example)).shape
