"""SWAG and MultiSWAG: their moments, draws and statistics, and a posterior that is known."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

import abnn
from abnn.baselines.multi_swag import MultiSWAG
from abnn.baselines.swag import SWAG, flat
from abnn.inference import inference
from abnn.store import ArtifactError
from fitting import data
from nets import Shared, mlp

CONSTANT: dict[str, Any] = {"lr": 0.1, "schedule": "constant", "epochs": 2}


class Watched(SWAG):
    """Keeps the whole way of the weights."""

    way: list[Tensor]

    def after_step(self, step: int, steps: int) -> None:
        if step == 1:
            self.way = []
        self.way.append(flat(dict(self.net.named_parameters())).double())
        super().after_step(step, steps)


def trained(net: nn.Module, **arguments: Any) -> SWAG:
    swag = SWAG(net, **arguments)
    abnn.train(swag, data(), **CONSTANT)
    return swag


def posterior(classes: int = 2, rank: int = 2, members: int = 2) -> SWAG:
    """A SWAG of 4 weights a class whose moments are random."""
    net = nn.Linear(4, classes, bias=False)
    swag = SWAG(net, rank=rank, members=members, scale=0.7)
    swag.mean.normal_()
    swag.variance.exponential_()
    swag.deviations.normal_()
    swag.count.fill_(100)
    return swag


# What is taken


@pytest.mark.parametrize(
    "snapshots, start, steps",
    [
        (40, 0.5, [7, 8, 9, 10, 11, 12]),
        (3, 0.5, [8, 10, 12]),
        (4, 0.3, [5, 7, 9, 12]),
    ],
)
def test_the_moments_are_those_of_the_way_of_the_weights(
    snapshots: int, start: float, steps: list[int]
) -> None:
    swag = Watched(mlp(), rank=4, snapshots=snapshots, start=start)
    abnn.train(swag, data(), **CONSTANT)
    taken = torch.stack([swag.way[step - 1] for step in steps])
    assert swag.taken == len(steps)
    torch.testing.assert_close(swag.mean.double(), taken.mean(0), atol=1e-6, rtol=1e-5)
    variance = taken.square().mean(0) - taken.mean(0).square()
    torch.testing.assert_close(swag.variance.double(), variance, atol=1e-7, rtol=1e-3)


def test_the_deviations_are_the_last_ones_from_the_means_of_their_time() -> None:
    swag = Watched(mlp(), rank=4)
    abnn.train(swag, data(), **CONSTANT)
    taken = swag.way[6:]
    expected = [taken[i] - torch.stack(taken[: i + 1]).mean(0) for i in range(2, 6)]
    rows = sorted(swag.deviations.double(), key=lambda row: float(row[0]))
    for row, other in zip(rows, sorted(expected, key=lambda row: float(row[0])), strict=True):
        torch.testing.assert_close(row, other, atol=1e-6, rtol=1e-4)


def test_variance_survives_rounding_where_weights_hardly_move() -> None:
    swag = SWAG(nn.Linear(1, 1, bias=False), snapshots=100, start=0)
    steps = 1 + 1e-5 * torch.randn(100, generator=torch.Generator().manual_seed(0))
    for i, value in enumerate(steps, start=1):
        nn.init.constant_(swag.net.weight, value.item())
        swag.after_step(i, 100)
    expected = steps.double().var(correction=0).item()
    assert swag.variance.item() == pytest.approx(expected, rel=0.01)


def test_a_killed_collection_goes_on_with_its_deviations(tmp_path: Path) -> None:
    class Killed(SWAG):
        def after_step(self, step: int, steps: int) -> None:
            super().after_step(step, steps)
            if step == 10:
                raise KeyboardInterrupt

    whole = trained(cnn_of_features(), rank=3)
    run: dict[str, Any] = {**CONSTANT, "run": tmp_path / "run", "checkpoint_seconds": 0.0}
    Killed.__name__ = "SWAG"
    with pytest.raises(KeyboardInterrupt):
        abnn.train(Killed(cnn_of_features(), rank=3), data(), **run)
    resumed = SWAG(cnn_of_features(), rank=3)
    abnn.train(resumed, data(), **run)
    state = resumed.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in whole.state_dict().items())


def test_a_second_training_takes_its_own_snapshots() -> None:
    swag = trained(mlp(), rank=4)
    start = {f"net.{name}": value.clone() for name, value in swag.net.state_dict().items()}
    abnn.train(swag, data(), **CONSTANT)
    fresh = SWAG(mlp(), rank=4)
    fresh.load_state_dict(start, strict=False)
    abnn.train(fresh, data(), **CONSTANT)
    for name in ("mean", "variance", "deviations", "count"):
        assert torch.equal(getattr(swag, name), getattr(fresh, name))


# What is drawn


def test_draws_have_the_covariance_of_the_equation() -> None:
    S, P, K = 2000, 8, 3
    swag = posterior(2, K, members=S)
    draws = torch.stack([flat(swag.weights(member)) for member in range(S)]).double()
    D = swag.deviations.double().T
    cov = 0.7**2 * (swag.variance.double().diag() / 2 + D @ D.T / (2 * (K - 1)))
    std = cov.diag().sqrt()
    torch.testing.assert_close(
        (draws.mean(0) - swag.mean) / std, torch.zeros(P).double(), atol=4 / S**0.5, rtol=0
    )
    error = (draws.T.cov() - cov) / torch.outer(std, std)
    assert error.abs().max() < 4 * (2 / S) ** 0.5  # the standard error of a variance is sqrt(2 / S)


def test_fewer_snapshots_than_the_rank_are_divided_by_their_own_number() -> None:
    swag = posterior(rank=4)
    swag.variance.zero_()
    other = posterior(rank=4)
    other.load_state_dict(swag.state_dict())
    swag.count.fill_(2)  # the other rows do not count
    swag.deviations[2:].fill_(torch.nan)
    other.deviations[2:].zero_()
    few, many = (flat(s.weights(0)) - s.mean for s in (swag, other))
    torch.testing.assert_close(few, many * 3**0.5)  # 1 / (2 - 1) and 1 / (4 - 1)


def test_without_scale_every_member_is_the_mean() -> None:
    swag = trained(mlp(nn.LayerNorm), scale=0.0, members=2)
    members = swag.predict(torch.ones(2, 4), keep_members=True).members
    plain = copy.deepcopy(swag.net).eval()
    nn.utils.vector_to_parameters(swag.mean, plain.parameters())
    assert members is not None
    for member in members:
        torch.testing.assert_close(member, plain(torch.ones(2, 4)).softmax(1).detach())


def test_members_are_a_function_of_the_seed_and_the_first_of_more() -> None:
    x = torch.ones(2, 4)
    swag, more, other = (trained(mlp(), members=m, seed=s) for m, s in ((2, 0), (4, 0), (2, 1)))
    few = swag.predict(x, keep_members=True).members
    many = more.predict(x, samples=2, keep_members=True).members
    different = other.predict(x, keep_members=True).members
    assert few is not None
    assert many is not None
    assert different is not None
    assert torch.equal(few, many)
    assert not torch.equal(few, different)


class Regression(SWAG):
    """Trained on the squared errors of a linear model; labels are the rows of the targets."""

    targets: Tensor

    def training_loss(self, inputs: Any, labels: Tensor, ignore_index: int = -100) -> Tensor:
        error = self.network_logits(inputs) - self.targets[labels]
        return 0.5 * error.square().sum(1).mean()


def test_around_a_quadratic_the_mean_is_nearer_the_posterior_mean_than_the_iterates_are() -> None:
    torch.manual_seed(0)
    n, decay = 60, 0.05
    X = torch.randn(n, 3)
    Y = X @ torch.randn(3, 2) + torch.randn(n, 2)
    swag = Regression(nn.Linear(3, 2, bias=False), snapshots=400, start=0.5)
    swag.targets = Y
    loader = [(X[rows], rows) for rows in torch.arange(n).split(3)]
    recipe: dict[str, Any] = {"lr": 0.05, "schedule": "constant", "momentum": 0.0}
    abnn.train(swag, loader, epochs=40, weight_decay=decay, **recipe)
    # Weight decay is the prior of a posterior whose mean is that of ridge regression.
    optimum = torch.linalg.solve(X.T @ X / n + decay * torch.eye(3), X.T @ Y / n).T.flatten()
    off, spread = (swag.mean - optimum).norm(), swag.variance.sum().sqrt()
    assert off < 0.25 * spread
    assert spread > 0.05


class Means(SWAG):
    """Every weight w is the mean of data x ~ N(w, 1), and has the loss (w - x)^2 / 2."""

    def training_loss(self, inputs: Any, labels: Tensor, ignore_index: int = -100) -> Tensor:
        loss: Tensor = 0.5 * (self.net.weight.flatten() - inputs).square().sum()
        return loss


def test_at_the_rate_at_which_sgd_samples_the_posterior_it_is_the_posterior() -> None:
    """SGD on one example a step is an AR(1) process, of variance `lr s^2 / (2 - lr)`."""
    torch.manual_seed(0)
    n, weights, steps = 50, 2000, 4000
    data = torch.randn(n, weights)
    drawn = data.gather(0, torch.randint(n, (steps, weights)))
    loader = [(x, torch.zeros(1, dtype=torch.long)) for x in drawn]
    swag = Means(nn.Linear(1, weights, bias=False), snapshots=400, members=8)
    rate: dict[str, Any] = {"lr": 2 / (n + 1), "schedule": "constant", "momentum": 0.0}
    abnn.train(swag, loader, epochs=1, weight_decay=0.0, **rate)
    # The posterior is N(mean of the data, 1 / n), and s^2 is 1 but for what n examples vary.
    mean, variance = data.mean(0), data.var(0, correction=0) / n
    draws = torch.stack([swag.weights(m)["weight"].flatten() for m in range(8)])
    assert (swag.mean - mean).square().mean() < 0.05 * variance.mean()
    assert swag.variance.mean().item() == pytest.approx(variance.mean().item(), rel=0.06)
    off = (draws - mean).square().mean()
    assert off.item() == pytest.approx(variance.mean().item(), rel=0.15)


# The statistics of norms


def cnn_of_features() -> nn.Module:
    """Four features in, as of the data; batch and instance norms."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 4)),
        nn.Conv1d(1, 6, 3, padding=1),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Conv1d(6, 6, 3, padding=1),
        nn.InstanceNorm1d(6, track_running_stats=True),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


class SharedBatchNorm(Shared):
    """One batch norm that sees two distributions in every pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first[1] = self.second[1] = nn.BatchNorm1d(4)


@pytest.mark.parametrize("net", [mlp(), SharedBatchNorm()])
def test_refreshed_statistics_are_those_of_update_bn(net: nn.Module) -> None:
    swag = trained(net, members=3)
    momenta = [m.momentum for m in swag.net.modules() if isinstance(m, nn.BatchNorm1d)]
    assert momenta == [0.1]
    for member in range(3):
        other = copy.deepcopy(swag.net)
        other.load_state_dict(swag.weights(member), strict=False)
        update_bn(data(), other)
        statistics = {n: b for n, b in other.named_buffers() if "running" in n}
        torch.testing.assert_close(swag.statistics[member], flat(statistics))
        x = torch.randn(5, 4)
        expected = other.eval()(x)
        with inference(swag):
            got = list(swag.member_logits(x))[member].squeeze(0)
        torch.testing.assert_close(got, expected.detach(), atol=1e-5, rtol=1e-5)


def test_instance_norms_average_too() -> None:
    swag = trained(cnn_of_features(), members=1)
    net = copy.deepcopy(swag.net).train()
    net.load_state_dict(swag.weights(0), strict=False)
    means = [net[:5](x).mean((0, 2)) for x, _ in data()]
    kept = swag.statistics[0, 12:18]  # after the mean and variance of the batch norm
    torch.testing.assert_close(kept, torch.stack(means).mean(0).detach(), atol=1e-5, rtol=1e-5)


def test_norms_that_stay_in_evaluation_mode_keep_their_statistics() -> None:
    class Frozen(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> Frozen:
            return super().train(False)

    net = nn.Sequential(nn.Linear(4, 3), Frozen(3))
    net[1].running_mean = torch.arange(3.0)
    swag = trained(net, members=2)
    expected = torch.tensor([0.0, 1, 2, 1, 1, 1])
    assert torch.equal(swag.statistics, expected.expand(2, 6))


def test_a_network_without_statistics_needs_no_pass() -> None:
    swag = posterior()

    swag.after_training(map(int, ["no batch"]))  # would fail if it were asked for one
    assert swag.statistics.shape == (2, 0)


# What it costs, and what is refused


def test_variances_and_deviations_are_what_it_adds() -> None:
    swag = SWAG(nn.Linear(4, 3), rank=5)
    assert swag.num_added_parameters == 15 * (1 + 5)


def test_what_cannot_be_done_is_refused() -> None:
    for name, least in (("rank", 2), ("snapshots", 2), ("members", 1)):
        with pytest.raises(ValueError, match=f"{name}=0 is not a whole number of at least {least}"):
            SWAG(mlp(), **dict[str, Any]({name: 0}))
    with pytest.raises(ValueError, match="start=1 is not a number of at least 0 and below 1"):
        SWAG(mlp(), start=1)
    with pytest.raises(ValueError, match="has no convolution and no linear layer"):
        SWAG(nn.LayerNorm(4))
    with pytest.raises(RuntimeError, match=r"train it by abnn.train\(swag, loader\) first"):
        SWAG(mlp()).predict(torch.ones(1, 4))
    with pytest.raises(ValueError, match="samples=5 is more than the 4 members"):
        trained(mlp(), members=4).predict(torch.ones(1, 4), samples=5)
    with pytest.raises(ValueError, match="samples=0 is not a whole number"):
        trained(mlp(), members=4).predict(torch.ones(1, 4), samples=0)


def test_a_training_too_short_is_refused_and_changes_nothing() -> None:
    swag = SWAG(mlp())
    before = copy.deepcopy(swag.state_dict())
    with pytest.raises(ValueError, match="would take 1 snapshot in 2 steps.*train for more steps"):
        abnn.train(swag, data(2), epochs=1)
    assert all(torch.equal(before[name], value) for name, value in swag.state_dict().items())


# MultiSWAG


def swags(M: int = 2, **arguments: Any) -> list[SWAG]:
    found = [SWAG(mlp(), rank=4, members=3, **arguments) for _ in range(M)]
    for m, swag in enumerate(found):
        abnn.train(swag, data(), seed=m, **CONSTANT)
    return found


def test_a_mixture_averages_all_members_alike() -> None:
    parts, x = swags(), torch.randn(4, 4)
    multi = MultiSWAG(parts)
    mean = torch.stack([swag.predict(x).probs for swag in parts]).mean(0)
    torch.testing.assert_close(multi.predict(x).probs, mean)
    assert multi.predict(x).samples_used == 6
    few = torch.stack([swag.predict(x, samples=1).probs for swag in parts]).mean(0)
    torch.testing.assert_close(multi.predict(x, samples=1).probs, few)


def test_a_mixture_costs_its_other_means_too() -> None:
    P = sum(parameter.numel() for parameter in mlp().parameters())
    multi = MultiSWAG([SWAG(mlp(), rank=4) for _ in range(3)])
    assert multi.num_added_parameters == 3 * (1 + 4) * P + 2 * P


def test_a_mixture_takes_as_long_as_its_parts() -> None:
    parts = swags()
    assert None not in [swag.fit_seconds for swag in parts]
    assert MultiSWAG(parts).fit_seconds == sum(swag.fit_seconds or 0 for swag in parts)
    assert MultiSWAG([SWAG(mlp())]).fit_seconds is None


def test_a_mixture_is_rebuilt_from_plain_arguments_and_its_state() -> None:
    multi, x = MultiSWAG(swags(scale=0.5)), torch.randn(4, 4)
    arguments = json.loads(json.dumps(multi.arguments))
    other = MultiSWAG.rebuild(mlp(), None, arguments)
    other.load_state_dict(multi.own_state(), strict=False)
    assert torch.equal(other.predict(x).probs, multi.predict(x).probs)
    assert other.arguments == multi.arguments
    assert other.network_state() == multi.network_state()


def test_impossible_mixtures_are_refused() -> None:
    one = SWAG(mlp())
    with pytest.raises(ValueError, match="has no SWAGs"):
        MultiSWAG([])
    with pytest.raises(ValueError, match="same SWAG twice"):
        MultiSWAG([one, one])
    with pytest.raises(TypeError, match="not a Sequential"):
        MultiSWAG([mlp()])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="different numbers of members"):
        MultiSWAG([one, SWAG(mlp(), members=3)])
    with pytest.raises(RuntimeError, match="train each of its SWAGs"):
        abnn.train(MultiSWAG([one]), data(), **CONSTANT)
    with pytest.raises(ArtifactError, match="different kinds"):
        MultiSWAG([one, SWAG(mlp(width=5))]).arguments  # noqa: B018
    with pytest.raises(ValueError, match=r"differ in shape \(\(1, 2\) and \(1, 3\)\)"):
        MultiSWAG([posterior(2), posterior(3)]).predict(torch.ones(1, 4))
