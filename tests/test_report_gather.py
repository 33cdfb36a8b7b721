"""From records to the values of a report."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import abnn
from abnn.baselines import Conformal, DeepEnsemble, Single
from abnn.record import Record, Recorded
from abnn.report.gather import gather
from abnn.report.page import render

X = torch.rand(80, 3, 8, 8, generator=torch.Generator().manual_seed(0))
FAR = {"far": [torch.rand(30, 3, 8, 8, generator=torch.Generator().manual_seed(1)) / 9]}


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(216, 4))


def labels() -> Tensor:
    y: Tensor = net()(X).argmax(1)
    y[::5] = (y[::5] + 1) % 4
    return y


LOADER = [(X, labels())]


def evaluated(run: Path, name: str, predictor: Any, loader: Any = LOADER, **more: Any) -> None:
    record = Record(run / "evaluation" / name, classes=["ape", "bee", "cow", "doe"])
    abnn.evaluate(predictor, loader, FAR, record=record, **more)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a fit, the original network, its ABNN, and an ensemble."""
    folder, plain = tmp_path / "run", net().eval()
    bnn = abnn.convert(plain, modes=2)
    abnn.fit(bnn, [(X, labels())] * 8, epochs=1, lr=0.05, validation=LOADER, run=folder)
    evaluated(folder, "plain", Single(plain))
    evaluated(folder, "ABNN", bnn, samples=3)
    evaluated(folder, "deep", DeepEnsemble([plain, net(1).eval()]))
    return folder


def test_methods_come_with_all_that_was_recorded(run: Path) -> None:
    data = gather([run], replicates=50)
    assert [m.name for m in data.methods] == ["plain", "ABNN", "deep"]
    assert [m.reference for m in data.methods] == [True, False, False]
    assert (data.n, data.classes, data.ood, data.notes) == (80, 4, {"far": 30}, [])
    assert data.parameters == sum(p.numel() for p in net().parameters())
    assert {m.run for m in data.methods} == {""}
    for method in data.methods:
        stored = Recorded(run / "evaluation" / method.name)
        assert method.figures == stored.evaluation.figures()
        assert method.cost == stored.evaluation.cost
        low, high = method.intervals["accuracy"]
        assert low <= method.figures["accuracy"] <= high
        assert set(method.thresholds) == set(abnn.scores.SCORES)
    plain, bayesian, _ = data.methods
    assert not plain.verdicts
    assert set(bayesian.verdicts) == set(bayesian.intervals) >= {"nll", "ood/far/msp/auroc"}
    difference = bayesian.figures["nll"] - plain.figures["nll"]
    assert bayesian.verdicts["nll"].difference == pytest.approx(difference, abs=1e-5)


def test_the_fit_is_shown_with_the_abnn(run: Path) -> None:
    plain, bayesian, deep = gather([run], replicates=50).methods
    assert plain.fit is deep.fit is None
    assert bayesian.fit is not None
    assert bayesian.fit.steps == list(range(8))
    assert len(bayesian.fit.losses) == 2
    assert list(bayesian.fit.validation) == ["original", "mode 0", "mode 1", "all modes"]


def test_examples_are_named_and_pictured(run: Path) -> None:
    _, bayesian, deep = gather([run], replicates=50).methods
    assert bayesian.gallery is not None
    first = bayesian.gallery.mistakes[0]
    assert first.label in ("ape", "bee", "cow", "doe")
    assert first.predicted == first.classes[0] != first.label
    assert np.array(first.members).shape == (2, 3, 4)
    np.testing.assert_allclose(np.mean(first.members, (0, 1)), first.probs, rtol=1e-5)
    assert first.image is not None
    png = base64.b64decode(first.image.partition("base64,")[2])
    pixels = torch.from_numpy(np.array(Image.open(io.BytesIO(png)))).movedim(-1, 0)
    assert torch.equal(pixels, (255 * X[first.index]).round().byte())
    assert bayesian.gallery.ood["far"][0].label is None
    assert deep.gallery is not None
    assert np.array(deep.gallery.uncertain[0].members).shape == (1, 2, 4)


def test_modes_disagree_as_their_draws_do(run: Path) -> None:
    _, bayesian, deep = gather([run], replicates=50).methods
    members = np.array(Recorded(run / "evaluation/ABNN").disagreement)
    between = np.array(bayesian.disagreement)
    assert between.shape == (2, 2)
    assert between[0, 1] == pytest.approx(members[:3, 3:].mean())
    assert between[0, 0] == pytest.approx(members[:3, :3].sum() / 6)
    assert np.array(deep.disagreement).shape == (2, 2)


def test_the_samples_curve_is_shown_where_it_was_measured(run: Path) -> None:
    bnn = abnn.load(run, net().eval())
    curve = bnn.samples_curve(LOADER, max_samples=2)
    Recorded(run / "evaluation/ABNN").add(curve)
    assert [m.samples_curve for m in gather([run], replicates=50).methods] == [None, curve, None]


def test_the_page_tells_what_prediction_sets_hold(run: Path) -> None:
    sets = Conformal(Single(net().eval()), 0.8).fit(LOADER)
    evaluated(run, "sets", sets)
    data = gather([run], replicates=50)
    found = Recorded(run / "evaluation/sets").evaluation.sets
    assert found is not None
    assert data.methods[-1].figures["sets/size"] == found.size
    page = render(data)
    assert "Prediction sets" in page
    assert f">{found.coverage:.1f}<" in page


def test_a_reference_can_be_named(run: Path) -> None:
    data = gather([run], reference="deep", replicates=50)
    assert [m.name for m in data.methods] == ["deep", "plain", "ABNN"]
    with pytest.raises(ValueError, match=r"There is no method 'deeep'; .*deep"):
        gather([run], reference="deeep")


def test_what_saw_other_examples_is_not_tested_against_the_reference(run: Path) -> None:
    x, y = LOADER[0]
    evaluated(run, "half", Single(net(2)), [(x[:40], y[:40])])
    data = gather([run], replicates=50)
    half = data.methods[-1]
    assert half.name == "half"
    assert not half.verdicts
    assert "half was evaluated on other examples than plain (in-distribution)" in data.notes[0]


def test_where_only_foreign_data_differ_the_rest_is_tested(run: Path) -> None:
    abnn.evaluate(Single(net(2)), LOADER, {"far": [X[:9]]}, record=run / "evaluation/other")
    other = gather([run], replicates=50).methods[-1]
    assert list(other.verdicts) == ["accuracy", "nll", "brier", "ece", "aurc"]


def test_only_the_first_runs_are_shown_in_detail_if_asked(run: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        other = tmp_path / f"seed{seed}/run"
        evaluated(other, "ABNN", abnn.convert(net().eval(), modes=2, alpha=0.1), seed=seed)
    runs = [run, tmp_path / "seed1/run", tmp_path / "seed2/run"]
    whole, brief = (gather(runs, replicates=50, detailed=n) for n in (None, 1))
    assert brief.seeds == whole.seeds
    own = gather([run], replicates=50)
    assert [m.name for m in brief.methods] == [m.name for m in own.methods]
    assert any("Of 3 runs, 1 is shown" in note for note in brief.notes)
    with pytest.raises(ValueError, match="detailed=0 shows no run"):
        gather(runs, detailed=0)


def test_runs_of_several_seeds_are_summed_up(run: Path, tmp_path: Path) -> None:
    for seed in (1, 2):
        other = tmp_path / f"seed{seed}/run"
        evaluated(other, "plain", Single(net().eval()))
        evaluated(other, "ABNN", abnn.convert(net().eval(), modes=2, alpha=0.1), seed=seed)
    runs = [run, tmp_path / "seed1/run", tmp_path / "seed2/run"]
    data = gather(runs, replicates=50)
    # The original network is the same in all three, and shown once.
    assert [m.name for m in data.methods] == ["plain", "ABNN", "deep", "ABNN", "ABNN"]
    assert [m.run for m in data.methods if m.name == "ABNN"][1:] == ["seed1/run", "seed2/run"]
    assert list(data.seeds) == ["ABNN"]
    spread = data.seeds["ABNN"]["accuracy"]
    values = [m.figures["accuracy"] for m in data.methods if m.name == "ABNN"]
    assert (spread.mean, spread.sd) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
    assert spread.verdict in ("better", "worse", "no difference shown")


def test_what_is_the_same_in_every_run_is_shown_once(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    evaluated(other, "plain", Single(net().eval()))
    evaluated(other, "deep", DeepEnsemble([net().eval(), net(2).eval()]))
    names = [(m.name, m.run) for m in gather([run, other], replicates=50).methods]
    assert names == [("plain", ""), ("ABNN", ""), ("deep", "run"), ("deep", "other")]


def test_of_the_names_of_runs_is_left_what_tells_them_apart(tmp_path: Path) -> None:
    runs = [tmp_path / f"lr0.1-wide-seed{seed}" for seed in range(2)]
    for seed, folder in enumerate(runs):
        evaluated(folder, "net", Single(net(seed)))
    assert [m.run for m in gather(runs, replicates=50).methods] == ["seed0", "seed1"]


def test_a_single_record_is_a_run(run: Path) -> None:
    assert [m.name for m in gather([run / "evaluation/deep"], replicates=50).methods] == ["deep"]


@pytest.mark.parametrize("given", [[], ["no/such/run"]])
def test_without_a_record_there_is_nothing_to_report(given: list[str]) -> None:
    with pytest.raises(ValueError, match="no run to report on|holds no record of an evaluation"):
        gather(given)
