"""Anytime prediction: the statistics of its rule, and that it changes only how many draws run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import abnn
from abnn.anytime import looks, sample_until
from abnn.draws import Draw, channel_noise
from abnn.student import student
from nets import Bypassing, TimeFirst, cnn, mlp

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
FIELDS = ("log_probs", "aleatoric", "variation_ratio", "max_logit", "energy")


def moved(net: nn.Module | None = None, **kwargs: Any) -> abnn.ABNN:
    """An ABNN whose modes differ, with noise that some inputs feel and some do not."""
    bnn = abnn.convert(net or mlp(), **{"modes": 3, "alpha": 0.03, **kwargs})
    torch.manual_seed(5)
    for parameter in bnn.trainable_parameters():
        parameter.data.mul_(1 + 0.2 * torch.rand_like(parameter))
    return bnn


def anytime(bnn: abnn.ABNN, x: Any, **options: Any) -> abnn.Prediction:
    """Independent draws to a small tolerance: of few inputs, some need more draws than others."""
    return bnn.predict(
        x, **{"samples": "auto", "draws": "independent", "tolerance": 0.01, **options}
    )


def used_by(prediction: abnn.Prediction) -> Tensor:
    assert isinstance(prediction.samples_used, Tensor)
    return prediction.samples_used


def assert_same(a: abnn.Prediction, b: abnn.Prediction) -> None:
    assert torch.equal(a.used_by_input(), b.used_by_input())
    for name in FIELDS:
        torch.testing.assert_close(
            getattr(a, name), getattr(b, name), rtol=1e-4, atol=1e-5, equal_nan=True
        )


def assert_as_fixed(bnn: abnn.ABNN, x: Any, auto: abnn.Prediction, **options: Any) -> None:
    """Every input is predicted as by `predict` with the number of draws that it used."""
    used = used_by(auto)
    for count in used.unique().tolist():
        fixed = bnn.predict(x, samples=count // bnn.modes, **options)
        assert_same(auto[used == count], fixed[used == count])


# The statistics


@pytest.mark.parametrize("level", [0.5, 0.975, 0.9975])
@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 9, 30, 59, 60])
def test_students_t_is_that_of_scipy(level: float, degrees: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    assert student(level, degrees) == pytest.approx(stats.t.ppf((1 + level) / 2, degrees))


class Gaussian:
    """Inputs whose two probabilities are 0.5 + offset of the mode + sigma of the input * normal."""

    def __init__(self, sigma: Tensor, modes: int, offset: float = 0.0, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.noise = torch.randn(modes, 64, len(sigma), generator=g, dtype=torch.float64)
        self.sigma = sigma.double()
        self.offset = offset * torch.linspace(-1, 1, modes).double()

    def __call__(self, rows: Tensor | None, draws: Sequence[Draw], size: int) -> Iterator[Tensor]:
        p = torch.stack(
            [0.5 + self.offset[d.mode] + self.sigma * self.noise[d.mode, d.index] for d in draws]
        )
        p = p if rows is None else p[:, rows]
        yield torch.stack([p, 1 - p], dim=2).log()


@pytest.mark.parametrize("modes", [1, 2, 4])
@pytest.mark.parametrize("sigma", [0.001, 0.003, 0.01, 0.02, 0.04])
def test_an_input_that_stops_is_within_the_tolerance_as_often_as_promised(
    modes: int, sigma: float
) -> None:
    run = Gaussian(torch.full((4000,), sigma), modes, offset=0.0 if modes == 1 else 0.2)
    auto = sample_until(run, range(modes), tolerance=0.01, max_samples=64)
    stopped = used_by(auto) < 64 * modes
    wrong = (auto.probs[:, 0] - 0.5).abs()[stopped] > 0.01
    # 5 % of all inputs, those that never stop included, and three standard errors for luck.
    assert wrong.sum() <= 4000 * 0.05 + 3 * (4000 * 0.05 * 0.95) ** 0.5


def test_more_noise_needs_more_draws() -> None:
    sigma = torch.tensor([0.0001, 0.004, 0.01, 0.03]).repeat_interleave(100)
    used = (
        used_by(sample_until(Gaussian(sigma, 4), range(4), tolerance=0.01))
        .view(4, 100)
        .double()
        .mean(1)
    )
    assert used[0] == 8
    assert (used.diff() > 0).all()


def test_disagreement_between_modes_costs_no_draws() -> None:
    sigma = torch.full((100,), 1e-4)
    for offset in (0.0, 0.4):
        used = used_by(sample_until(Gaussian(sigma, 4, offset), range(4)))
        assert (used == 8).all()


def test_a_mode_that_varies_alone_counts_alone() -> None:
    """With one noisy mode of four, there is one degree of freedom, not four."""
    even, lone = (Gaussian(torch.full((500,), 0.004), 4, seed=s) for s in (0, 0))
    lone.noise[1:] = 0
    lone.noise[0] *= 2  # the same standard error of the mean
    shares = [
        (used_by(sample_until(run, range(4), tolerance=0.01)) == 8).double().mean()
        for run in (even, lone)
    ]
    assert shares[1] < shares[0]


def test_looks_double() -> None:
    assert looks(2) == [2]
    assert looks(48) == [2, 4, 8, 16, 32, 48]
    assert looks(4, size=2) == [4]


def test_without_noise_two_rounds_are_enough() -> None:
    bnn = moved(alpha=0.0)
    auto = anytime(bnn, X, tolerance=1e-6)
    assert (used_by(auto) == 6).all()
    assert_as_fixed(bnn, X, auto)


def test_a_smaller_tolerance_never_uses_fewer_draws() -> None:
    bnn = moved()
    used = [used_by(anytime(bnn, X, tolerance=t)) for t in (0, 0.005, 0.02, 0.1, 9)]
    assert all((a >= b).all() for a, b in pairwise(used))
    assert (used[0] == 48).all()
    assert (used[-1] == 6).all()


def test_a_larger_maximum_changes_only_inputs_that_were_not_done() -> None:
    bnn = moved(alpha=0.1)
    short, long = (anytime(bnn, X, max_samples=n) for n in (8, 32))
    done = used_by(short) < 24
    assert 0 < done.sum() < len(X)
    assert_same(short[done], long[done])
    assert (used_by(long)[~done] >= 24).all()


# What an input gets does not depend on anything else


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("draws", ["independent", "antithetic"])
def test_an_input_is_predicted_as_with_that_many_samples(seed: int, draws: Any) -> None:
    bnn = moved(alpha=0.2 if draws == "antithetic" else 0.03)
    options: Any = {"seed": seed, "draws": draws}
    auto = anytime(bnn, X, **options)
    assert len(used_by(auto).unique()) > 1
    assert_as_fixed(bnn, X, auto, **options)


@pytest.mark.parametrize("size", [1, 5, 24])
def test_other_inputs_of_the_batch_change_nothing(size: int) -> None:
    bnn = moved()
    whole = anytime(bnn, X)
    order = torch.randperm(len(X))
    parts = [anytime(bnn, part) for part in X[order].split(size)]
    assert_same(abnn.Prediction.cat(parts), whole[order])


@pytest.mark.parametrize("chunk", [1, 2, 7, 100])
def test_chunks_change_nothing(chunk: int) -> None:
    bnn = moved()
    assert_same(anytime(bnn, X, plan=abnn.Plan(draws=chunk)), anytime(bnn, X))


def test_only_inputs_in_need_run_again() -> None:
    bnn, rows = moved(), []
    anytime(bnn, X)  # settles whether draws may share a batch
    bnn.backbone.register_forward_hook(lambda _, args, out: rows.append(len(out)))
    auto = anytime(bnn, X)
    assert sum(rows) == used_by(auto).sum()


def test_modes_can_be_chosen() -> None:
    bnn = moved()
    auto = anytime(bnn, X, modes=[0, 2])
    assert set(used_by(auto).tolist()) <= {4, 8, 16, 32}
    few = used_by(auto) == 4
    assert_same(auto[few], bnn.predict(X, samples=2, modes=[0, 2])[few])


class Mixing(nn.Module):
    """What is said of an example depends on all others of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(nn.LayerNorm)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y + 2 * y.mean(0)


@pytest.mark.filterwarnings("ignore:Draws of this network can't share a batch")
@pytest.mark.parametrize("net", [Mixing, Bypassing, TimeFirst])
def test_networks_that_cannot_fold_are_right(net: type[nn.Module]) -> None:
    bnn = moved(net(), alpha=0.05)
    x = X.view(24, 1, 4) if net is TimeFirst else X
    auto = anytime(bnn, x, tolerance=0.02 if net is Mixing else 0.005)
    assert not bnn.is_foldable(x)
    assert len(used_by(auto).unique()) > 1
    assert_as_fixed(bnn, x, auto)


@pytest.mark.parametrize("noise", ["example", "element"])
def test_noise_of_its_own_for_every_example_is_right(noise: str) -> None:
    bnn = moved(noise=noise)
    auto = anytime(bnn, X)
    assert len(used_by(auto).unique()) > 1
    assert_as_fixed(bnn, X, auto)


def test_an_input_that_is_not_batched_stays_whole() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp(nn.LayerNorm)

        def forward(self, x: Tensor, weights: Tensor) -> Tensor:
            y: Tensor = self.net(x * weights.sum())
            return y

    bnn = moved(Weighted(), alpha=0.05)
    for rows in range(1, 24, 5):  # one of these may be the number of inputs that run again
        x = (X, torch.full((rows,), 1 / rows))
        assert_as_fixed(bnn, x, anytime(bnn, x, tolerance=0.005))


def test_an_image_stops_as_a_whole() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 1)).eval()
    bnn = moved(net, alpha=0.1)
    x = torch.randn(6, 3, 8, 8) * torch.linspace(0.1, 3, 6).view(6, 1, 1, 1)
    auto = anytime(bnn, x)
    assert auto.probs.shape == (6, 5, 6, 6)
    assert used_by(auto).shape == (6,)
    assert len(used_by(auto).unique()) > 1
    assert_as_fixed(bnn, x, auto)


def test_images_keep_their_memory_format() -> None:
    seen = []
    bnn = moved(cnn(), alpha=0.2)
    x = torch.randn(6, 3, 8, 8) * torch.linspace(0, 3, 6).view(6, 1, 1, 1)
    x = x.to(memory_format=torch.channels_last)
    anytime(bnn, x)
    last = torch.channels_last
    bnn.backbone.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].is_contiguous(memory_format=last))
    )
    assert len(used_by(anytime(bnn, x)).unique()) > 1
    assert all(seen)


def test_what_has_no_answer_gets_no_more_draws() -> None:
    bnn, x = moved(), X.clone()
    expected = anytime(bnn, X)
    x[3] = torch.nan
    auto = anytime(bnn, x)
    assert used_by(auto)[3] == 6
    assert auto.probs[3].isnan().all()
    rest = torch.arange(len(X)) != 3
    assert_same(auto[rest], expected[rest])


def test_classes_that_are_masked_out_do_not_matter() -> None:
    def run(rows: Tensor | None, draws: Sequence[Draw], size: int) -> Iterator[Tensor]:
        for logits in Gaussian(torch.tensor([0.001, 0.02]), 2)(rows, draws, size):
            yield torch.cat([logits, torch.full_like(logits[:, :, :1], -torch.inf)], dim=2)

    used = used_by(sample_until(run, range(2), tolerance=0.02))
    assert used[0] < used[1]


def test_evaluate_passes_it_on() -> None:
    bnn, labels = moved(), torch.arange(24) % 3
    result = abnn.evaluate(bnn, [(X, labels)], samples="auto", tolerance=0.02)
    expected = bnn.predict(X, samples="auto", tolerance=0.02)
    assert result.nll == pytest.approx(-expected.log_probs[range(24), labels].mean().item())


def test_half_precision_is_judged_in_single() -> None:
    bnn = moved(mlp().bfloat16())
    auto = anytime(bnn, X.bfloat16(), tolerance=0.02)
    assert auto.probs.dtype == torch.float32
    assert auto.probs.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_members": True}, "pass a number of samples"),
        ({"samples": "all"}, "or 'auto'"),
        ({"tolerance": -0.1}, "tolerance=-0.1"),
        ({"tolerance": "small"}, "tolerance='small'"),
        ({"tolerance": float("nan")}, "tolerance=nan"),
        ({"max_samples": 3}, "max_samples=3 is not a whole number of at least 4"),
        ({"max_samples": 1, "draws": "independent"}, "whole number of at least 2"),
        ({"max_samples": 7, "draws": "antithetic"}, "come in pairs"),
        ({"draws": "sobol"}, "'independent' or 'antithetic'"),
        ({"x": torch.empty(0, 4)}, "no example"),
    ],
)
def test_bad_requests_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moved().predict(**{"x": X, "samples": "auto", **options})


# Antithetic draws


def test_pairs_are_the_default_of_auto_and_only_of_it() -> None:
    bnn = moved()
    auto = bnn.predict(X, samples="auto")
    assert_same(auto, bnn.predict(X, samples="auto", draws="antithetic", tolerance=0.05))
    assert torch.equal(bnn.predict(X).probs, bnn.predict(X, draws="independent").probs)


def test_antithetic_draws_are_pairs_of_opposite_noise() -> None:
    noise = [channel_noise(Draw(3, 1, i, "antithetic"), [4, 2]) for i in range(4)]
    for k in (0, 2):
        assert all(torch.equal(a, -b) for a, b in zip(noise[k], noise[k + 1], strict=True))
    assert not torch.equal(noise[0][0].abs(), noise[2][0].abs())


def test_more_antithetic_samples_contain_the_fewer() -> None:
    few, many = (
        moved().predict(X, samples=s, draws="antithetic", keep_members=True).members for s in (2, 3)
    )
    assert few is not None
    assert many is not None
    torch.testing.assert_close(many[[0, 1, 3, 4, 6, 7]], few)


def test_what_is_linear_in_the_noise_cancels_in_a_pair() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    pair = [Draw(0, 0, i, "antithetic") for i in range(2)]
    logits = abnn.convert(net, alpha=0.3).logits(X, pair)
    assert not torch.allclose(logits[0], logits[1], atol=1e-2)
    torch.testing.assert_close(logits.mean(0), net(X))


def test_pairs_are_judged_by_their_means() -> None:
    """Members of a pair differ, but their mean hardly varies: two pairs are enough."""
    bnn = moved(alpha=0.05)
    pairs = used_by(anytime(bnn, X, tolerance=0.005, draws="antithetic"))
    singles = used_by(anytime(bnn, X, tolerance=0.005))
    assert (singles > 12).any()
    assert (pairs == 12).double().mean() > 0.9
