"""TRADI: what its filter tracks, and what it draws."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import abnn
from abnn.baselines import Single
from abnn.baselines.tradi import TRADI, kalman_gain, kalman_step
from abnn.outputs import Inputs
from fitting import data
from nets import cnn, mlp


def textbook(x: Any, u: Any, z: Any, Q: float, R: float) -> Any:
    """A Kalman filter with matrices: x_t = x_(t-1) + u_t + noise(Q), z_t = x_t + noise(R)."""
    identity = np.eye(len(x))
    P = 0 * identity
    for step, measured in zip(u, z, strict=True):
        x, P = x + step, P + Q * identity
        K = P @ np.linalg.inv(P + R * identity)
        x, P = x + K @ (measured - x), (identity - K) @ P
        yield x


@pytest.mark.parametrize("steps", [True, False])
def test_the_filter_is_a_kalman_filter_of_the_mean_and_the_variance(steps: bool) -> None:
    rng = np.random.default_rng(0)
    start, w = rng.normal(size=3), rng.normal(size=(30, 3))
    u = rng.normal(size=(30, 3)) if steps else np.zeros((30, 3))
    means = list(textbook(start, u, w, Q=0.1, R=2.0))
    variances = list(textbook(np.zeros(3), u**2, (w - means) ** 2, Q=0.05, R=2.0))

    mean, variance = torch.tensor(start), torch.zeros(3, dtype=torch.float64)
    P, Q = torch.zeros(2).double(), torch.tensor([0.1, 0.05]).double()
    for t in range(30):
        K, P = kalman_gain(P, Q, 2.0)
        mean, variance = kalman_step(
            mean, variance, torch.tensor(w[t]), torch.tensor(u[t]), gains=K
        )
        assert np.allclose(mean, means[t])
        assert np.allclose(variance, variances[t])


def stationary_gain(Q: float, R: float) -> float:
    predicted = (Q + math.sqrt(Q**2 + 4 * Q * R)) / 2  # the fixed point of P -> P R / (P + R) + Q
    return predicted / (predicted + R)


def test_of_weights_around_a_point_the_filter_finds_the_point_and_the_spread() -> None:
    m, s = 3.0, 0.5
    gains = torch.tensor([stationary_gain(1e-4, 10.0), stationary_gain(5e-5, 10.0)]).double()
    assert gains[0].item() == pytest.approx(math.sqrt(1e-4 / 10), rel=2e-3)
    P = torch.zeros(2).double()
    mean, variance = torch.zeros(400).double(), torch.zeros(400).double()
    for _ in range(4000):
        K, P = kalman_gain(P, torch.tensor([1e-4, 5e-5]).double(), 10.0)
        weight = m + s * torch.randn(400).double()
        mean, variance = kalman_step(mean, variance, weight, torch.zeros(400), K)
    assert torch.allclose(K, gains)
    assert mean.mean().item() == pytest.approx(m, rel=1e-3)
    kept = gains[0].item()
    assert mean.var().item() == pytest.approx(s**2 * kept / (2 - kept), rel=0.2)
    assert variance.mean().item() == pytest.approx(s**2, rel=0.02)


class Quadratic(TRADI):
    """Every weight w has the loss h (w - x)^2 / 2 for targets x ~ N(0, 1)."""

    def training_loss(self, inputs: Inputs, labels: Tensor, ignore_index: int = -100) -> Tensor:
        loss: Tensor = 0.5 * (self.net.weight.flatten() - inputs).square().sum()
        return loss


@pytest.mark.parametrize("steps", [True, False])
def test_sgd_on_a_quadratic_has_the_variance_that_theory_gives(steps: bool) -> None:
    lr, Q, R, N = 0.1, 0.01, 1.0, 2000
    loader = [(torch.randn(N), torch.zeros(1, dtype=torch.long)) for _ in range(200)]
    tradi = Quadratic(
        nn.Linear(1, N, bias=False),
        steps=steps,
        mean_noise=Q,
        variance_noise=Q,
        measurement_noise=R,
    )
    abnn.train(tradi, loader, epochs=1, lr=lr, momentum=0.0, weight_decay=0.0, schedule="constant")
    # w is an AR(1) process: w_t = a w_(t-1) + lr x_t.
    weights = tradi._weights()
    a, K = 1 - lr, stationary_gain(Q, R)
    spread = lr**2 / (1 - a**2)
    assert weights.var().item() == pytest.approx(spread, rel=0.1)
    if steps:  # the steps of the last 1 / K steps, squared
        assert torch.allclose(tradi.mean, weights, atol=1e-6)
        expected = (1 - K) / K * 2 * spread * (1 - a)
    else:  # the distance from an average with weights K (1 - K)^j
        of_mean = K / (2 - K) * (1 + (1 - K) * a) / (1 - (1 - K) * a)
        expected = spread * (1 + of_mean - 2 * K / (1 - (1 - K) * a))
    assert tradi.variance.mean().item() == pytest.approx(expected, rel=0.05)


def test_draws_have_the_covariance_of_the_kernel() -> None:
    net = nn.Linear(1, 4, bias=False)
    mu = torch.tensor([-0.5, 0.1, 0.2, 1.0])
    net.weight.data = mu.unsqueeze(1)
    tradi = TRADI(net, features=3, lengthscale=0.7)
    sigma = torch.tensor([1.0, 2.0, 0.5, 1.0])
    tradi.variance.copy_(sigma.square())
    draws = torch.stack([tradi.draw(0, i)["weight"].flatten() for i in range(4000)])
    kernel = (-0.5 * ((mu - mu.unsqueeze(1)) / (0.7 * mu.std(correction=0))).square()).exp()
    assert kernel.min() < 0.1
    assert torch.allclose(draws.T.cov() / sigma.outer(sigma), kernel, atol=0.08)
    assert torch.allclose((draws.mean(0) - mu) / sigma, torch.zeros(4), atol=0.08)


def test_layers_and_draws_are_independent() -> None:
    tradi = TRADI(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), features=2)
    tradi.variance.fill_(1.0)
    draws = torch.stack(
        [torch.cat([t.flatten() for t in tradi.draw(0, i).values()]) for i in range(1500)]
    )
    assert torch.allclose(draws.T.corrcoef(), torch.eye(4), atol=0.12)
    assert (draws[1:] * draws[:-1]).mean(0).sub(tradi.mean**2).abs().max() < 0.2


def test_before_training_every_draw_is_the_network() -> None:
    net, x = cnn(), torch.randn(2, 3, 8, 8)
    prediction = TRADI(net).predict(x, samples=3)
    assert torch.allclose(prediction.probs, Single(net).predict(x).probs, atol=1e-6)
    assert prediction.epistemic.max() < 1e-6


def test_batch_norms_keep_the_parameters_that_they_were_trained_to() -> None:
    net = cnn()
    drawn = set(TRADI(net).draw(0, 0))
    assert drawn == {f"{layer}.{name}" for layer in (0, 3, 7) for name in ("weight", "bias")}


def test_a_weight_that_two_layers_share_is_drawn_once() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    tradi, x = TRADI(net), torch.randn(2, 3)
    tradi.variance.fill_(1.0)
    drawn = tradi.draw(0, 0)
    assert set(drawn) == {"0.weight", "0.bias", "1.bias"}
    W = drawn["0.weight"]
    logits = (x @ W.T + drawn["0.bias"]) @ W.T + drawn["1.bias"]
    assert torch.allclose(tradi.predict(x, samples=1).log_probs, logits.log_softmax(1), atol=1e-5)


def test_what_never_moves_has_no_variance() -> None:
    net = mlp()
    net[0].requires_grad_(False)
    tradi = TRADI(net)
    abnn.train(tradi, data(), epochs=1)
    drawn = tradi.draw(0, 0)
    assert torch.equal(drawn["0.weight"], dict(net.named_parameters())["0.weight"])
    assert not torch.equal(drawn["3.weight"], tradi.net[3].weight)


def test_batch_norms_get_the_statistics_of_the_means() -> None:
    tradi, loader = TRADI(mlp(), steps=False, mean_noise=1.0), data()
    abnn.train(tradi, loader, epochs=1)
    means = copy.deepcopy(tradi.net)
    named = dict(means.named_parameters())
    for name, value in tradi._named(tradi.mean).items():
        named[name].data = value.clone()
    assert not torch.allclose(means[0].weight, tradi.net[0].weight, atol=1e-4)
    torch.optim.swa_utils.update_bn([x for x, _ in loader], means)
    assert torch.allclose(tradi.net[1].running_mean, means[1].running_mean, atol=1e-5)
    assert torch.allclose(tradi.net[1].running_var, means[1].running_var, atol=1e-5)
    assert tradi.net[1].momentum == 0.1


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(ValueError, match="features=0 is not a whole number of at least 1"):
        TRADI(mlp(), features=0)
    with pytest.raises(ValueError, match="lengthscale=0.0 is not a number above 0"):
        TRADI(mlp(), lengthscale=0.0)
    with pytest.raises(ValueError, match="no convolution and no linear layer"):
        TRADI(nn.LayerNorm(2))
    with pytest.raises(ValueError, match="steps='a' must be True or False"):
        TRADI(mlp(), steps="a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="samples=0"):
        TRADI(mlp()).predict(torch.zeros(1, 4), samples=0)
