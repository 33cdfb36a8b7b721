"""MC dropout: the moments of its draws, which dropout is on, and what a draw depends on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import abnn
from abnn.baselines.mc_dropout import MCDropout
from fitting import data
from nets import cnn, mlp
from networks import NETWORKS, ODD_NETWORKS, build, run


def draws(method: MCDropout, x: Any, samples: int = 8, seed: int = 0) -> Tensor:
    method.eval()
    with torch.no_grad():
        return torch.cat(list(method.member_logits(x, samples, seed)))


def check_moments(values: Tensor, mean: Tensor, variance: Tensor) -> None:
    """Within four standard errors of the mean, and a fifth of the variance."""
    error = (values.mean(0) - mean).abs() / (variance / len(values)).sqrt()
    assert error.max() < 4
    assert (values.var(0) / variance - 1).abs().max() < 0.2


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
def test_draws_of_dropout_and_a_linear_layer_have_the_moments_of_bernoulli(p: float) -> None:
    """y = W (x m / (1 - p)) + b: mean W x + b, variance p / (1 - p) (W x)^2 summed over inputs."""
    layer, x = nn.Linear(6, 3), torch.randn(2, 6)
    method = MCDropout(nn.Sequential(nn.Dropout(p), layer))
    variance = p / (1 - p) * (layer.weight * x[:, None]).square().sum(-1)
    check_moments(draws(method, x, 3000), layer(x), variance)


def test_dropout_that_is_added_has_the_same_moments() -> None:
    first, last, x = nn.Linear(4, 6), nn.Linear(6, 3), torch.randn(2, 4)
    net = nn.Sequential(first, last)
    variance = 0.25 * (last.weight * first(x)[:, None]).square().sum(-1)
    check_moments(draws(MCDropout(net, p=0.2), x, 3000), net(x), variance)


def test_dropout_that_is_added_to_a_convolution_drops_channels() -> None:
    first, last, x = nn.Conv2d(1, 6, 1), nn.Conv2d(6, 2, 3), torch.randn(2, 1, 3, 3)
    net = nn.Sequential(first, last)
    terms = torch.einsum("kcij,bcij->bkc", last.weight, first(x))  # what a channel adds
    variance = 0.25 * terms.square().sum(-1)[..., None, None]
    check_moments(draws(MCDropout(net, p=0.2), x, 3000), net(x), variance)


def test_alpha_dropout_has_the_moments_of_its_definition() -> None:
    """a ((x or alpha) - alpha p), whose a keeps the variance of standardised activations."""
    p, alpha = 0.3, -1.7580993408473766
    layer, x = nn.Linear(6, 3), torch.randn(2, 6)
    a = ((1 - p) * (1 + p * alpha**2)) ** -0.5
    mean = layer(a * (1 - p) * x)
    variance = (layer.weight * (x - alpha)[:, None]).square().sum(-1) * a**2 * p * (1 - p)
    method = MCDropout(nn.Sequential(nn.AlphaDropout(p), layer))
    check_moments(draws(method, x, 3000), mean, variance)


@pytest.mark.parametrize("kind", [nn.Dropout, nn.AlphaDropout])
def test_a_draw_drops_to_the_values_of_the_module_in_training(kind: type[nn.Module]) -> None:
    net, x = nn.Sequential(kind(0.4), nn.Identity()), torch.full((1, 200), 0.7)
    here, there = draws(MCDropout(net), x, 1)[0], net.train()(x)
    torch.testing.assert_close(here.unique(), there.unique())


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.Dropout1d, (40, 5)),
        (nn.Dropout2d, (40, 5, 2)),
        (nn.Dropout3d, (40, 2, 3, 2)),
        (nn.FeatureAlphaDropout, (40, 5, 2)),
    ],
)
def test_dropout_of_channels_drops_all_of_a_channel(
    kind: type[nn.Module], shape: tuple[int, ...]
) -> None:
    net, x = nn.Sequential(kind(0.5)), torch.full((2, *shape), 0.7)
    channels = draws(MCDropout(net), x, 1)[0].flatten(2)
    assert (channels == channels[:, :, :1]).all()
    assert len(channels.unique()) == 2


def test_dropout_of_units_drops_pixels_and_tokens_by_themselves() -> None:
    dropped = draws(MCDropout(nn.Sequential(nn.Dropout(0.5))), torch.ones(2, 3, 9, 9), 1)[0]
    assert 0.3 < dropped.eq(0).float().mean() < 0.7
    assert 0 < dropped[0, 0].eq(0).sum() < 81


@pytest.mark.parametrize("name", ["torchvision/resnet18", "torch/transformer_encoder"])
def test_a_rate_of_zero_is_the_network(name: str) -> None:
    (network,) = (n for n in NETWORKS if n.name == name)
    net, x = build(network), network.inputs(2)
    with torch.no_grad():
        expected = run(net, x)
    logits = draws(MCDropout(net, p=0.0), x, 3)
    torch.testing.assert_close(logits, expected.expand_as(logits), rtol=1e-4, atol=1e-5)


def rates(method: MCDropout) -> list[float]:
    return [module.p for module in method.net.modules() if isinstance(module, nn.Dropout)]


def test_the_networks_own_dropout_is_used_and_its_rate_replaced() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.2))
    net.append(nn.Linear(8, 3))
    assert rates(MCDropout(net)) == [0.5, 0.2]
    assert rates(MCDropout(net, p=0.3)) == [0.3, 0.3]
    assert [net[1].p, net[3].p] == [0.5, 0.2]
    assert not any(module._forward_pre_hooks for module in MCDropout(net).modules())


def test_dropout_of_rate_zero_is_none_unless_it_gets_a_rate() -> None:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0), nn.Linear(8, 3)), torch.randn(2, 4)
    assert draws(MCDropout(net), x).std(0).min() > 0  # dropout is added
    assert rates(MCDropout(net)) == [0.0]
    assert rates(MCDropout(net, p=0.4)) == [0.4]
    assert draws(MCDropout(net, p=0.4), x).std(0).min() > 0


def test_the_first_layer_gets_no_dropout() -> None:
    method = MCDropout(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)))
    assert [len(layer._forward_pre_hooks) for layer in method.net] == [0, 1, 1]


def test_dropped_branches_stay() -> None:
    from timm.layers import DropPath

    net = nn.Sequential(nn.Linear(4, 8), DropPath(0.9), nn.Dropout(0.0), nn.Linear(8, 3))
    x = torch.randn(2, 4)
    assert (draws(MCDropout(net, p=0.0), x) - net.eval()(x)).abs().max() < 1e-6


def test_all_examples_of_a_batch_have_the_same_mask() -> None:
    for net, shape in ((mlp(), (4,)), (cnn(), (3, 8, 8)), (nn.Sequential(nn.Dropout()), (5,))):
        logits = draws(MCDropout(net), torch.randn(1, *shape).expand(6, *shape))
        torch.testing.assert_close(logits, logits[:, :1].expand_as(logits))
        assert logits.std(0).max() > 0.01


@pytest.mark.parametrize("name", ["torch/transformer_encoder", "torchvision/vit"])
def test_an_example_is_told_the_same_in_any_batch(name: str) -> None:
    (network,) = (n for n in NETWORKS if n.name == name)
    method, x = MCDropout(build(network), p=0.2), network.inputs(5)
    whole = draws(method, x, 5)
    for rows in ([0], [4], [3, 1]):
        torch.testing.assert_close(draws(method, x[rows], 5), whole[:, rows], rtol=1e-4, atol=1e-4)
    assert whole.std(0).min() > 1e-4


@pytest.mark.parametrize("name", ["torch/transformer_encoder", "timm/test_efficientnet"])
def test_draws_in_one_pass_are_those_one_by_one(name: str) -> None:
    (network,) = (n for n in NETWORKS if n.name == name)
    method, x = MCDropout(build(network)), network.inputs(3)
    together = draws(method, x, 6, seed=3)
    assert list(method._members._folds.values()) == [True]
    method._members._folds = dict.fromkeys(method._members._folds, False)
    torch.testing.assert_close(draws(method, x, 6, seed=3), together, rtol=1e-4, atol=1e-4)


def test_networks_that_do_not_fold_are_drawn_one_by_one() -> None:
    (network,) = ODD_NETWORKS
    method = MCDropout(build(network))
    with pytest.warns(UserWarning, match="MCDropout can't run in one pass"):
        logits = draws(method, network.inputs(3), 5)
    assert logits.shape == (5, 3, 10)
    assert len({tuple(each.flatten().tolist()) for each in logits}) == 5


def test_a_module_that_is_called_twice_draws_twice() -> None:
    dropout = nn.Dropout(0.5)
    first = draws(MCDropout(nn.Sequential(dropout)), torch.ones(1, 64), 1)[0]
    both = draws(MCDropout(nn.Sequential(dropout, dropout)), torch.ones(1, 64), 1)[0]
    assert ((both == 0) >= (first == 0)).all()
    assert 0.6 < both.eq(0).float().mean() < 0.9


def test_a_draw_depends_on_seed_and_index_alone() -> None:
    method, x = MCDropout(mlp(), p=0.5), torch.randn(6, 4)
    state = torch.get_rng_state()
    all_draws = draws(method, x, 9, seed=1)
    torch.testing.assert_close(draws(method, x, 5, seed=1), all_draws[:5])
    assert len({tuple(each.flatten().tolist()) for each in all_draws}) == 9
    assert not torch.allclose(draws(method, x, 9, seed=2), all_draws)
    assert torch.equal(state, torch.get_rng_state())


def test_training_drops_by_example_and_channel() -> None:
    method = MCDropout(nn.Sequential(nn.Conv2d(1, 30, 1), nn.Conv2d(30, 2, 1)), p=0.5).train()
    seen: list[Tensor] = []
    method.net[1].register_forward_pre_hook(lambda layer, args: seen.append(args[0]))
    method.training_logits(torch.randn(2, 1, 3, 3))
    off = seen[0].eq(0).flatten(2)
    assert (off == off[:, :, :1]).all()
    assert not torch.equal(off[0], off[1])
    assert 10 <= off[:, :, 0].sum() <= 50


def test_training_with_own_dropout_is_the_networks_own() -> None:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), torch.randn(6, 4)
    method = MCDropout(net).train()
    torch.manual_seed(5)
    logits = method.training_logits(x)
    torch.manual_seed(5)
    assert torch.equal(logits, net.train()(x))


def test_it_learns_and_costs_nothing() -> None:
    method = MCDropout(mlp(), p=0.2)
    losses = abnn.train(method, data(batches=8, size=16), epochs=8, lr=0.1).losses
    assert losses[-8:].mean() < 0.5 * losses[:8].mean()
    assert method.num_added_parameters == method.num_added_bytes == 0


def test_norms_use_their_running_statistics() -> None:
    method, x = MCDropout(mlp(), p=0.2), torch.randn(6, 4)
    before = copy.deepcopy(method.state_dict())
    method.train().predict(x)
    assert all(torch.equal(before[name], value) for name, value in method.state_dict().items())


def test_the_network_inside_is_the_network_between_predictions() -> None:
    net, x = mlp(), torch.randn(6, 4)
    method = MCDropout(net)
    method.predict(x)
    with pytest.raises(RuntimeError):
        method.predict(torch.randn(6, 99))
    torch.testing.assert_close(method.eval().net(x), net(x))


def test_half_precision_stays_half() -> None:
    logits = draws(MCDropout(cnn().bfloat16()), torch.randn(2, 3, 8, 8).bfloat16())
    assert logits.dtype == torch.bfloat16
    assert logits.float().std(0).max() > 0


def test_dropout_that_is_never_called_is_not_taken_for_certainty() -> None:
    class Forgetful(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.dropout = nn.Dropout(0.5)

    with pytest.raises(RuntimeError, match="calls none of its dropout modules"):
        MCDropout(Forgetful()).predict(torch.randn(2, 4))


def test_all_units_can_be_dropped() -> None:
    last = nn.Linear(8, 3)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(1.0), last)
    logits = draws(MCDropout(net), torch.randn(2, 4))
    torch.testing.assert_close(logits, last.bias.expand_as(logits))


def test_a_copy_draws_by_itself() -> None:
    method, x = MCDropout(mlp()), torch.randn(3, 4)
    twin = copy.deepcopy(method)
    torch.testing.assert_close(draws(twin, x, 5), draws(method, x, 5))
    assert twin._draws is not method._draws
    assert draws(twin, x, 5).std(0).max() > 0


def test_impossible_rates_are_refused() -> None:
    with pytest.raises(ValueError, match="p=1.0 is not a number of at least 0 and below 1"):
        MCDropout(mlp(), p=1.0)
    with pytest.raises(ValueError, match="has no dropout, and no layer but its first"):
        MCDropout(nn.Linear(4, 3))
    with pytest.raises(ValueError, match="no convolution and no linear layer"):
        MCDropout(nn.LayerNorm(4))
    with pytest.raises(ValueError, match="samples=0"):
        MCDropout(mlp()).predict(torch.randn(2, 4), samples=0)
