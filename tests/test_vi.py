"""Bayes by Backprop: its divergence, its gradients, and posteriors that are known."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal

import abnn
from abnn.baselines.sampled import noise_like
from abnn.baselines.vi import VIBNN, weights_of
from nets import cnn, mlp


def data(n: int = 8) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, 4, generator=g), torch.randint(3, (n,), generator=g)


def attentive() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3)).eval()


@pytest.mark.parametrize("prior_std", [0.1, 1.0, 7.0])
def test_the_divergence_is_that_of_normal_distributions(prior_std: float) -> None:
    vi = VIBNN(mlp(), prior_std=prior_std, init_std=0.3)
    expected = torch.tensor(0.0)
    for name, mu in vi.mu.items():
        q, p = Normal(mu, vi.std[name]), Normal(torch.zeros_like(mu), prior_std)
        expected = expected + torch.distributions.kl_divergence(q, p).sum()
    torch.testing.assert_close(vi.kl(), expected)


def test_the_divergence_is_zero_where_the_posterior_is_the_prior() -> None:
    vi = VIBNN(mlp(), prior_std=0.5, init_std=0.5)
    for mu in vi.mu.values():
        mu.data.zero_()
    assert vi.kl().item() == pytest.approx(0, abs=1e-5)


def test_the_weights_start_at_the_network_with_the_deviation_that_was_asked_for() -> None:
    net = cnn()
    vi = VIBNN(net, init_std=0.02)
    own = dict(net.named_parameters())
    assert list(vi.mu) == ["0.weight", "0.bias", "3.weight", "3.bias", "7.weight", "7.bias"]
    for name, std in vi.std.items():
        assert torch.equal(vi.mu[name], own[name])
        torch.testing.assert_close(std, torch.full_like(std, 0.02))
    assert vi.num_added_parameters == sum(own[name].numel() for name in vi.mu)


def test_the_loss_is_the_cross_entropy_and_a_share_of_the_divergence() -> None:
    vi, (x, y) = VIBNN(mlp(), kl_weight=0.25, examples=50), data()
    torch.manual_seed(3)
    expected = nn.functional.cross_entropy(vi.training_logits(x), y) + 0.25 * vi.kl() / 50
    torch.manual_seed(3)
    torch.testing.assert_close(vi.training_loss(x, y), expected)


def test_gradients_are_those_of_the_reparametrised_weights() -> None:
    net = nn.Linear(4, 3).double()
    vi = VIBNN(net, init_std=0.4, kl_weight=0.0, examples=1)
    x, y = data()
    torch.manual_seed(5)
    vi.training_loss(x.double(), y).backward()
    torch.manual_seed(5)
    eps = {name: torch.randn_like(mu) for name, mu in vi.mu.items()}
    weight, bias = vi.weights(eps).values()
    loss = nn.functional.cross_entropy(nn.functional.linear(x.double(), weight, bias), y)
    (slope,) = torch.autograd.grad(loss, weight)
    # dw/dmu = 1 and dw/drho = eps * sigmoid(rho)
    torch.testing.assert_close(vi.mu["weight"].grad, slope)
    torch.testing.assert_close(vi.rho[0].grad, slope * eps["weight"] * vi.rho[0].sigmoid())


@pytest.mark.parametrize(
    "net, x",
    [
        (mlp(), torch.ones(2, 4)),
        (cnn(), torch.ones(2, 3, 9, 9)),
        (attentive(), torch.ones(2, 3, 4)),
    ],
)
def test_without_deviation_every_draw_is_the_network(net: nn.Module, x: Tensor) -> None:
    members = VIBNN(net, init_std=1e-9).predict(x, samples=2, keep_members=True).members
    assert members is not None
    for member in members:
        torch.testing.assert_close(member, net(x).softmax(1).detach(), atol=1e-6, rtol=0)


def test_a_draw_is_the_network_with_the_weights_of_its_noise() -> None:
    vi, (x, _) = VIBNN(mlp(), init_std=0.3), data()
    members = list(vi.eval().member_logits(x, samples=3, seed=7))
    plain = copy.deepcopy(vi.net)
    plain.load_state_dict(vi.weights(noise_like(vi.mu, 7, 0, 2)), strict=False)
    torch.testing.assert_close(members[2].squeeze(0), plain(x))
    assert not torch.equal(members[2], next(iter(vi.member_logits(x, 1, seed=8))))


def test_more_samples_go_on_from_fewer() -> None:
    vi, (x, _) = VIBNN(mlp(), init_std=0.3), data()
    few, many = (vi.predict(x, samples=n, keep_members=True).members for n in (2, 4))
    assert few is not None
    assert many is not None
    assert torch.equal(few, many[:2])


def test_norms_stay_as_they_are_and_keep_the_decay() -> None:
    vi = VIBNN(mlp(), examples=48)
    rest, gaussians = vi.parameter_groups()
    assert "weight_decay" not in rest
    assert gaussians["weight_decay"] == 0
    assert [id(p) for p in rest["params"]] == [id(p) for p in vi.net[1].parameters()]
    assert len(rest["params"]) + len(gaussians["params"]) == len(list(vi.parameters()))


def test_the_projections_inside_attention_are_gaussian_too() -> None:
    names = set(weights_of(attentive()))
    attention = {"in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}
    assert {f"0.self_attn.{name}" for name in attention} <= names
    assert not any("norm" in name for name in names)


def test_tied_weights_are_one_gaussian() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    vi = VIBNN(net, init_std=0.3)
    assert list(vi.mu) == ["0.weight", "0.bias", "2.bias"]
    assert vi.predict(torch.ones(2, 4), samples=2).probs.shape == (2, 4)


class Regression(VIBNN):
    """The same Gaussians under a Gaussian likelihood, whose exact posterior is known."""

    targets: Tensor
    noise: float

    def training_loss(self, inputs: Any, labels: Tensor, ignore_index: int = -100) -> Tensor:
        """The labels are the rows of the targets."""
        error = (self.training_logits(inputs) - self.targets[labels]) / self.noise
        assert self.examples is not None
        return 0.5 * error.square().sum(1).mean() + self.kl() / self.examples


def test_a_linear_gaussian_model_finds_its_exact_mean_field_posterior() -> None:
    torch.manual_seed(0)
    n, noise, prior_std = 40, 0.5, 0.8
    X = torch.randn(n, 3) @ torch.tensor([[1.0, 0.7, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 0.5]])
    Y = X @ torch.randn(3, 2) + noise * torch.randn(n, 2)
    precision = X.T @ X / noise**2 + torch.eye(3) / prior_std**2
    mean = torch.linalg.solve(precision, X.T @ Y / noise**2).T
    vi = Regression(nn.Linear(3, 2, bias=False), prior_std, init_std=0.1, examples=n)
    vi.targets, vi.noise = Y, noise
    loader = [(X, torch.arange(n))]
    abnn.train(vi, loader, steps=1500, lr=0.03, optimizer="adamw", schedule="polynomial", power=3)
    exact_std = precision.diag().rsqrt().expand(2, 3)
    torch.testing.assert_close(vi.mu["weight"].detach(), mean, atol=0.025, rtol=0)
    torch.testing.assert_close(vi.std["weight"].detach(), exact_std, atol=0, rtol=0.12)
    # ... which is narrower than the marginals of the exact posterior, as inputs correlate.
    assert (1.25 * exact_std < torch.linalg.inv(precision).diag().sqrt()).all()


def test_what_cannot_be_done_is_refused() -> None:
    for wrong in (0, -1.0, float("nan"), "1", True):
        with pytest.raises(ValueError, match="prior_std=.* is not a number above 0"):
            VIBNN(mlp(), prior_std=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="init_std=0 is not a number above 0"):
        VIBNN(mlp(), init_std=0)
    with pytest.raises(ValueError, match="kl_weight=-1 is not a number of at least 0"):
        VIBNN(mlp(), kl_weight=-1)
    with pytest.raises(ValueError, match="examples=0 is not a whole number of at least 1"):
        VIBNN(mlp(), examples=0)
    with pytest.raises(ValueError, match="has no convolution and no linear layer"):
        VIBNN(nn.LayerNorm(4))
    with pytest.raises(ValueError, match="The weight of '0' is computed from other parameters"):
        VIBNN(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))))
    with pytest.raises(ValueError, match="samples=0 is not a whole number of at least 1"):
        VIBNN(mlp()).predict(torch.ones(1, 4), samples=0)


def test_training_without_the_number_of_examples_is_refused_and_changes_nothing() -> None:
    vi = VIBNN(mlp())
    before = copy.deepcopy(vi.state_dict())
    with pytest.raises(ValueError, match=r"VIBNN\(net, examples=len\(dataset\)\)"):
        abnn.train(vi, [data()], epochs=1)
    assert all(torch.equal(before[name], value) for name, value in vi.state_dict().items())
