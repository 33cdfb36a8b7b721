"""Predict a data set of any size, batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import ExitStack, closing
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
    if out is None:
        return Prediction.cat(
            [part for _, part in predictions(predictor, loader, progress, predict)]
        )
    with Target(out, overwrite) as writer:
        for batch, part in predictions(predictor, loader, progress, predict):
            writer.append(columns_of(part, batch.labels))
    return Predictions(out)


def predictions(
    predictor: Predictor, loader: Iterable[Any], progress: bool | None, predict: dict[str, Any]
) -> Iterator[tuple[Batch, Prediction]]:
    """Each batch with its prediction, on the CPU."""
    total = len(loader) if isinstance(loader, Sized) else None
    first: tuple[Any, bool] | None = None
    with ExitStack() as stack:
        bar = stack.enter_context(Progress(total, "predict", progress))
        feed = stack.enter_context(closing(batches(loader, device_of(predictor))))
        for done, batch in enumerate(feed, start=1):
            prediction = to_cpu(predictor.predict(batch.inputs, **predict))
            kind = (prediction.log_probs.shape[1:], batch.labels is not None)
            first = first or kind
            _check_alike(first, kind, done)
            yield batch, prediction
            bar.update(done, f"{batch.start + batch.rows} inputs")
    if first is None:
        raise ValueError("The loader is empty; give at least one batch.")


def _check_alike(first: tuple[Any, bool], here: tuple[Any, bool], done: int) -> None:
    if first[0] != here[0]:
        raise ValueError(
            f"Batch {done} gives probabilities of shape {tuple(here[0])} an input, and the first "
            f"gave {tuple(first[0])}; give inputs of one size."
        )
    if first[1] != here[1]:
        raise ValueError(
            f"Batch {done} has {'labels' if here[1] else 'no labels'}, unlike the first; give "
            "labels with all batches or with none."
        )


def to_cpu(prediction: Prediction) -> Prediction:
    """The prediction in main memory, where a data set of them has room."""
    used, members = prediction.samples_used, prediction.members
    return Prediction(
        **{name: getattr(prediction, name).cpu() for name in PER_INPUT},
        samples_used=used if isinstance(used, int) else used.cpu(),
        members=None if members is None else members.cpu(),
    )
