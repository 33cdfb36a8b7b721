"""Predict a data set of any size, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any, overload

from abnn.batches import device_of, length_of
from abnn.distributed import World, world
from abnn.evaluate import Predictor
from abnn.prediction import Prediction
from abnn.prefetch import Batch, batches
from abnn.progress import Progress
from abnn.results import Array, Predictions, columns_of, target
from abnn.turns import agree, in_turns


@overload
def predict_loader(
    predictor: Predictor,
    loader: Iterable[Any],
    *,
    out: None = None,
    overwrite: bool = False,
    alone: bool = False,
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
    alone: bool = False,
    progress: bool | None = None,
    **predict: Any,
) -> Predictions: ...


def predict_loader(
    predictor: Predictor,
    loader: Iterable[Any],
    *,
    out: str | PathLike[str] | None = None,
    overwrite: bool = False,
    alone: bool = False,
    progress: bool | None = None,
    **predict: Any,
) -> Prediction | Predictions:
    """Predict a data set of any size; the next batch is loaded while the last is computed.

    Of an ABNN it is a method: `bnn.predict_loader(loader, samples="auto", out="preds/")`.

    Under torchrun, or in a process group of yours, all processes call this with the same
    arguments. The batches are dealt out to them, whole, and all get the result that one process
    would get, in the order of the loader. Process 0 alone writes to `out`, and no disk needs to be
    shared; what the others get can be read where that disk is.

    Args:
        predictor: anything with `predict(inputs) -> Prediction`.
        loader: batches as for `evaluate`; labels are stored if there are any, and not needed.
        out: where to write, batch by batch: a directory of memory-mapped .npy files, or a file that
            ends with ".parquet" (needs pyarrow). It appears when it is complete, never before, and
            memory does not grow with the data set. Default: one `Prediction`, on the CPU.
        overwrite: replace earlier predictions at `out`.
        alone: predict all of it in this process, whatever other processes there are.
        progress: show a line of progress; default: on a terminal.
        predict: passed on to `predictor.predict`, such as `samples=8, seed=0`.

    >>> from abnn.baselines import Single
    >>> predict_loader(Single(nn.Identity()), [torch.zeros(4, 2), torch.ones(3, 2)]).label.shape
    torch.Size([7])
    """
    with (World() if alone else world()).joined() as team, ExitStack() as stack:
        agree(team, predictor, [loader], predict | {"out": out is not None})
        parts: list[Prediction] = []
        store: Callable[[Any], None] = parts.append
        with team.meeting():
            if out is not None and team.rank == 0:
                store = stack.enter_context(target(out, overwrite)).append
            total = length_of(loader)
            shown = progress if team.rank == 0 else False
            bar = stack.enter_context(Progress(total, "predict", shown))

        def work(number: int, batch: Batch) -> _Part:
            prediction = predictor.predict(batch.inputs, **predict).cpu()
            kind = _kind(prediction, batch, number)
            rows = prediction if out is None else columns_of(prediction, batch.labels)
            return _Part(number, len(prediction.log_probs), kind, rows)

        feed = partial(batches, device=device_of(predictor))
        whole = _Whole(store, bar)
        if in_turns(team, predictor, loader, feed, work, whole.take, everywhere=out is None) == 0:
            raise ValueError("The loader is empty; give at least one batch.")
        if out is None:
            return Prediction.cat(parts)
        with team.meeting():
            stack.close()
            saved = Predictions(out) if team.rank == 0 else None
        handle = team.gather(saved)[0]
        assert handle is not None
        return handle


@dataclass(frozen=True, eq=False)
class _Part:
    """The prediction of one batch; what goes into files is made where it was predicted."""

    number: int
    count: int
    kind: tuple[Any, Any]
    rows: Prediction | Mapping[str, Array]


class _Whole:
    """Stores the parts of a data set, which must be of one kind."""

    def __init__(self, store: Callable[[Any], None], bar: Progress) -> None:
        self.store, self.bar = store, bar
        self.first: tuple[Any, Any] | None = None
        self.count = 0

    def take(self, part: _Part) -> None:
        self.first = self.first or part.kind
        if part.kind != self.first:
            raise ValueError(
                f"Batch {part.number} has {_describe(*part.kind)}, and the first had "
                f"{_describe(*self.first)}; give batches of one kind."
            )
        self.store(part.rows)
        self.count += part.count
        self.bar.update(part.number, f"{self.count} inputs")


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
