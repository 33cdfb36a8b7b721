"""Score a predictor on labelled and on out-of-distribution (OOD) data with the paper's metrics."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from typing import Any, Protocol

import torch
from torch import Tensor

from abnn.batches import device_of, inputs_of, length_of, split, to_device
from abnn.distributed import World, world
from abnn.evaluation import Cost, Evaluation
from abnn.metrics import (
    Detection,
    accuracy_at_coverage,
    auroc_bound,
    coverage_at_risk,
    detect_counts,
)
from abnn.prediction import Prediction
from abnn.progress import Progress
from abnn.record import Record, Recorder, Rows
from abnn.tally import Tally
from abnn.turns import agree, in_parts, in_turns


class Predictor(Protocol):
    """Whatever turns inputs into a `Prediction`: an ABNN, a baseline, your own class."""

    def predict(self, *args: Any, **kwargs: Any) -> Prediction:
        """Predict a batch of inputs."""


def evaluate(
    predictor: Predictor,
    id_loader: Iterable[Any],
    ood: Mapping[str, Iterable[Any]] | None = None,
    *,
    ignore_index: int = -100,
    coverages: Sequence[float] = (0.8, 0.9),
    risks: Sequence[float] = (0.01, 0.05),
    record: str | PathLike[str] | Record | None = None,
    alone: bool = False,
    progress: bool | None = None,
    **predict: Any,
) -> Evaluation:
    """Score a predictor on labelled data and, if given, on out-of-distribution datasets.

    Each loader is read once, and what is kept does not grow with the data. Under torchrun, or in a
    process group of yours, all processes call this with the same arguments, share the batches, and
    get the same figures.

    Args:
        predictor: anything with `predict(inputs) -> Prediction`.
        id_loader: batches `(x, y)`, `(x1, x2, ..., y)` or mappings with "labels".
        ood: loaders by the name of their dataset; labels are not needed, and not looked at.
        ignore_index: the label of what is left out, such as void pixels or padding.
        coverages: shares of the most confident predictions whose accuracy is told.
        risks: shares of errors to tolerate, for which the largest such share is told.
        record: a directory for what `abnn report` shows: the prediction of every example, and the
            inputs most worth looking at; or a `Record` that says more. By custom it is
            `RUN/evaluation/NAME`.
        alone: evaluate all of it in this process, whatever other processes there are.
        progress: show a line of progress; default: on a terminal.
        predict: passed on to `predictor.predict`, such as `samples=8, seed=0`.

    >>> from abnn.baselines import Single
    >>> x, y = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
    >>> result = evaluate(Single(torch.nn.Identity()), [(x, y)], ood={"blank": [x * 0]})
    >>> result.accuracy
    50.0
    >>> result.ood["blank"]["msp"].auroc
    100.0
    """
    if not hasattr(predictor, "predict"):
        raise TypeError(
            f"A {type(predictor).__name__} has no predict(x); give an ABNN, or wrap a plain "
            "network as abnn.baselines.Single(net)."
        )
    if ood is not None and not isinstance(ood, Mapping):
        raise ValueError('ood must map names to loaders; give ood={"name": loader}.')
    _check_shares(coverages, risks)
    given = predict | {
        "ignore_index": ignore_index,
        "ood": list(ood or ()),
        "coverages": list(coverages),
        "risks": list(risks),
        "record": record is not None,
    }
    with (World() if alone else world()).joined() as team, ExitStack() as stack:
        agree(team, predictor, [id_loader, *(ood or {}).values()], given)
        recorder: Recorder | None = None
        with team.meeting():
            if record is not None:
                wanted = record if isinstance(record, Record) else Record(record)
                recorder = Recorder(wanted, predictor, ignore_index, team.rank == 0)
                stack.enter_context(recorder)
        run = _Run(team, predictor, recorder, predict, progress)
        known = run.over(
            id_loader, "in-distribution", ignore_index, labelled=True, scored=bool(ood)
        )
        if known.n == 0:
            raise ValueError(
                f"Every in-distribution label is ignore_index ({ignore_index}); give labelled data."
            )
        unknown = {
            name: run.over(loader, name, ignore_index) for name, loader in (ood or {}).items()
        }
        evaluation = Evaluation(
            n=known.n,
            **known.labelled(),
            ood={name: _detections(known, tally) for name, tally in unknown.items()},
            selective=known.selective(coverages, risks),
            sets=known.sets(),
            diversity=known.diversity(),
            ood_diversity={
                name: diversity
                for name, tally in unknown.items()
                if (diversity := tally.diversity(known)) is not None
            },
            cost=run.cost(known),
            auroc_bound=100 * max((_bound(known, t) for t in unknown.values()), default=0.0),
        )
        with team.meeting():
            if recorder is not None:
                recorder.finish(evaluation)
    return evaluation


class _Run:
    """Predict data sets, each once, with all processes."""

    def __init__(
        self,
        team: World,
        predictor: Predictor,
        recorder: Recorder | None,
        predict: dict[str, Any],
        progress: bool | None,
    ) -> None:
        self.team, self.predictor, self.recorder = team, predictor, recorder
        self.predict, self.progress = predict, progress
        self.device = device_of(predictor)
        self.seconds: list[tuple[float, int]] = []  # of every batch, and its inputs

    def over(
        self,
        loader: Iterable[Any],
        dataset: str,
        ignore_index: int,
        *,
        labelled: bool = False,
        scored: bool = True,
    ) -> Tally:
        """The tally of one data set, that of all processes together."""
        own, recorder = Tally(), self.recorder

        def work(number: int, batch: Any) -> tuple[int, Rows | None]:
            inputs = to_device(inputs_of(batch), self.device)
            labels = split(batch)[1] if labelled else None
            prediction = self._predicted(inputs, labels)
            if prediction.log_probs.isnan().any():
                raise ValueError(
                    f"The predictions on batch {number} of the {dataset} data contain NaN; check "
                    "these inputs and the network's weights."
                )
            own.add(prediction, labels, ignore_index, scored)
            rows = recorder.rows(number, batch, prediction, labels) if recorder else None
            return number, rows

        def take(result: tuple[int, Rows | None]) -> None:
            number, rows = result
            if recorder is not None and rows is not None:
                recorder.take(rows)
            bar.update(number)

        total = length_of(loader)
        shown = self.progress if self.team.rank == 0 else False
        with ExitStack() as stack:
            bar = stack.enter_context(Progress(total, f"evaluate {dataset}", shown))
            with self.team.meeting():
                if recorder is not None:
                    stack.enter_context(recorder.dataset(dataset))
            batches = in_turns(
                self.team, self.predictor, loader, _one_by_one, work, take, everywhere=False
            )
            if batches == 0:
                raise ValueError(
                    f"The loader of the {dataset} data is empty; give at least one batch."
                )
        if in_parts(self.predictor):  # every process has worked on every batch
            return own
        whole = Tally()
        for tally in self.team.gather(own):
            whole.merge(tally)
        return whole

    def _predicted(self, inputs: Any, labels: Tensor | None) -> Prediction:
        members = self.recorder is not None and self.recorder.wants_members(labels, self.predict)
        more = {"keep_members": True} if members else {}
        started = time.perf_counter()
        prediction = self.predictor.predict(inputs, **self.predict, **more)
        prediction.log_probs[:1].cpu()  # what runs asynchronously is waited for
        self.seconds.append((time.perf_counter() - started, len(prediction.log_probs)))
        return prediction

    def cost(self, known: Tally) -> Cost:
        """What the predictor says of itself, and what was measured where it says nothing."""
        # The first batch finds out how the network can run.
        timed = self.seconds[1:] or self.seconds
        sums = self.team.gather(tuple(map(sum, zip(*timed, strict=True))) if timed else (0.0, 0))
        seconds, inputs = (sum(column) for column in zip(*sums, strict=True))
        says = {
            name: getattr(self.predictor, attribute, None)
            for name, attribute in (
                ("parameters", "num_added_parameters"),
                ("bytes", "num_added_bytes"),
                ("fit_seconds", "fit_seconds"),
                ("milliseconds", "milliseconds"),
            )
        }
        if says["milliseconds"] is None and inputs:
            says["milliseconds"] = 1000 * seconds / inputs
        return Cost(**says, passes=known.means["passes"].value())


def _check_shares(coverages: Sequence[float], risks: Sequence[float]) -> None:
    """Let what is computed in the end refuse its arguments before the long work."""
    one = torch.ones(1), torch.ones(1, dtype=torch.bool)
    for coverage in coverages:
        accuracy_at_coverage(*one, coverage)
    for risk in risks:
        coverage_at_risk(*one, risk)


def _one_by_one(loader: Iterable[Any]) -> Generator[Any, None, None]:
    yield from loader


def _detections(known: Tally, unknown: Tally) -> dict[str, Detection]:
    return {
        name: detect_counts(known.scores[name], counts).percent()
        for name, counts in unknown.scores.items()
    }


def _bound(known: Tally, unknown: Tally) -> float:
    return max(auroc_bound(known.scores[name], counts) for name, counts in unknown.scores.items())
