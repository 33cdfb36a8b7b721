"""The equation of the paper, on every kind of norm."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import abnn
from abnn.draws import channel_noise
from abnn.norm import BayesNorm, sample_gamma
from norms import NORMS, OFFSET, Norm, example, norm

every_norm = pytest.mark.parametrize("item", NORMS, ids=lambda item: item.name)


def convert(layer: nn.Module, **kwargs: object) -> abnn.ABNN:
    """The layer alone as a network, its output as logits."""
    layers = [""] if not isinstance(layer, nn.Sequential) else None
    return abnn.convert(layer, layers=layers, output=lambda y: y, **kwargs)  # type: ignore[arg-type]


def members(bnn: abnn.ABNN, x: Tensor, draws: list[abnn.Draw]) -> tuple[Tensor, Tensor]:
    """Logits of the draws, folded and one by one."""
    with torch.no_grad():
        return bnn.logits(x, draws), torch.cat([bnn.logits(x, [draw]) for draw in draws])


DRAWS = [abnn.Draw(seed=3, mode=m, index=i) for m in (0, 1) for i in (0, 1, 2)]


@every_norm
def test_without_noise_it_is_the_original_bit_for_bit(item: Norm) -> None:
    layer, x = norm(item), example(item)
    bnn = convert(layer, alpha=0, modes=2)
    with torch.no_grad(), bnn.disabled():
        assert torch.equal(bnn.logits(x, DRAWS[:1])[0], layer(x))
        assert torch.equal(bnn.draw(mode=1, seed=5)(x), layer(x))
        assert torch.equal(bnn(x), layer(x))


@every_norm
def test_folded_draws_equal_one_by_one(item: Norm) -> None:
    bnn = convert(norm(item), alpha=0.3, modes=2)
    _move_modes(bnn)
    folded, looped = members(bnn, example(item), DRAWS)
    assert bnn.is_foldable(example(item))
    torch.testing.assert_close(folded, looped, rtol=1e-5, atol=1e-5)
    assert (looped[0] - looped[1]).abs().max() > 1e-3  # draws differ
    assert (looped[0] - looped[3]).abs().max() > 1e-3  # modes differ


@every_norm
def test_noise_multiplies_the_effective_gamma(item: Norm) -> None:
    """A draw equals the original layer whose gamma was multiplied by hand."""
    layer, x = norm(item), example(item)
    bnn = convert(layer, alpha=0.2, modes=1)
    bank = next(iter(bnn.bayes_layers.values())).bank
    draw = abnn.Draw(seed=0, mode=0, index=4)
    eps = channel_noise(draw, [bank.form.shape.numel()])[0].reshape(bank.form.shape)
    offset = 1.0 if item.name in OFFSET else 0.0
    assert bank.form.offset == offset

    by_hand = copy.deepcopy(layer)
    gamma = getattr(by_hand, bank.form.gamma)
    gamma = torch.ones(bank.form.shape) if gamma is None else gamma.detach()
    _set(by_hand, bank.form.gamma, (offset + gamma) * (1 + 0.2 * eps) - offset)
    torch.testing.assert_close(bnn.logits(x, [draw])[0], by_hand(x), rtol=1e-5, atol=1e-5)


@every_norm
@pytest.mark.parametrize("noise", ["example", "element"])
def test_noise_per_example_and_per_element_follows_the_equation(item: Norm, noise: str) -> None:
    layer, x = norm(item), example(item)
    if item.name == "own/SiLUNorm":
        with pytest.raises(ValueError, match="linear in gamma"):
            convert(layer, noise=noise)
        return
    bnn = convert(layer, alpha=0.3, modes=2, noise=noise)
    folded, looped = members(bnn, x, DRAWS)
    torch.testing.assert_close(folded, looped, rtol=1e-5, atol=1e-5)
    same = x[:1].expand(4, *x.shape[1:]).contiguous()
    twice = bnn.logits(same, DRAWS[:1])[0]
    assert (twice[0] - twice[1]).abs().max() > 1e-3  # equal examples get noise of their own


@pytest.mark.parametrize(
    "item",
    [item for item in NORMS if "Act" not in item.name and "SiLU" not in item.name],
    ids=lambda item: item.name,
)
def test_noise_has_the_variance_of_the_closed_form(item: Norm) -> None:
    """Var(y) = (x_hat * gamma * alpha)^2, where y - beta = x_hat * gamma without noise."""
    layer, x = norm(item), example(item, batch=2)
    bnn = convert(layer, alpha=0.05, modes=1)
    with torch.no_grad():
        y = bnn.logits(x, [abnn.Draw(0, 0, i) for i in range(4000)])
        clean = layer(x)
        form = bnn.bayes_layers[""].bank.form
        beta = getattr(layer, form.beta, None) if form.beta else None
        if beta is not None:
            clean = clean - form.view(beta[None], clean.ndim)[0]
    torch.testing.assert_close(y.std(0), 0.05 * clean.abs(), rtol=0.08, atol=1e-4)


@every_norm
def test_a_norm_without_gamma_and_beta_gets_them_at_one_and_zero(item: Norm) -> None:
    layer = norm(item)
    bank = convert(layer, modes=3).bayes_layers[""].bank
    own = getattr(layer, bank.form.gamma)
    expected = torch.ones(bank.form.shape) if own is None else own
    assert torch.equal(bank.gamma, expected.expand(3, *bank.form.shape))
    if bank.form.beta is not None:
        assert bank.beta is not None
        own = getattr(layer, bank.form.beta)
        expected = torch.zeros(bank.form.shape) if own is None else own
        assert torch.equal(bank.beta, expected.expand(3, *bank.form.shape))


@every_norm
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions_keep_their_dtype(item: Norm, dtype: torch.dtype) -> None:
    layer, x = norm(item).to(dtype), example(item, dtype=dtype)
    bnn = convert(layer, alpha=0, modes=2)
    with torch.no_grad():
        assert torch.equal(bnn.logits(x, DRAWS[:1])[0], layer(x))
    bnn = convert(layer, alpha=0.3, modes=2)
    folded, looped = members(bnn, x, DRAWS)
    assert folded.dtype == looped.dtype == layer(x).dtype
    tolerance = 0.1
    if dtype == torch.float64:  # those of transformers compute in float32 all the same
        tolerance = 1e-5 if item.name.startswith("transformers/") else 1e-10
    torch.testing.assert_close(folded, looped, rtol=tolerance, atol=tolerance)


@every_norm
def test_the_family_is_recognised(item: Norm) -> None:
    (row,) = abnn.inspect(norm(item)).layers
    assert (row.family, row.converts) == (item.family, True)


@every_norm
def test_gradients_reach_gamma_and_beta_and_nothing_else(item: Norm) -> None:
    bnn = convert(norm(item), modes=2)
    bnn.train()
    bnn.logits(example(item), [abnn.Draw(0, m, 0) for m in (0, 1)]).square().sum().backward()
    bank = bnn.bayes_layers[""].bank
    assert bank.gamma.grad is not None
    assert bank.gamma.grad.abs().sum(tuple(range(1, bank.gamma.ndim))).gt(0).all()
    if bank.beta is not None:
        assert bank.beta.grad is not None
    assert all(p.grad is None for p in bnn.parameters() if not p.requires_grad)


@every_norm
def test_training_never_writes_the_original_tensors(item: Norm) -> None:
    layer = norm(item)
    before = copy.deepcopy(layer.state_dict())
    bnn = convert(layer, modes=2)
    bnn.train()
    for draws in ([abnn.Draw(0, 0, 0)], [abnn.Draw(0, 0, 1), abnn.Draw(0, 1, 1)]):
        bnn.logits(example(item), draws).sum().backward()
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.state_dict().items())


@pytest.mark.parametrize(
    "name",
    [
        "BatchNorm2d",
        "BatchNorm2d-cumulative",
        "timm/BatchNormAct2d",
        "InstanceNorm2d-affine-tracked",
    ],
)
@pytest.mark.parametrize("folded", [True, False])
def test_statistics_of_a_mode_follow_the_batch_as_the_layer_itself_would(
    name: str, folded: bool
) -> None:
    item = next(n for n in NORMS if n.name == name)
    layer, x = norm(item), example(item)
    bnn = convert(layer, alpha=0, modes=3)
    bnn.train()
    draws = [abnn.Draw(0, mode, 0) for mode in (0, 2)]
    for batch in (x, 3 * x):
        for part in [draws] if folded else [[draw] for draw in draws]:
            bnn.logits(batch, part)
    layer.train()
    for batch in (x, 3 * x):
        layer(batch)
    bank = bnn.bayes_layers[""].bank
    assert bank.mean is not None
    assert bank.var is not None
    for mode in (0, 2):
        torch.testing.assert_close(bank.mean[mode], layer.running_mean)
        torch.testing.assert_close(bank.var[mode], layer.running_var)
    assert torch.equal(bank.mean[1], norm(item).running_mean)  # type: ignore[arg-type]
    bnn.eval()
    layer.eval()
    torch.testing.assert_close(bnn.logits(x, draws)[1], layer(x), rtol=1e-5, atol=1e-5)


def test_frozen_statistics_are_the_networks_own_even_in_training() -> None:
    layer, x = norm(NORMS[2]), example(NORMS[2])
    bnn = convert(layer, alpha=0, modes=2, stats="frozen")
    bnn.train()
    torch.testing.assert_close(bnn.logits(x, DRAWS[::3])[1], layer(x), rtol=1e-5, atol=1e-5)
    assert bnn.bayes_layers[""].bank.mean is None


def test_the_fused_activation_survives() -> None:
    item = next(n for n in NORMS if n.name == "timm/BatchNormAct2d")
    bnn = convert(norm(item), alpha=0.5, modes=2)
    folded, looped = members(bnn, example(item), DRAWS)
    assert (folded >= 0).all()
    assert (looped >= 0).all()
    assert (looped == 0).any()


def test_a_bayesian_norm_is_still_an_instance_of_its_class() -> None:
    layer = convert(nn.LayerNorm(4)).backbone
    assert isinstance(layer, nn.LayerNorm)
    assert isinstance(layer, BayesNorm)
    assert "BayesLayerNorm" in repr(layer)
    assert "modes=4" in repr(layer)


def test_a_bayesian_norm_can_be_copied_and_pickled() -> None:
    layer = convert(nn.LayerNorm(4)).backbone
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is type(layer)
        assert isinstance(other, BayesNorm)
        assert isinstance(layer, BayesNorm)
        assert torch.equal(other.bank.gamma, layer.bank.gamma)


def test_sampled_gamma_is_the_equation() -> None:
    gamma, eps = torch.randn(5), torch.randn(5)
    torch.testing.assert_close(sample_gamma(gamma, eps, 0.1), gamma * (1 + 0.1 * eps))
    effective = 1 + sample_gamma(gamma, eps, 0.1, offset=1.0)
    torch.testing.assert_close(effective, (1 + gamma) * (1 + 0.1 * eps))


def _move_modes(bnn: abnn.ABNN) -> None:
    """Give every mode its own gamma, beta and statistics, as a fit would."""
    torch.manual_seed(4)
    for layer in bnn.bayes_layers.values():
        for tensor in layer.bank.state_dict().values():
            if tensor.is_floating_point():
                tensor.mul_(1 + 0.3 * torch.rand_like(tensor))


def _set(layer: nn.Module, name: str, value: Tensor) -> None:
    if name in layer._buffers:
        layer._buffers[name] = value
    else:
        layer._parameters[name] = nn.Parameter(value)
