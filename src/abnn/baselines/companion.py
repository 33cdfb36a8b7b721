"""What companions of a predictor share: asking it, and reading held-out data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from abnn.batches import split, to_device
from abnn.outputs import Inputs, describe
from abnn.prediction import Prediction


def ask(predictor: Any, x: Inputs, predict: dict[str, Any]) -> Prediction:
    """The prediction of whatever has `predict(x) -> Prediction`.

    >>> ask(abnn.baselines.Single(nn.Identity()), torch.zeros(1, 2), {}).probs
    tensor([[0.5000, 0.5000]])
    """
    prediction = predictor.predict(x, **predict)
    if not isinstance(prediction, Prediction):
        raise TypeError(
            f"The predict(x) of a {type(predictor).__name__} returned {describe(prediction)}, not "
            "a Prediction; wrap a plain network as abnn.baselines.Single(net)."
        )
    return prediction


def held_out(
    loader: Iterable[Any],
    rows: Callable[[Inputs], Tensor],
    device: Any,
    ignore_index: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The labelled examples of every batch on the CPU: their rows `[n, K]` and labels `[n]`.

    Args:
        loader: batches `(x, y)`, `(x1, x2, ..., y)` or mappings with "labels".
        rows: what to make of the inputs, `[B, K, ...]`; every pixel or token is an example.
        device: where the inputs go first; `None` leaves them where they are.
        ignore_index: the label of what is left out.

    >>> batch = torch.eye(3), torch.tensor([0, -100, 2])
    >>> list(held_out([batch], lambda x: x, None, -100))
    [(tensor([[1., 0., 0.],
            [0., 0., 1.]]), tensor([0, 2]))]
    """
    found = 0
    for number, batch in enumerate(loader, start=1):
        inputs, labels = split(batch)
        values, labels = rows(to_device(inputs, device)).movedim(1, -1).cpu(), labels.cpu()
        if labels.shape != values.shape[:-1]:
            raise ValueError(
                f"The labels have shape {list(labels.shape)}, but the network's "
                f"predictions {list(values.shape[:-1])}; give one label per prediction."
            )
        keep = labels != ignore_index
        values, labels = values[keep], labels[keep]
        if len(labels) == 0:
            continue
        found += len(labels)
        if labels.min() < 0 or labels.max() >= values.shape[1]:
            raise ValueError(
                f"The labels run from {labels.min()} to {labels.max()}, but there are "
                f"{values.shape[1]} classes; remap the labels, or leave some out by ignore_index."
            )
        if values.isnan().any():
            raise ValueError(
                f"The predictions on batch {number} contain NaN; check these inputs and the "
                "network's weights."
            )
        yield values, labels
    if found == 0:
        raise ValueError("The loader has no labelled examples to fit on; give held-out data.")


def total_seconds(own: float | None, predictor: object) -> float | None:
    """How long a companion and its predictor took to fit; `None` if one of these is not known.

    >>> total_seconds(1.5, abnn.baselines.Single(nn.Identity()))
    1.5
    """
    # A plain network is given: whatever its training took, it costs nothing more.
    before = getattr(predictor, "fit_seconds", None) if hasattr(predictor, "predict") else 0.0
    return None if own is None or before is None else own + before
