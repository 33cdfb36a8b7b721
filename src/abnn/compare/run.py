"""Train, evaluate and tabulate: every method over every seed, one after another or several at once.

What is done is kept in the run directory, so a comparison that was stopped goes on where it was,
and methods or seeds can be added to it later.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from abnn.compare.methods import ENTRIES, Entry, chosen
from abnn.compare.table import ComparisonTable, table_of
from abnn.compare.trial import Setting, Trial
from abnn.draws import whole_number
from abnn.evaluate import evaluate
from abnn.evaluation import Evaluation
from abnn.files import write
from abnn.order import randomness_kept, seed_epoch
from abnn.progress import Progress
from abnn.record import RECORD, Record, Recorded
from abnn.rundir import data_digest
from abnn.store import structure_of

SETTING = "compare.json"


@dataclass(frozen=True, eq=False)
class Comparison:
    """What a comparison found.

    Args:
        table: mean and spread of every method over the seeds.
        evaluations: of every method, by its title, in the order of the seeds; `None` of one that
            failed.
        failed: what could not be done, by what it was, and why.
        records: of all evaluations, seed by seed in the order of the table, as
            `abnn.report.write_report` takes them.
    """

    table: ComparisonTable
    evaluations: Mapping[str, Sequence[Evaluation | None]]
    failed: Mapping[str, str]
    records: Sequence[Path]

    def __str__(self) -> str:
        """The table, and what failed."""
        return "\n".join(
            [self.table.to_text(), *(f"{what} failed: {why}" for what, why in self.failed.items())]
        )


def compare(
    setting: Setting,
    run: str | PathLike[str],
    *,
    methods: Sequence[str] | str = "all",
    seeds: Sequence[int] = (0, 1, 2),
    jobs: int = 1,
    progress: bool | None = None,
) -> Comparison:
    """Compare methods over seeds, and write the table as text, CSV, LaTeX and JSON.

    The same call goes on where it was stopped. A method whose training fails is left out of the
    table, and the others go on.

    Args:
        setting: what they are compared on.
        run: a directory for all trainings, records of the evaluations, and the table.
        methods: names out of `ENTRIES`, or "all".
        seeds: every method is trained once for each.
        jobs: how many trainings run at once, in processes that share the cores. With more than
            one, all that `setting` holds must be such that it can be pickled.
        progress: show a line of progress; default: on a terminal.

    >>> import tempfile
    >>> data = [(torch.randn(32, 3), torch.randint(2, (32,))) for _ in range(4)]
    >>> build = lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    >>> recipe = abnn.Recipe(epochs=1, prior=None)
    >>> setting = Setting(build, data, data, data, ood={"far": [(9 * data[0][0],)]}, recipe=recipe)
    >>> with tempfile.TemporaryDirectory() as run:
    ...     result = compare(setting, run, methods=["single", "abnn"], seeds=[0, 1])
    >>> list(result.evaluations), len(result.evaluations["ABNN"])
    (['Single model', 'ABNN'], 2)
    """
    entries, folder = chosen(methods), Path(run)
    if not isinstance(seeds, Iterable):
        raise ValueError(f"seeds={seeds!r} must be one or more different numbers.")
    seeds = [whole_number("seed", seed, least=0) for seed in seeds]
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds={list(seeds)} must be one or more different numbers.")
    whole_number("jobs", jobs, least=1)
    _claim(folder, setting)
    failed = _all(setting, folder, _waves(entries, seeds, setting), jobs, progress)
    evaluations = _read(folder, entries, seeds, setting)
    if not any(e for rows in evaluations.values() for e in rows):
        raise RuntimeError(f"Nothing could be compared: {' '.join(dict.fromkeys(failed.values()))}")
    table = table_of(evaluations, list(setting.ood))
    for name, text in (
        ("table.txt", table.to_text()),
        ("table.csv", table.to_csv()),
        ("table.tex", table.to_latex()),
        ("table.json", table.to_json()),
    ):
        write(folder / name, (text.rstrip("\n") + "\n").encode())
    records = [_record(_folder(folder, seed), name) for seed in seeds for name in entries]
    there = [record for record in records if (record / RECORD).is_file()]
    return Comparison(table, evaluations, failed, there)


@dataclass(frozen=True)
class Task:
    """A piece of work: a network to train, or a method to make and evaluate."""

    seed: int
    network: int | None = None
    method: str = ""

    def __str__(self) -> str:
        what = self.method or f"network {self.network}"
        return f"{what} of seed {self.seed}"


def _waves(
    entries: Mapping[str, Entry], seeds: Sequence[int], setting: Setting
) -> list[list[Task]]:
    """What can be done at once, then what builds on it, and then what builds on that."""
    networks = max(entry.starts_from(setting) for entry in entries.values())
    waves: list[list[Task]] = [[Task(s, network=m) for s in seeds for m in range(networks)], [], []]
    for name, entry in entries.items():
        wave = 2 if entry.after else 1 if entry.starts_from(setting) else 0
        waves[wave] += [Task(seed, method=name) for seed in seeds]
    return waves


def _all(
    setting: Setting, folder: Path, waves: list[list[Task]], jobs: int, progress: bool | None
) -> dict[str, str]:
    """Do all tasks; what failed, and why."""
    failed: dict[str, str] = {}
    total, done = sum(map(len, waves)), 0
    with Progress(total, "compare", progress) as bar, _workers(setting, folder, jobs) as pool:
        for wave in waves:
            ready = [
                task for task in wave if not any(str(t) in failed for t in _needs(task, setting))
            ]
            for task, error in _results(setting, folder, ready, pool):
                done += 1
                bar.update(done, str(task))
                if error:
                    failed[str(task)] = error
            for task in wave:
                if task not in ready:
                    done += 1
                    failed[str(task)] = "a network that it starts from failed."
    return failed


def _needs(task: Task, setting: Setting) -> list[Task]:
    """The networks that a method starts from."""
    networks = ENTRIES[task.method].starts_from(setting) if task.method else 0
    return [Task(task.seed, network=member) for member in range(networks)]


def _results(
    setting: Setting, folder: Path, tasks: list[Task], pool: ProcessPoolExecutor | None
) -> Iterator[tuple[Task, str]]:
    """Tasks as they are done, and what went wrong."""
    if pool is None:
        yield from ((task, _do(setting, folder, task)) for task in tasks)
        return
    futures = {pool.submit(_work, task): task for task in tasks}
    for future in as_completed(futures):
        yield futures[future], future.result()


@contextmanager
def _workers(setting: Setting, folder: Path, jobs: int) -> Iterator[ProcessPoolExecutor | None]:
    """Processes that do tasks; none where one task at a time is enough."""
    if jobs == 1:
        yield None
        return
    threads = max(1, torch.get_num_threads() // jobs)
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, context, _start, (setting, folder, threads))
    try:
        yield pool
    except BrokenProcessPool as error:
        raise RuntimeError(
            "A process of the comparison was ended from outside (out of memory?); the same call "
            "goes on from here, with fewer jobs= if it was memory."
        ) from error
    except BaseException:
        # What is under way has checkpoints, and need not be waited for.
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_given: tuple[Setting, Path] | None = None


def _start(setting: Setting, folder: Path, threads: int) -> None:
    """What a process has to know before its first task."""
    global _given
    _given = setting, folder
    torch.set_num_threads(threads)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # in silence: the first process speaks


def _end_with_parent() -> None:
    """Do not go on when the process that wants the results was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(task: Task) -> str:
    assert _given is not None
    return _do(*_given, task)


def _do(setting: Setting, folder: Path, task: Task) -> str:
    """Do a task that is not done yet; what went wrong, or nothing."""
    trial = Trial(setting, task.seed, _folder(folder, task.seed))
    try:
        if task.network is not None:
            trial.base(task.network)
        elif not (_record(trial.folder, task.method) / RECORD).is_file():
            _evaluate(trial, task.method)
    except Exception as error:  # whatever a network does with a method: the others go on
        told = isinstance(error, (ValueError, FloatingPointError, RuntimeError, ImportError))
        return str(error) if told and str(error) else f"{type(error).__name__}: {error}"
    return ""


def _evaluate(trial: Trial, name: str) -> None:
    setting, entry = trial.setting, ENTRIES[name]
    predictor = entry.make(trial)
    evaluate(
        predictor,
        setting.test,
        setting.ood,
        ignore_index=setting.ignore_index,
        record=Record(
            _record(trial.folder, name),
            name=entry.title,
            classes=setting.classes,
            mean=setting.mean,
            std=setting.std,
        ),
        alone=True,
        progress=False,
        **entry.predict(setting),
    )


def _read(
    folder: Path, entries: Mapping[str, Entry], seeds: Sequence[int], setting: Setting
) -> dict[str, list[Evaluation | None]]:
    """The evaluation of every seed, where there is one, with the time of all that it needed."""
    found: dict[str, list[Evaluation | None]] = {}
    for name, entry in entries.items():
        rows = found.setdefault(entry.title, [])
        for seed in seeds:
            trial = Trial(setting, seed, _folder(folder, seed))
            record = _record(trial.folder, name)
            if not (record / RECORD).is_file():
                rows.append(None)
                continue
            evaluation = Recorded(record).evaluation
            cost = evaluation.cost
            if cost is not None and cost.fit_seconds is not None and entry.starts_from(setting):
                seconds = cost.fit_seconds + trial.base_seconds(1)
                evaluation = replace(evaluation, cost=replace(cost, fit_seconds=seconds))
            rows.append(evaluation)
    return found


def _folder(run: Path, seed: int) -> Path:
    return run / f"seed-{seed}"


def _record(folder: Path, name: str) -> Path:
    return folder / "evaluation" / name


def _claim(folder: Path, setting: Setting) -> None:
    """Let a directory hold one comparison only, to which methods and seeds may be added."""
    data = {"train": setting.train, "validation": setting.validation, "test": setting.test}
    data |= {f"ood {name}": loader for name, loader in setting.ood.items()}
    digests = {name: _first_batch(loader) for name, loader in data.items()}
    if not digests["test"]:
        raise ValueError("The test data is empty: there is nothing to compare on.")
    plain = {
        "recipe": setting.recipe.to_dict(),
        "fit": setting.fit.to_dict(),
        "members": setting.members,
        "samples": setting.samples,
        "network": structure_of(setting.build()),
        "ood": list(setting.ood),
        **digests,
    }
    here = json.loads(json.dumps(plain))
    file = folder / SETTING
    if file.is_file():
        before = json.loads(file.read_bytes())
        changed = [name for name in here if here[name] != before.get(name)]
        if changed:
            raise ValueError(
                f"{folder} holds a comparison with other settings ({', '.join(changed)}); use "
                "another run directory."
            )
        return
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"run={str(folder)!r} is a file; give a directory.")
    folder.mkdir(parents=True, exist_ok=True)
    write(file, (json.dumps(here, indent=2) + "\n").encode())


def _first_batch(loader: Iterable[Any]) -> str:
    """What identifies data: a digest of its first batch, in an order that is always the same."""
    with randomness_kept(loader):
        seed_epoch(loader, 0, 0)
        batch = next(iter(loader), None)
    return "" if batch is None else data_digest(batch)
