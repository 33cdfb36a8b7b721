"""LP-BNN: what its auto-encoders draw, what they cost, and where it is a BatchEnsemble."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

import abnn
from abnn.baselines import BatchEnsemble
from abnn.baselines.lp_bnn import LPBNN, AutoEncoder, kl_to_standard
from fitting import data
from nets import cnn, mlp
from networks import ODD_NETWORKS, build


def members_of(method: BatchEnsemble, x: Any, **members: Any) -> Tensor:
    method.eval()
    with torch.no_grad():
        return torch.cat(list(method.member_logits(x, **members)))


def encoders(bnn: LPBNN) -> list[Any]:
    return list(bnn.auto_encoders)


def make_perfect(bnn: LPBNN) -> None:
    """Auto-encoders that give back what they are given, without noise."""
    for layer in encoders(bnn):
        width = layer.hidden.in_features
        for part in (layer.hidden, layer.mean, layer.decoder):
            part.weight.data.copy_(torch.eye(*part.weight.shape))
            part.bias.data.zero_()
        layer.decoder.weight.data.mul_(layer.decoder.in_features**0.5)
        layer.hidden.bias.data[:width] = 50.0  # so that the relu passes all
        layer.mean.bias.data[:width] = -50.0
        layer.log_var.weight.data.zero_()
        layer.log_var.bias.data.fill_(-200.0)


def as_batch_ensemble(bnn: LPBNN, net: nn.Module) -> BatchEnsemble:
    """A BatchEnsemble of the same factors and weights."""
    ensemble = BatchEnsemble(net, bnn.members)
    state = bnn.state_dict()
    ensemble.load_state_dict({name: state[name] for name in ensemble.state_dict()})
    return ensemble


def test_the_kl_is_that_of_normal_distributions() -> None:
    mean, log_var = torch.randn(5, 7), torch.randn(5, 7)
    q = Normal(mean, (0.5 * log_var).exp())
    expected = kl_divergence(q, Normal(0.0, 1.0)).sum()
    torch.testing.assert_close(kl_to_standard(mean, log_var), expected)


@pytest.mark.parametrize(("net", "shape"), [(mlp(), (4,)), (cnn(), (3, 8, 8))])
def test_with_perfect_auto_encoders_it_is_a_batch_ensemble(
    net: nn.Module, shape: tuple[int, ...]
) -> None:
    bnn, x = LPBNN(net, members=3, latent=40), torch.randn(5, *shape)
    make_perfect(bnn)
    expected = members_of(as_batch_ensemble(bnn, net), x)
    torch.testing.assert_close(members_of(bnn, x), expected, rtol=1e-3, atol=1e-4)
    twice = members_of(bnn, x, samples=2, seed=9)
    torch.testing.assert_close(twice, expected.repeat(2, 1, 1), rtol=1e-3, atol=1e-4)


def test_draws_of_a_linear_layer_have_the_moments_of_its_latent_vector() -> None:
    """y = W (x * (D z / sqrt(3) + d)) * s + b is linear in z ~ N(mu, sigma^2)."""
    bnn, x = LPBNN(nn.Linear(6, 4), members=2, latent=3), torch.randn(1, 6)
    (layer,) = encoders(bnn)
    mu, log_var = torch.randn(3), torch.randn(3)
    layer.mean.weight.data.zero_()
    layer.mean.bias.data.copy_(mu)
    layer.log_var.weight.data.zero_()
    layer.log_var.bias.data.copy_(log_var)
    logits = members_of(bnn, x, samples=3000).view(3000, 2, 4)
    net, D, d = bnn.net, layer.decoder.weight / 3**0.5, layer.decoder.bias
    slope = net.ensemble_s[:, :, None] * ((net.weight * x) @ D)
    expected = slope @ mu + net.ensemble_s * ((net.weight * x) @ d) + net.ensemble_b
    variance = slope.square() @ log_var.exp()
    error = (logits.mean(0) - expected).abs() / (variance / 3000).sqrt()
    assert error.max() < 4
    assert (logits.var(0) / variance - 1).abs().max() < 0.15
    assert abs(torch.corrcoef(logits[:, :, 0].T)[0, 1]) < 0.1  # members draw for themselves


def test_the_loss_is_cross_entropy_kl_and_reconstruction() -> None:
    bnn, x = LPBNN(mlp(), members=2, latent=5, latent_weight=0.3), torch.randn(6, 4)
    y = torch.arange(6) % 3
    for layer in encoders(bnn):  # without noise, the loss is a number to compute
        layer.log_var.weight.data.zero_()
        layer.log_var.bias.data.fill_(-60.0)
    torch.manual_seed(3)
    loss = bnn.training_loss(x, y)
    torch.manual_seed(3)
    expected = F.cross_entropy(bnn.training_logits(x), y)
    for layer, auto_encoder in zip((bnn.net[0], bnn.net[3]), encoders(bnn), strict=True):
        r = layer.ensemble_r
        z = auto_encoder.mean(auto_encoder.hidden(r).relu())
        kl = 0.5 * (z.square() - 1 + 60.0).sum()
        expected = expected + 0.3 / 2 * (
            kl + (auto_encoder.decoder(z / 5**0.5) - r).square().mean()
        )
    torch.testing.assert_close(loss, expected)


def test_the_noise_of_training_changes_with_every_step() -> None:
    bnn, x, y = LPBNN(mlp()), torch.randn(6, 4), torch.arange(6) % 3
    assert bnn.training_loss(x, y) != bnn.training_loss(x, y)


def test_r_stays_and_its_auto_encoders_are_trained() -> None:
    bnn = LPBNN(mlp(), members=2)
    before = copy.deepcopy(bnn.state_dict())
    losses = abnn.train(bnn, data(batches=8, size=16), epochs=6, lr=0.05).losses
    assert losses[-8:].mean() < 0.7 * losses[:8].mean()
    for name, value in bnn.state_dict().items():
        if name.endswith("ensemble_r"):
            assert torch.equal(value, before[name])
        elif name.startswith("auto_encoders") and name.endswith("weight"):
            assert not torch.equal(value, before[name]), name


@pytest.mark.parametrize("latent", [8, 32, 200])
def test_a_step_moves_factors_no_further_for_a_larger_latent_vector(latent: int) -> None:
    """By about 1 + |z|^2 / latent, which is 2, times what it would move a factor of its own."""
    auto_encoder, z = AutoEncoder(torch.ones(1, 500), latent), torch.randn(1, latent)
    before = auto_encoder.decode(z)
    before.sum().backward()
    torch.optim.SGD(auto_encoder.decoder.parameters(), lr=0.1).step()
    moved = (before - auto_encoder.decode(z)) / 0.1
    expected = 1 + z.square().mean()
    torch.testing.assert_close(moved, expected.expand_as(moved), rtol=1e-3, atol=1e-3)


def test_factors_and_what_they_decode_from_do_not_decay_to_zero() -> None:
    bnn = LPBNN(mlp())
    decayed, spared = bnn.parameter_groups()
    assert "weight_decay" not in decayed
    assert spared["weight_decay"] == 0
    names = {id(p): name for name, p in bnn.named_parameters()}
    assert {names[id(p)] for p in spared["params"]} == {
        "net.0.ensemble_s",
        "net.3.ensemble_s",
        "auto_encoders.0.decoder.bias",
        "auto_encoders.1.decoder.bias",
    }
    assert len(decayed["params"]) + len(spared["params"]) == len(names)


def test_a_draw_depends_on_seed_member_and_index_alone() -> None:
    bnn, x = LPBNN(mlp(), members=2).eval(), torch.randn(6, 4)
    all_draws = members_of(bnn, x, samples=3, seed=1)
    assert torch.equal(members_of(bnn, x, samples=2, seed=1), all_draws[:4])
    assert len({tuple(draw.flatten().tolist()) for draw in all_draws}) == 6
    assert not torch.equal(members_of(bnn, x, samples=3, seed=2), all_draws)
    state = torch.get_rng_state()
    members_of(bnn, x)
    assert torch.equal(state, torch.get_rng_state())


def test_predicting_leaves_the_factors_in_place() -> None:
    bnn, x = LPBNN(mlp()), torch.randn(2, 4)
    r = bnn.net[0].ensemble_r
    bnn.predict(x)
    assert bnn.net[0].ensemble_r is r
    with pytest.raises(RuntimeError):
        bnn.predict(torch.randn(2, 99))
    assert bnn.net[0].ensemble_r is r


def test_networks_that_do_not_fold_draw_the_same() -> None:
    (network,) = ODD_NETWORKS
    bnn, x = LPBNN(build(network), members=2), network.inputs(3)
    with pytest.warns(UserWarning, match="LPBNN can't run in one pass"):
        logits = members_of(bnn, x, samples=2)
    assert logits.shape == (4, 3, 10)
    assert bnn.training_logits(x).shape == (3, 10)


def test_the_network_is_not_silenced_before_training() -> None:
    """r' starts around the mean of r, not around 0."""
    bnn = LPBNN(nn.Linear(200, 3), members=4)
    (layer,) = encoders(bnn)
    decoded = layer.decode(layer.encode(bnn.net.ensemble_r)[0])
    assert decoded.mean().item() == pytest.approx(1, abs=0.2)


def test_impossible_posteriors_are_refused() -> None:
    with pytest.raises(ValueError, match="latent=0"):
        LPBNN(mlp(), latent=0)
    with pytest.raises(ValueError, match="samples=0"):
        LPBNN(mlp()).predict(torch.randn(2, 4), samples=0)
