"""What loaders give: a batch becomes the inputs of a network, and the labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from abnn.outputs import Inputs, describe

LABELS = ("labels", "label")


def split(batch: Any) -> tuple[Inputs, Tensor]:
    """Split a batch into the inputs and the labels, class indices as 64-bit integers.

    Args:
        batch: `(x, y)`; `(x1, x2, ..., y)`, whose inputs become a tuple; or a mapping with
            "labels" or "label", whose other entries are the inputs.

    >>> split((torch.zeros(2, 3), torch.tensor([0, 1])))[1]
    tensor([0, 1])
    >>> inputs, _ = split({"input_ids": torch.zeros(2, 3), "labels": torch.tensor([0, 1])})
    >>> list(inputs)
    ['input_ids']
    """
    inputs, labels = split_soft(batch)
    if labels.is_floating_point():
        raise ValueError(
            f"The labels of the batch are {describe(labels)}; give a tensor of class "
            "indices (integers): probabilities of the classes, as Mixup and CutMix give them, are "
            "for abnn.train alone."
        )
    return inputs, labels


def split_soft(batch: Any) -> tuple[Inputs, Tensor]:
    """As `split`, but labels may also be floats: the probabilities of the classes.

    >>> split_soft((torch.zeros(2, 3), torch.tensor([[0.9, 0.1], [0.0, 1.0]])))[1].shape
    torch.Size([2, 2])
    """
    labels: Any = None
    if isinstance(batch, Mapping):
        labels = next((batch[key] for key in LABELS if key in batch), None)
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        labels = batch[-1]
    if labels is None:
        raise ValueError(
            f"The batch is {describe(batch)}, in which no labels were found; give (inputs, "
            'labels), or a mapping with "labels".'
        )
    if not isinstance(labels, Tensor) or labels.is_complex():
        raise ValueError(
            f"The labels of the batch are {describe(labels)}; give a tensor of class indices "
            "(integers)."
        )
    # Not in the loader's type: -100, the usual mark of "no label", does not exist in uint8.
    return inputs_of(batch), labels if labels.is_floating_point() else labels.long()


def labels_of(batch: Any) -> Tensor | None:
    """The labels of a batch, or `None` where it has none that are class indices.

    >>> labels_of((torch.zeros(2, 3), torch.tensor([0, 1])))
    tensor([0, 1])
    >>> labels_of(torch.zeros(2, 3)) is None
    True
    """
    try:
        return split(batch)[1]
    except ValueError:
        return None


def inputs_of(batch: Any) -> Inputs:
    """The inputs of a batch whose labels, if there are any, do not matter.

    Args:
        batch: what `split` takes; or a tensor, `(x,)` or a mapping without labels.

    >>> inputs_of(torch.zeros(2, 3)).shape
    torch.Size([2, 3])
    >>> inputs_of((torch.zeros(2, 3), torch.tensor([0, 1]))).shape
    torch.Size([2, 3])
    """
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, (tuple, list)) and batch:
        return batch[0] if len(batch) <= 2 else tuple(batch[:-1])
    if isinstance(batch, Mapping):
        inputs = {key: value for key, value in batch.items() if key not in LABELS}
        if inputs:
            return inputs
    raise ValueError(
        f"The batch is {describe(batch)}, in which no inputs were found; give a tensor, "
        "(inputs, labels), or a mapping of inputs."
    )


def length_of(loader: Iterable[Any]) -> int | None:
    """The number of batches, or `None` where it is not known.

    >>> length_of([1, 2]), length_of(iter([1, 2]))
    (2, None)
    """
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:  # which a DataLoader of a stream without a length raises too
        return None


def to_device(inputs: Inputs, device: torch.device | str | None) -> Inputs:
    """Move the tensors in nested tuples, lists and mappings; `None` leaves them where they are.

    >>> to_device({"x": torch.zeros(1), "name": "cat"}, "cpu")
    {'x': tensor([0.]), 'name': 'cat'}
    """
    if device is None:
        return inputs
    if isinstance(inputs, Tensor):
        # Asynchronous copies overlap with the GPU's work; elsewhere they are not always safe.
        return inputs.to(device, non_blocking=torch.device(device).type == "cuda")
    if isinstance(inputs, Mapping):
        return {key: to_device(value, device) for key, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        moved = [to_device(value, device) for value in inputs]
        return tuple(moved) if isinstance(inputs, tuple) else moved
    return inputs


def device_of(module: object) -> torch.device | None:
    """Where a module's first parameter is, or `None` for anything without parameters.

    >>> device_of(nn.Linear(2, 2))
    device(type='cpu')
    """
    parameter = next(module.parameters(), None) if isinstance(module, nn.Module) else None
    return None if parameter is None else parameter.device
