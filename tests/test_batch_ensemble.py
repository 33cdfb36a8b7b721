"""BatchEnsemble: its members are the networks of the equation, however they are run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import abnn
from abnn.baselines import BatchEnsemble
from abnn.surgery import weighted_layers
from fitting import data
from nets import cnn, mlp
from networks import NETWORKS, build, run

CHOSEN = (
    "torch/transformer_encoder",
    "torch/two_inputs",
    "torchvision/resnet18",
    "torchvision/mobilenet_v3_small",
    "torchvision/swin",
    "torchvision/vit",
    "timm/test_vit",
    "timm/swin_tiny_patch4_window7_224",
    "timm/beit_base_patch16_224",
    "transformers/BertForSequenceClassification",
    "transformers/LlamaForCausalLM",
)


def members_of(ensemble: BatchEnsemble, x: Any) -> Tensor:
    ensemble.eval()
    with torch.no_grad():
        return torch.cat(list(ensemble.member_logits(x)))


def explicit(net: nn.Module, ensemble: BatchEnsemble, member: int) -> nn.Module:
    """The network of one member, with its own weights written out."""
    alone = copy.deepcopy(net)
    theirs = weighted_layers(ensemble.net)
    for name, layer in weighted_layers(alone).items():
        r, s = (getattr(theirs[name], f"ensemble_{part}")[member] for part in "rs")
        transposed, groups = getattr(layer, "transposed", False), getattr(layer, "groups", 1)
        blocks = [
            torch.outer(a, b) if transposed else torch.outer(b, a)
            for a, b in zip(r.chunk(groups), s.chunk(groups), strict=True)
        ]
        weight, bias = layer.weight, theirs[name].ensemble_b
        assert isinstance(weight, Tensor)
        product = torch.cat(blocks)
        weight.data.mul_(product.view(*product.shape, *[1] * (weight.ndim - 2)))
        if isinstance(bias, Tensor):
            layer.bias = nn.Parameter(bias[member])
    return alone


def randomise(ensemble: BatchEnsemble) -> BatchEnsemble:
    """Biases that differ between members, as after a training."""
    for name, parameter in ensemble.named_parameters():
        if name.endswith("ensemble_b"):
            parameter.data.normal_()
    return ensemble


@pytest.mark.parametrize("name", CHOSEN)
def test_with_factors_of_one_every_member_is_the_network(name: str) -> None:
    (network,) = (n for n in NETWORKS if n.name == name)
    net, x = build(network), network.inputs(2)
    with torch.no_grad():
        expected = run(net, x).movedim(network.class_dim, 1)
    ensemble = BatchEnsemble(net, 3, factors="ones", class_dim=network.class_dim)
    logits = members_of(ensemble, x)
    torch.testing.assert_close(logits, expected.expand_as(logits), rtol=1e-5, atol=1e-5)
    assert list(ensemble._members._folds.values()) == [True]


class Keywords(nn.Module):
    """Linear layers on tokens, called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(input=self.first(input=x).relu())
        return y.mean(1)


class Twice(nn.Module):
    """One layer with two parents, called twice."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(6, 6)
        self.first, self.second = nn.Sequential(layer), nn.Sequential(layer, nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x))
        return y


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "features": (lambda: nn.Linear(6, 4), (6,)),
    "mlp": (mlp, (4,)),
    "cnn": (cnn, (3, 8, 8)),
    "tokens by keyword": (Keywords, (5, 6)),
    "shared": (Twice, (6,)),
    "1d, circular": (lambda: nn.Conv1d(4, 6, 3, padding=1, padding_mode="circular"), (4, 9)),
    "2d, groups, reflected": (
        lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect", groups=2),
        (4, 5, 5),
    ),
    "2d, depthwise": (lambda: nn.Conv2d(4, 8, 3, stride=2, groups=4), (4, 7, 7)),
    "3d": (lambda: nn.Conv3d(2, 3, 2, dilation=2), (2, 4, 4, 4)),
    "1d, transposed": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), (4, 5)),
    "2d, transposed, groups": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), (4, 5, 5)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_members_are_networks_with_factors_of_rank_one(kind: str) -> None:
    make, shape = LAYERS[kind]
    net, x = make().eval(), torch.randn(2, *shape)
    ensemble = randomise(BatchEnsemble(net, members=3))
    with torch.no_grad():
        expected = torch.stack([explicit(net, ensemble, m)(x) for m in range(3)])
    torch.testing.assert_close(members_of(ensemble, x), expected, rtol=1e-4, atol=1e-5)
    assert list(ensemble._members._folds.values()) == [True]


def test_a_weight_that_is_computed_is_multiplied_too() -> None:
    plain, x = nn.Linear(4, 3), torch.randn(2, 4)
    ensemble = BatchEnsemble(weight_norm(copy.deepcopy(plain)), members=2)
    expected = torch.stack([explicit(plain, ensemble, m)(x) for m in range(2)])
    torch.testing.assert_close(members_of(ensemble, x), expected)


def test_attention_stays_shared_and_says_what_the_network_says() -> None:
    net = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    named = dict(BatchEnsemble(net).named_parameters())
    assert not any("self_attn" in name and "ensemble" in name for name in named)
    assert "net.linear1.ensemble_r" in named


@pytest.mark.parametrize(("factors", "mean", "std"), [("normal", 1, 0.5), ("signs", 0, 1)])
def test_factors_start_as_the_paper_says(factors: Any, mean: float, std: float) -> None:
    ensemble = BatchEnsemble(nn.Linear(5000, 5000, bias=False), 4, factors)
    for name in ("ensemble_r", "ensemble_s"):
        values = getattr(ensemble.net, name)
        assert values.mean().item() == pytest.approx(mean, abs=0.02)
        assert values.std().item() == pytest.approx(std, abs=0.02)


def test_decay_pulls_the_shared_weights_but_not_the_factors() -> None:
    ensemble = BatchEnsemble(nn.Linear(4, 3), members=2)
    groups = ensemble.parameter_groups()
    assert {id(p) for group in groups for p in group["params"]} == {
        id(p) for p in ensemble.parameters()
    }
    optimizer = torch.optim.SGD(groups, lr=0.1, weight_decay=1.0)
    before = copy.deepcopy(ensemble.state_dict())
    for parameter in ensemble.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = ensemble.state_dict()
    for name in ("ensemble_r", "ensemble_s"):
        assert torch.equal(after[f"net.{name}"], before[f"net.{name}"])
    for name in ("weight", "ensemble_b"):
        torch.testing.assert_close(after[f"net.{name}"], 0.9 * before[f"net.{name}"])


def test_a_batch_trains_the_factors_of_the_members_that_own_its_rows() -> None:
    ensemble = BatchEnsemble(nn.Linear(4, 3), members=3)
    ensemble.training_logits(torch.randn(2, 4)).sum().backward()
    touched = ensemble.net.ensemble_b.grad.any(1)
    assert touched.sum() == 2


def test_it_learns_what_a_network_learns() -> None:
    ensemble = BatchEnsemble(mlp(), members=2)
    losses = abnn.train(ensemble, data(batches=8, size=16), epochs=8, lr=0.1).losses
    assert losses[-8:].mean() < 0.5 * losses[:8].mean()
    members = members_of(ensemble, data()[0][0])
    assert (members[0] - members[1]).abs().max() > 0.1


def test_what_a_member_adds_is_a_vector_of_each_width() -> None:
    net = nn.Linear(4, 3)
    assert BatchEnsemble(net, members=5).num_added_parameters == 5 * (4 + 3 + 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_members_keep_the_precision_of_the_network(dtype: torch.dtype) -> None:
    net = cnn().to(dtype)
    x = torch.randn(2, 3, 8, 8, dtype=dtype)
    ensemble = BatchEnsemble(net, members=3)
    logits = members_of(ensemble, x)
    assert logits.dtype == dtype
    assert list(ensemble._members._folds.values()) == [True]


def test_autocast_leaves_the_types_of_the_network() -> None:
    types: list[torch.dtype] = []
    net = cnn()
    net[5].register_forward_hook(lambda module, args, y: types.append(y.dtype))
    x = torch.randn(2, 3, 8, 8)
    ensemble = BatchEnsemble(net, members=2)
    with torch.autocast("cpu", torch.bfloat16):
        net(x)
        members_of(ensemble, x)
        ensemble.train().training_logits(x).sum().backward()
    assert set(types) == {torch.bfloat16}
    assert all(p.grad is not None for p in (ensemble.net[3].weight, ensemble.net[3].ensemble_r))


def test_a_copy_has_members_of_its_own() -> None:
    ensemble, x = BatchEnsemble(mlp(), members=2), torch.randn(3, 4)
    before = members_of(ensemble, x)
    twin = copy.deepcopy(ensemble)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(members_of(ensemble, x), before)
    assert not members_of(twin, x).any()


def test_the_network_inside_is_not_for_calling() -> None:
    with pytest.raises(RuntimeError, match="call predict"):
        BatchEnsemble(mlp()).net(torch.randn(2, 4))


def test_impossible_ensembles_are_refused() -> None:
    with pytest.raises(ValueError, match="members=0 is not a whole number of at least 1"):
        BatchEnsemble(mlp(), members=0)
    with pytest.raises(ValueError, match="factors='random' must be"):
        BatchEnsemble(mlp(), factors="random")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no convolution and no linear layer"):
        BatchEnsemble(nn.LayerNorm(3))
