"""From run directories to what a report shows."""

from __future__ import annotations

import base64
import io
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from abnn.builders import nearest
from abnn.curve import SamplesCurve
from abnn.evaluation import Cost
from abnn.gallery import Striking
from abnn.prediction import Prediction
from abnn.progress import Progress
from abnn.record import ADDED, RECORD, Recorded
from abnn.report import curves
from abnn.report.data import Example, Fit, Gallery, Method, ReportData, Spread
from abnn.robustness import Robustness
from abnn.rundir import LOSSES, read_losses
from abnn.scores import SCORES
from abnn.statistics import (
    HIGHER_IS_BETTER,
    Comparison,
    bootstrap,
    compare,
    compare_seeds,
    over_seeds,
)
from abnn.store import CONFIG
from abnn.trajectory import Trajectory

T = TypeVar("T")

EVALUATION = "evaluation"  # the directory of a run's records
_SHOWN = 5  # classes of an example
_STEPS = 300  # of a loss curve


@dataclass(frozen=True)
class Source:
    """A record, and the run that it is from."""

    run: Path
    recorded: Recorded


def gather(
    runs: Sequence[str | PathLike[str]],
    *,
    title: str | None = None,
    reference: str | None = None,
    replicates: int = 1000,
    detailed: int | None = None,
    progress: bool | None = None,
) -> ReportData:
    """Read the records of runs, and compare them.

    Args:
        runs: run directories with `evaluation/NAME/`, or single records.
        title: of the report; default: of the runs.
        reference: name of the method that all others are compared with; default: the first plain
            network, which `abnn.baselines.Single` is.
        replicates: resampled sets behind every interval; see `abnn.statistics`.
        detailed: how many of the runs are shown one by one, the first ones; the others count where
            mean and spread over runs are told. Default: all.
        progress: show a line of progress; default: on a terminal.
    """
    if not runs:
        raise ValueError("There is no run to report on; give at least one directory.")
    if detailed is not None and detailed < 1:
        raise ValueError(f"detailed={detailed} shows no run; give at least 1.")
    sources = _without_twins([source for run in runs for source in _sources(Path(run))])
    first = _reference(sources, reference)
    every = [first, *(source for source in sources if source is not first)]
    order = list(dict.fromkeys(source.run for source in every))
    ordered = [source for source in every if source.run in order[:detailed]]
    labels = _labels([source.run for source in ordered])
    names = [source.recorded.name for source in ordered]
    notes = _notes(first, ordered)
    if len(ordered) < len(every):
        notes.append(
            f"Of {len(order)} runs, {detailed} is shown in detail, as are its intervals and "
            "tests; what is said over seeds is of all."
            if detailed == 1
            else f"Of {len(order)} runs, the first {detailed} are shown in detail; what is said "
            "over seeds is of all."
        )
    # A run is one fit, that of its first record with modes.
    fitted = {source.run: source for source in reversed(ordered) if source.recorded.modes}
    methods = []
    with Progress(len(ordered), "report", progress) as bar:
        for source in ordered:
            own, verdicts = source.recorded, dict[str, Comparison]()
            intervals = bootstrap(own.examples(), replicates=replicates)
            shared = own.shared_with(first.recorded)
            if source is not first and own.datasets[0] in shared:
                a, b = (record.examples(ood=shared) for record in (first.recorded, own))
                verdicts = compare(a, b, replicates=max(2000, replicates))
            methods.append(
                _method(
                    source,
                    labels[source.run] if names.count(own.name) > 1 else "",
                    source is first,
                    fitted.get(source.run) is source,
                    {name: (row.low, row.high) for name, row in intervals.items()},
                    verdicts,
                )
            )
            bar.update(len(methods), source.recorded.name)
    import abnn

    return ReportData(
        title=title or f"Uncertainty of {first.run.absolute().name}",
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=abnn.__version__,
        n=first.recorded.known.rows,
        classes=first.recorded.known["probs"].shape[1],
        ood={name: saved.rows for name, saved in first.recorded.ood.items()},
        methods=methods,
        seeds=_seeds(every, first),
        notes=notes,
        parameters=first.recorded.parameters,
    )


# Finding what there is


def _sources(run: Path) -> list[Source]:
    if (run / RECORD).is_file():
        return [Source(run.parent.parent if run.parent.name == EVALUATION else run, Recorded(run))]
    records = [Recorded(file.parent) for file in sorted(run.glob(f"{EVALUATION}/*/{RECORD}"))]
    if not records:
        raise ValueError(
            f"{run} holds no record of an evaluation; make one by abnn evaluate {run}, or by "
            f'abnn.evaluate(predictor, loader, record="{run / EVALUATION / "NAME"}").'
        )
    return [Source(run, record) for record in sorted(records, key=lambda record: record.made)]


def _without_twins(sources: list[Source]) -> list[Source]:
    """What is the same in every run, as the original network is, is shown once."""
    kept: list[Source] = []
    seen = []
    for source in sources:
        own = source.recorded
        key = (own.name, own.predictor, own.digests, own.evaluation)
        if key not in seen:
            seen.append(key)
            kept.append(source)
    return kept


def _reference(sources: list[Source], name: str | None) -> Source:
    if name is not None:
        names = [source.recorded.name for source in sources]
        if name not in names:
            raise ValueError(f"There is no method {name!r}; {nearest(name, names)}")
        return sources[names.index(name)]
    plain = [source for source in sources if source.recorded.predictor == "Single"]
    return (plain or sources)[0]


def _labels(runs: list[Path]) -> dict[Path, str]:
    """Names of the runs, as short as they can be told apart by; of one alone there is none."""
    if len(set(runs)) == 1:
        return {runs[0]: ""}
    parts = {run: run.absolute().parts for run in runs}
    depth = 1
    while len({p[-depth:] for p in parts.values()}) < len(parts) and depth < 32:
        depth += 1
    names = {run: os.sep.join(p[-depth:]) for run, p in parts.items()}
    # What all begin with tells nothing: of "lr0.1-seed0" and "lr0.1-seed1" the seed is left.
    begin = os.path.commonprefix(list(names.values()))  # noqa: RUF071  (not of paths, but of texts)
    shared = re.match(r".*[-_ /]|", begin)
    assert shared is not None
    return {run: name[shared.end() :] for run, name in names.items()}


def _notes(first: Source, sources: list[Source]) -> list[str]:
    notes = []
    if first.recorded.of_pixels:
        notes.append(
            "Of every input only some pixels (or tokens) were kept, at random. Those of one input "
            "are not independent, so the intervals are too narrow."
        )
    for source in sources:
        shared = source.recorded.shared_with(first.recorded)
        if odd := [name for name in source.recorded.datasets if name not in shared]:
            notes.append(
                f"{source.recorded.name} was evaluated on other examples than "
                f"{first.recorded.name} ({', '.join(odd)}), so it is not tested against it there."
            )
    return notes


# One method


def _method(
    source: Source,
    label: str,
    reference: bool,
    with_fit: bool,
    intervals: dict[str, tuple[float, float]],
    verdicts: dict[str, Comparison],
) -> Method:
    recorded = source.recorded
    known = recorded.known.prediction()
    correct = known.label == torch.from_numpy(np.array(recorded.known["labels"]))
    ood = {name: saved.prediction() for name, saved in recorded.ood.items()}
    score = SCORES["msp"]
    lines = {name: curves.roc_and_pr(score(known), score(p)) for name, p in ood.items()}
    return Method(
        name=recorded.name,
        run=label,
        reference=reference,
        figures=recorded.evaluation.figures(),
        intervals=intervals,
        verdicts=verdicts,
        cost=recorded.evaluation.cost or Cost(),
        reliability=curves.reliability_bins(known.confidence, correct),
        thresholds={name: curves.thresholds(name, known, correct, ood) for name in SCORES},
        roc={name: roc for name, (roc, _) in lines.items()},
        pr={name: pr for name, (_, pr) in lines.items()},
        risk_coverage=curves.risk_curve(known.confidence, correct),
        dots=curves.dots(known, correct, ood),
        disagreement=_between_modes(recorded),
        gallery=_gallery(recorded, known, ood),
        robustness=_added(recorded, "Robustness", Robustness.from_json),
        samples_curve=_added(recorded, "SamplesCurve", SamplesCurve.from_json),
        fit=_fit(source.run) if with_fit else None,
        trajectory=_added(recorded, "Trajectory", Trajectory.from_json),
    )


def _added(recorded: Recorded, kind: str, read: Callable[[str], T]) -> T | None:
    file = recorded.path / ADDED[kind]
    return read(file.read_text()) if file.is_file() else None


def _between_modes(recorded: Recorded) -> list[list[float]]:
    """Disagreement of the modes; a mean over their draws, and within a mode over pairs of them."""
    if recorded.disagreement is None:
        return []
    members = np.array(recorded.disagreement)
    M, S = recorded.modes or 0, len(members)
    if M < 2 or S % M:
        return recorded.disagreement
    L = S // M
    blocks = members.reshape(M, L, M, L).mean((1, 3))
    if L > 1:  # a draw never differs from itself
        blocks[np.diag_indices(M)] *= L / (L - 1)
    found: list[list[float]] = blocks.tolist()
    return found


def _fit(run: Path) -> Fit | None:
    if not (run / LOSSES).is_file():
        return None
    steps, losses = read_losses(run)
    width = max(1, len(steps) // 50)
    kernel = np.ones(width)
    smooth = []
    for column in losses.double().numpy().T:
        seen = np.isfinite(column)
        total = np.convolve(np.where(seen, column, 0.0), kernel, "same")
        number = np.convolve(seen.astype(float), kernel, "same")
        smooth.append(np.where(number > 0, total / np.maximum(number, 1), np.nan))
    rows = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _STEPS)).round().astype(int))
    fitted: dict[str, Any] = {}
    if (run / CONFIG).is_file():
        fitted = json.loads((run / CONFIG).read_bytes()).get("fit") or {}
    return Fit(
        steps=[steps[row] for row in rows],
        losses=[[None if np.isnan(v) else float(v) for v in column[rows]] for column in smooth],
        validation=fitted.get("validation", {}),
        seconds=fitted.get("seconds"),
    )


# The inputs


def _gallery(recorded: Recorded, known: Prediction, ood: dict[str, Prediction]) -> Gallery | None:
    if recorded.of_pixels:
        return None
    labels = torch.from_numpy(np.array(recorded.known["labels"]))
    own = [(one, _example(recorded, one, known, labels)) for one in recorded.striking()]
    return Gallery(
        mistakes=[example for one, example in own if one.kind == "mistakes"],
        uncertain=[example for one, example in own if one.kind == "uncertain"],
        ood={
            name: [_example(recorded, one, p, None) for one in recorded.striking(number)]
            for number, (name, p) in enumerate(ood.items(), start=1)
        },
    )


def _example(
    recorded: Recorded, one: Striking, prediction: Prediction, labels: Tensor | None
) -> Example:
    row = prediction[one.index : one.index + 1]
    probs = row.probs[0]
    best: list[int] = probs.argsort(descending=True, stable=True)[:_SHOWN].tolist()
    label = None if labels is None else int(labels[one.index])
    if label is not None and label not in best:
        best[-1] = label
    members: list[list[list[float]]] = []
    if one.members is not None and len(one.members) > 1:
        M = recorded.modes if recorded.modes and len(one.members) % recorded.modes == 0 else 1
        members = one.members[:, best].unflatten(0, (M, -1)).tolist()
    return Example(
        index=one.index,
        image=None if one.image is None else _png(one.image),
        label=None if label is None else recorded.class_name(label),
        predicted=recorded.class_name(int(row.label)),
        confidence=row.confidence.item(),
        total=row.total.item(),
        epistemic=row.epistemic.item(),
        classes=[recorded.class_name(k) for k in best],
        probs=probs[best].tolist(),
        members=members,
    )


def _png(image: Tensor) -> str:
    """An image `[C, H, W]` of bytes as a data URI."""
    from PIL import Image  # comes with matplotlib, which draws the report's figures

    pixels = image.movedim(0, -1).squeeze(-1).numpy()
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


# Several runs


def _seeds(sources: list[Source], first: Source) -> dict[str, dict[str, Spread]]:
    """Mean and spread of methods that several runs have, which are taken for seeds."""
    by_name: dict[str, list[dict[str, float]]] = {}
    for source in sources:
        figures = source.recorded.evaluation.figures()
        known = {k: v for k, v in figures.items() if k.rpartition("/")[2] in HIGHER_IS_BETTER}
        by_name.setdefault(source.recorded.name, []).append(known)
    base = by_name[first.recorded.name]
    found: dict[str, dict[str, Spread]] = {}
    for name, runs in by_name.items():
        if len(runs) < 2:
            continue
        shared = [k for k in runs[0] if all(k in run for run in (*runs, *base))]
        some = [{k: run[k] for k in shared} for run in runs]
        # The original network has no seed: it is the same beside every run.
        beside = base if len(base) == len(runs) else base[:1] * len(runs)
        tested: dict[str, Comparison] = {}
        if name != first.recorded.name:
            tested = compare_seeds([{k: run[k] for k in shared} for run in beside], some)
        found[name] = {
            k: Spread(row.mean, row.sd or 0.0, row.n, tested[k].verdict if tested else None)
            for k, row in over_seeds(some).items()
        }
    return found
