"""A tour on real data: train, convert, fit, save, and compare with what else there is.

The digits 0 to 7 of scikit-learn are what a network learns; the digits 8 and 9, which it never
sees, and pieces of photographs are what it should be unsure of. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import safetensors.torch

import abnn
from abnn.baselines import DeepEnsemble, Single, TemperatureScaling
from abnn.demo import text
from abnn.demo.data import MEAN, STD, Data, Labelled, load_data
from abnn.demo.training import (
    FULL,
    MEMBERS,
    QUICK,
    Candidate,
    Size,
    Work,
    one_thread,
    second_process,
)
from abnn.digests import digest
from abnn.files import write
from abnn.progress import Progress
from abnn.report import write_report
from abnn.rundir import LOSSES

Method = Single | TemperatureScaling | abnn.ABNN | DeepEnsemble

SEED = 10  # seeds 0 to 4 were looked at while this was made, and would flatter it
TITLES = {
    "single": "Network alone",
    "temperature": "Temperature scaling",
    "ensemble": "Deep ensemble",
}
CORRUPTIONS, SEVERITIES = ("gaussian_noise", "contrast", "defocus_blur"), (1, 3, 5)


class Row(NamedTuple):
    """What a method achieved, and what it costs beyond the one network."""

    evaluation: abnn.Evaluation
    parameters: int
    seconds: float
    milliseconds: float


@dataclass(frozen=True)
class Demo:
    """The outcome: a row for every method, all fits that were tried, and the report."""

    rows: dict[str, Row]
    candidates: list[Candidate]
    text: str


def run_demo(
    out: str | PathLike[str],
    seed: int = SEED,
    quick: bool = False,
    *,
    say: Callable[[str], object] = print,
) -> Demo:
    """Compare a network, temperature scaling, its ABNN and an ensemble on handwritten digits.

    After an interruption the same call goes on where it was.

    Args:
        out: a directory for `report.html`, `table.txt`, `results.json`, `network.safetensors` and
            `abnn/`.
        seed: of the split and the noise of the data, of the networks, and of the fits.
        quick: only a few seconds of work, whose numbers mean little.
        say: told what is being done.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as out:
    ...     demo = run_demo(out, quick=True, say=lambda line: None)
    >>> list(demo.rows)
    ['single', 'temperature', 'ABNN', 'ensemble']
    """
    folder, size = Path(out), QUICK if quick else FULL
    data = load_data(seed).first(size.train, size.images)
    run = _claim(folder, data, seed, size)
    work = Work(run, data, seed, size)
    if any(run.iterdir()):
        say(f"Going on from {run}.")
    with ExitStack() as stack:
        stack.enter_context(one_thread())
        second = None if quick else stack.enter_context(second_process(work))
        say(f"1/5  Train a residual network on {size.train} noisy digits, 0 to 7.")
        net, _ = work.network(0)
        fits = len(work.settings)
        say(f"2/5  Convert it to an ABNN of {MEMBERS} modes and fit them; settings to try: {fits}.")
        bnn, candidates, fit = work.best_fit(net, second)
        say(f"3/5  Train {MEMBERS - 1} more networks, for an ensemble to compare with.")
        others = [work.network(member) for member in range(1, MEMBERS)]  # by now, if they were two
        say("4/5  Evaluate on test digits, corrupted ones, unseen digits and photographs.")
        started = time.perf_counter()
        scaled = TemperatureScaling(net).fit([data.validation])
        scaling = time.perf_counter() - started
        methods: dict[str, tuple[Method, float]] = {
            "single": (Single(net), 0.0),
            "temperature": (scaled, scaling),
            "ABNN": (bnn, sum(candidate.seconds for candidate in candidates)),
            "ensemble": (
                DeepEnsemble(
                    [net, *(other for other, _ in others)],
                    fit_seconds=sum(seconds for _, seconds in others),
                ),
                sum(seconds for _, seconds in others),
            ),
        }
        bnn.save(folder / "abnn")
        write(folder / "abnn" / LOSSES, (fit / LOSSES).read_bytes())
        rows = _evaluated(methods, data, folder / "abnn" / "evaluation")
        seen = abnn.Recorded(folder / "abnn/evaluation/ABNN")
        seen.add(bnn.samples_curve([data.validation], max_samples=16, progress=False))
        seen.add(abnn.trajectory(bnn, fit, data.validation, progress=False))
        say("5/5  Write the report.")
        write_report(folder / "abnn", folder / "report.html", title="Handwritten digits")
        parameters = sum(parameter.numel() for parameter in net.parameters())
        temperature = scaled.temperature.item()
        parts = (
            *(["A quick run: the numbers mean little."] if quick else []),
            text.table(rows, data),
            text.pictures(Single(net), bnn, data),
            text.findings(rows, candidates, parameters, temperature),
            text.whereabouts(folder, seed),
        )
    demo = Demo(rows, candidates, "\n\n".join(parts))
    write(folder / "network.safetensors", safetensors.torch.save(net.state_dict()))
    write(folder / "results.json", _json(demo, seed, quick).encode())
    write(folder / "table.txt", f"{demo.text}\n".encode())
    return demo


def _evaluated(
    methods: dict[str, tuple[Method, float]], data: Data, folder: Path
) -> dict[str, Row]:
    """A row for every method, given with the seconds its training took; its record in a folder."""
    rows: dict[str, Row] = {}
    x, y = data.test
    test = list(zip(x.split(100), y.split(100), strict=True))
    ood = {"unseen": data.unseen.split(100), "photos": data.photos.split(100)}
    with Progress(len(methods), "evaluate") as bar:
        for name, (method, seconds) in methods.items():
            classes = [f"a {digit}" for digit in range(8)]
            record = abnn.Record(folder / name, TITLES.get(name, name), classes)
            evaluation = abnn.evaluate(method, test, ood, record=record, progress=False)
            few = {"samples": 2} if isinstance(method, abnn.ABNN) else {}  # it is many images
            corrupted = abnn.robustness(
                method, test, CORRUPTIONS, SEVERITIES, mean=MEAN, std=STD, progress=False, **few
            )
            abnn.Recorded(folder / name).add(corrupted)
            times = [_seconds(method, test) for _ in range(3)]
            milliseconds = 1000 * min(times) * 1000 / len(x)  # of a thousand images
            rows[name] = Row(evaluation, method.num_added_parameters, seconds, milliseconds)
            bar.update(len(rows), name)
    return rows


def _seconds(method: Method, batches: list[Labelled]) -> float:
    started = time.perf_counter()
    for images, _ in batches:
        method.predict(images)
    return time.perf_counter() - started


def _claim(folder: Path, data: Data, seed: int, size: Size) -> Path:
    """The directory in which this very run is kept; other data or settings have another one."""
    runs = folder / "demo-runs"
    if folder.is_dir() and any(folder.iterdir()) and not runs.is_dir():
        raise FileExistsError(f"{folder} holds other files")
    tensors = {str(i): tensor for i, tensor in enumerate((*data.train, *data.validation))}
    settings = f"{abnn.__version__} {size} {digest(tensors)}"
    run = runs / f"seed-{seed}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"
    run.mkdir(parents=True, exist_ok=True)
    return run


def _json(demo: Demo, seed: int, quick: bool) -> str:
    methods = {
        name: json.loads(row.evaluation.to_json())
        | {
            "added_parameters": row.parameters,
            "training_seconds": row.seconds,
            "milliseconds_per_1000_predictions": row.milliseconds,
        }
        for name, row in demo.rows.items()
    }
    settings = {"abnn": abnn.__version__, "seed": seed, "quick": quick}
    fits = [candidate._asdict() for candidate in demo.candidates]
    return json.dumps(settings | {"fits": fits, "methods": methods}, indent=2) + "\n"
