"""Predict a data set of any size, batch by batch."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sized
from contextlib import closing
from os import PathLike
from typing import Any, overload

from abnn.batches import device_of
from abnn.evaluate import Predictor
from abnn.prediction import PER_INPUT, Prediction
from abnn.prefetch import Batch, batches
from abnn.progress import Progress
from abnn.results import Predictions, Target, columns_of


@overload
def predict_loader(
    predictor: Predictor,
    loader: Iterable[Any],
    *,
    out: None = None,
    overwrite: bool = False,
    progress: bool | None = None,
    **predict: Any,
) -> Prediction: ...


@overload
def predict_loader(
    predictor: Predictor,
    loader: Iterable[Any],
    *,
    out: str | PathLike[str],
    overwrite: bool = False,
    progress: bool | None = None,
    **predict: Any,
) -> Predictions: ...


def predict_loader(
    predictor: Predictor,
    loader: Iterable[Any],
    *,
    out: str | PathLike[str] | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
    **predict: Any,
) -> Prediction | Predictions:
    """Predict a data set of any size; the next batch is loaded while the last is computed.

    Of an ABNN it is a method: `bnn.predict_loader(loader, samples="auto", out="preds/")`.

    Args:
        predictor: anything with `predict(inputs) -> Prediction`.
        loader: batches as for `evaluate`; labels are stored if there are any, and not needed.
        out: where to write, batch by batch: a directory of memory-mapped .npy files, or a file that
            ends with ".parquet" (needs pyarrow). It appears when it is complete, never before, and
            memory does not grow with the data set. Default: one `Prediction`, on the CPU.
        overwrite: replace earlier predictions at `out`.
        progress: show a line of progress; default: on a terminal.
        predict: passed on to `predictor.predict`, such as `samples=8, seed=0`.

    >>> from abnn.baselines import Single
    >>> predict_loader(Single(nn.Identity()), [torch.zeros(4, 2), torch.ones(3, 2)]).label.shape
    torch.Size([7])
    """
    parts = predictions(predictor, loader, progress, predict)
    # Closed whatever happens, or the thread that loads would wait for ever.
    with closing(parts):
        if out is None:
            return Prediction.cat([part for _, part in parts])
        with Target(out, overwrite) as writer:
            for batch, part in parts:
                writer.append(columns_of(part, batch.labels))
    return Predictions(out)


def predictions(
    predictor: Predictor, loader: Iterable[Any], progress: bool | None, predict: dict[str, Any]
) -> Generator[tuple[Batch, Prediction], None, None]:
    """Each batch with its prediction, on the CPU."""
    total = len(loader) if isinstance(loader, Sized) else None
    first: tuple[Any, Any] | None = None
    with (
        Progress(total, "predict", progress) as bar,
        closing(batches(loader, device_of(predictor))) as feed,
    ):
        for done, batch in enumerate(feed, start=1):
            prediction = to_cpu(predictor.predict(batch.inputs, **predict))
            kind = _kind(prediction, batch, done)
            first = first or kind
            if kind != first:
                raise ValueError(
                    f"Batch {done} has {_describe(*kind)}, and the first had {_describe(*first)}; "
                    "give batches of one kind."
                )
            yield batch, prediction
            bar.update(done, f"{batch.start + batch.rows} inputs")
    if first is None:
        raise ValueError("The loader is empty; give at least one batch.")


def _kind(prediction: Prediction, batch: Batch, done: int) -> tuple[Any, Any]:
    """The shape of an input's probabilities and that of its label, which all rows must share."""
    labels, rows = batch.labels, len(prediction.log_probs)
    if labels is not None and labels.shape[:1] != (rows,):
        raise ValueError(
            f"Batch {done} has labels of shape {tuple(labels.shape)} and {rows} predictions; give "
            "a label for every input."
        )
    shape = tuple(prediction.log_probs.shape[1:])
    return shape, None if labels is None else tuple(labels.shape[1:])


def _describe(shape: Any, label: Any) -> str:
    labels = "no labels" if label is None else f"labels of shape {label} an input"
    return f"probabilities of shape {shape} an input and {labels}"


def to_cpu(prediction: Prediction) -> Prediction:
    """The prediction in main memory, where a data set of them has room."""
    used, members = prediction.samples_used, prediction.members
    return Prediction(
        **{name: getattr(prediction, name).cpu() for name in PER_INPUT},
        samples_used=used if isinstance(used, int) else used.cpu(),
        members=None if members is None else members.cpu(),
    )
