"""The curve over the number of draws, against predictions with that many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import abnn
from abnn.curve import SamplesCurve
from nets import mlp

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(40) % 3
DATA = list(zip(X.split(16), Y.split(16), strict=True))


def model(alpha: float = 0.3) -> abnn.ABNN:
    return abnn.convert(mlp(), modes=2, alpha=alpha)


def curve_of(difference: list[float], tolerance: float = 0.01, **more: list[float]) -> SamplesCurve:
    figures = {"difference": difference, "epistemic": difference, **more}
    spread = {name: [0.0] * len(difference) for name in figures}
    samples = [2**i for i in range(len(difference))]
    return SamplesCurve(10, 2, 4, tolerance, samples, figures, spread)


def test_in_the_first_order_a_row_is_what_predict_gives() -> None:
    bnn = model()
    curve = bnn.samples_curve(DATA, max_samples=8, orders=1, seed=3)
    last = bnn.predict(X, samples=8, seed=3)
    for i, L in enumerate([1, 2, 4, 8]):
        result = abnn.evaluate(bnn, DATA, samples=L, seed=3)
        pred = bnn.predict(X, samples=L, seed=3)
        expected = {
            "nll": result.nll,
            "accuracy": result.accuracy,
            "ece": result.ece,
            "epistemic": pred.epistemic.mean().item(),
            "difference": (pred.probs - last.probs).abs().amax(1).mean().item(),
        }
        here = {name: values[i] for name, values in curve.figures.items()}
        assert here == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert curve.n == 40


def test_every_draw_runs_once() -> None:
    bnn, rows = model(), []
    bnn.predict(X)  # settles whether draws may share a batch
    bnn.backbone.register_forward_hook(lambda _, args, out: rows.append(len(out)))
    bnn.samples_curve(DATA, max_samples=8, orders=5)
    assert sum(rows) == 40 * 2 * 8


def test_all_orders_end_with_the_same_draws() -> None:
    curve = model().samples_curve(DATA, max_samples=8, orders=6)
    for name, spread in curve.spread.items():
        assert spread[-1] == pytest.approx(0, abs=1e-6), name
        assert spread[0] > 0, name
    assert curve.figures["difference"][-1] == pytest.approx(0, abs=1e-6)


def test_the_error_falls_with_the_root_of_the_number_of_draws() -> None:
    """Of subsets of a finite set: as sqrt((1 - L / L_max) / L)."""
    bnn = abnn.convert(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)), modes=2, alpha=0.05)
    curve = bnn.samples_curve([X], max_samples=64, orders=32)
    error = torch.tensor(curve.figures["difference"][:-1])
    L = torch.tensor(curve.samples[:-1])
    scaled = error * ((1 - L / 64) / L) ** -0.5
    torch.testing.assert_close(scaled, scaled.mean().expand(6), rtol=0.1, atol=0.0)


def test_the_last_row_need_not_be_a_power_of_two() -> None:
    assert model().samples_curve(DATA, max_samples=12, orders=2).samples == [1, 2, 4, 8, 12]


def test_without_labels_there_are_the_figures_that_need_none() -> None:
    curve = model().samples_curve(X.split(16), max_samples=4, orders=2)
    labelled = model().samples_curve(DATA, max_samples=4, orders=2)
    assert set(curve.figures) == {"epistemic", "difference"}
    assert curve.figures["epistemic"] == labelled.figures["epistemic"]


def test_without_noise_one_draw_is_enough() -> None:
    curve = model(alpha=0.0).samples_curve(DATA, max_samples=4, orders=2)
    assert curve.recommended == 1
    assert curve.advice.startswith("1 draw of every mode (2 in all)")


def test_the_fewest_draws_are_recommended_from_which_on_nothing_changes() -> None:
    assert curve_of([0.5, 0.008, 0.02, 0.004, 0.0]).recommended == 8
    assert curve_of([0.5, 0.008, 0.02, 0.004, 0.0], tolerance=0.02).recommended == 2
    nll = [1.0, 0.9, 0.85, 0.505, 0.5]
    assert curve_of([0.0] * 5, nll=nll).recommended == 8


def test_that_all_draws_equal_themselves_recommends_nothing() -> None:
    curve = curve_of([0.5, 0.2, 0.0])
    assert curve.recommended is None
    assert "Try a larger max_samples" in curve.advice


def test_the_table_has_a_row_for_each_number_of_draws_and_ends_with_advice() -> None:
    curve = model().samples_curve(DATA, max_samples=4, orders=2)
    head, *rows, blank, advice = str(curve).splitlines()
    assert head.split("  ")[0] == "draws a mode"
    assert [row.split()[:2] for row in rows] == [["1", "2"], ["2", "4"], ["4", "8"]]
    assert blank == ""
    assert advice == curve.advice


def test_json_round_trip() -> None:
    curve = model().samples_curve(DATA, max_samples=4, orders=2)
    assert SamplesCurve.from_json(curve.to_json()) == curve
    with pytest.raises(ValueError, match="not a SamplesCurve"):
        SamplesCurve.from_json("[1, 2]")


@pytest.mark.parametrize("labelled", [True, False])
def test_it_is_drawn_to_a_file(tmp_path: Path, labelled: bool) -> None:
    pytest.importorskip("matplotlib")
    curve = model().samples_curve(DATA if labelled else [X], max_samples=4, orders=2)
    curve.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"abnn\[plot\]"):
        curve_of([0.1, 0.0]).plot("curve.png")


@pytest.mark.parametrize(
    ("loader", "options", "message"),
    [
        ([], {}, "empty"),
        (DATA, {"max_samples": 1}, "max_samples=1"),
        (DATA, {"orders": 0}, "orders=0"),
        ([(X, Y), X], {}, "give one kind"),
        ([X * torch.nan], {}, "contain NaN"),
        ([(X, Y * 0 - 100)], {}, "ignore_index"),
    ],
)
def test_bad_requests_are_refused(loader: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model().samples_curve(loader, **{"max_samples": 4, "orders": 2, **options})
