"""What a run directory tells of a training or a fit: where and how it ran, and its figures."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import abnn
from abnn import Recipe
from abnn.baselines import SWAG, Single
from abnn.rundir import read_losses
from fitting import data, equal
from nets import mlp
from test_train import Breaking, values

PLAIN = Recipe(epochs=3, lr=0.1, prior=None, schedule="multistep", milestones=(1, 2))


def table(run: Path) -> list[dict[str, str]]:
    with open(run / "losses.csv", newline="") as file:
        return list(csv.DictReader(file))


def events(run: Path) -> dict[str, list[tuple[int, float]]]:
    """All that is in the event files: by name, the steps and values."""
    name = "tensorboard.backend.event_processing.event_accumulator"
    read = import_module(name).EventAccumulator(
        str(run / "tensorboard"), size_guidance={"scalars": 0}
    )
    read.Reload()
    names = read.Tags()["scalars"]
    return {name: [(e.step, e.value) for e in read.Scalars(name)] for name in names}


def train(run: Path, loader: Any = None, **arguments: Any) -> abnn.TrainResult:
    return abnn.train(mlp(), data() if loader is None else loader, PLAIN, run=run, **arguments)


def fit(run: Path, loader: Any = None, **arguments: Any) -> abnn.FitResult:
    bnn = abnn.convert(mlp(), modes=2)
    return abnn.fit(bnn, data() if loader is None else loader, PLAIN, run=run, **arguments)


@pytest.mark.parametrize(("run", "what"), [(train, "Sequential of 83"), (fit, "ABNN(Sequential")])
def test_it_tells_what_ran_where(tmp_path: Path, run: Callable[..., Any], what: str) -> None:
    run(tmp_path, config={"data": "npz:rows.npz"}, seed=7)
    told = json.loads((tmp_path / "run.json").read_text())
    assert told["trained"].startswith(what)
    assert (told["seed"], told["processes"]) == (7, 1)
    assert told["config"] == {"data": "npz:rows.npz"}
    (here,) = told["environments"]
    assert here["torch"] == torch.__version__
    assert here["python"] == sys.version.split()[0]
    assert Recipe.load(tmp_path / "recipe.toml") == PLAIN.with_(seed=7)


def test_a_run_that_goes_on_elsewhere_has_several_places(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, Breaking(data(), 4), checkpoint_seconds=0)
    file = tmp_path / "run.json"
    file.write_text(file.read_text().replace(torch.__version__, "1.0"))
    train(tmp_path)
    train(tmp_path)
    versions = [place["torch"] for place in json.loads(file.read_text())["environments"]]
    assert versions == ["1.0", torch.__version__]


@pytest.mark.parametrize("run", [train, fit])
def test_the_learning_rate_of_every_step_is_told(tmp_path: Path, run: Callable[..., Any]) -> None:
    run(tmp_path)
    rates = [float(row["lr"]) for row in table(tmp_path)]
    assert rates == pytest.approx([0.1] * 6 + [0.01] * 6 + [0.001] * 6)


def test_the_losses_of_a_fit_are_still_read(tmp_path: Path) -> None:
    result = fit(tmp_path)
    steps, losses = read_losses(tmp_path)
    assert steps == list(range(18))
    assert torch.equal(losses, result.losses)


def test_validation_after_every_epoch_changes_nothing_else(tmp_path: Path) -> None:
    plain, checked = (nn.Sequential(nn.Dropout(), mlp()) for _ in range(2))
    abnn.train(plain, data(), PLAIN)
    result = abnn.train(checked, data(), PLAIN, validation=data(2), run=tmp_path)
    assert equal(values(checked), values(plain))
    expected = abnn.evaluate(Single(checked), data(2))
    last = result.validation[-1]
    assert last == pytest.approx((18, expected.nll, expected.accuracy, expected.ece), rel=1e-6)
    rows = [row for row in table(tmp_path) if row["nll"]]
    assert [int(row["step"]) for row in rows] == [5, 11, 17]
    assert [float(row["nll"]) for row in rows] == [figures.nll for figures in result.validation]
    assert "On validation data: NLL" in str(result)


def test_validation_comes_at_the_end_too() -> None:
    result = abnn.train(mlp(), data(), PLAIN, epochs=2.5, validation=data(2))
    assert [figures.steps for figures in result.validation] == [6, 12, 15]
    stream = abnn.train(mlp(), iter(data()), steps=4, validation=data(2))
    assert [figures.steps for figures in stream.validation] == [4]


def test_a_method_is_measured_when_it_is_done() -> None:
    swag = SWAG(mlp(), rank=3, snapshots=4, start=0.2, members=3)
    result = abnn.train(swag, data(), PLAIN, validation=data(2))
    (figures,) = result.validation
    assert figures.steps == 18
    assert figures.nll == pytest.approx(abnn.evaluate(swag, data(2)).nll)


@pytest.mark.parametrize("good", [3, 6, 7, 12])
def test_a_resumed_training_has_every_figure_once(tmp_path: Path, good: int) -> None:
    straight = train(tmp_path / "straight", validation=data(2), tensorboard=True)
    arguments: dict[str, Any] = {"validation": data(2), "tensorboard": True}
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "killed", Breaking(data(), good), checkpoint_seconds=0, **arguments)
    assert len(events(tmp_path / "killed")["train/loss"]) == good
    resumed = train(tmp_path / "killed", **arguments)
    assert resumed.validation == straight.validation
    assert table(tmp_path / "killed") == table(tmp_path / "straight")
    told = events(tmp_path / "killed")
    assert told == events(tmp_path / "straight")
    assert told["train/loss"] == list(enumerate(straight.losses.tolist()))
    assert [step for step, _ in told["validation/nll"]] == [5, 11, 17]
    assert told["lr"][6][1] == pytest.approx(0.01)


def test_the_modes_of_a_fit_are_told_to_tensorboard(tmp_path: Path) -> None:
    result = fit(tmp_path, tensorboard=True, modes_at_once=1, checkpoint_seconds=0)
    told = events(tmp_path)
    assert told.keys() == {"train/mode_0", "train/mode_1", "lr"}
    for m in range(2):
        assert told[f"train/mode_{m}"] == list(enumerate(result.losses[:, m].tolist()))


def test_a_run_without_tensorboard_has_no_event_files(tmp_path: Path) -> None:
    train(tmp_path)
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.parametrize("run", [train, fit])
def test_what_can_not_be_told_is_refused(tmp_path: Path, run: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="tensorboard=True needs a directory.*pass run= too"):
        run(None, tensorboard=True)
    with pytest.raises(ValueError, match="config= needs a directory"):
        run(None, config={"data": "mine"})
    with pytest.raises(ValueError, match="config= can't be written as JSON.*give texts"):
        run(tmp_path / "run", config={"data": object()})
    assert not (tmp_path / "run").exists()


def test_tensorboard_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r'pip install "abnn\[tensorboard\]"'):
        train(tmp_path / "run", tensorboard=True)
