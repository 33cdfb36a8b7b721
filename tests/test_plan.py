"""Every plan gives the same prediction, whatever is shared, overwritten or copied."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import abnn
from abnn import Plan
from abnn.survey import share_of_trunk
from nets import cnn

X = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def jittered(net: nn.Module, **options: Any) -> abnn.ABNN:
    """An ABNN with strong noise, whose modes and statistics differ."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_var is not None:
            module.running_var.uniform_(0.5, 2)
    bnn = abnn.convert(net, alpha=0.2, **options)
    for parameter in bnn.trainable_parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return bnn


class PreActivation(nn.Module):
    """A residual block whose norm is not the only one that needs its input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.conv(F.relu(self.norm(x)))
        logits: Tensor = self.head(F.relu(self.last(x)).mean((2, 3)))
        return logits


class TwoBranches(nn.Module):
    """Two norms on the same tensor, and a convolution that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1)
        self.a, self.b = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.twice = nn.Conv2d(8, 8, 1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        a, b = self.twice(self.a(x)), self.norm(self.twice(self.b(x)))
        logits: Tensor = self.head(torch.cat([a, b], 1).mean((2, 3)))
        return logits


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        logits: Tensor = self.head(self.norm2(x).mean(1))
        return logits


def flattened() -> nn.Module:
    """Its last layer sees the pixels in the order of memory, if that is not looked after."""

    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(x.shape[0], -1)

    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), Flat(), nn.Linear(144, 4)
    )


NETS: dict[str, Callable[[], nn.Module]] = {
    "cnn": cnn,
    "pre-activation": PreActivation,
    "two branches": TwoBranches,
    "transformer": Transformer,
    "flattened": flattened,
    "depthwise": lambda: nn.Sequential(
        nn.Conv2d(3, 6, 3, groups=3, bias=False),
        nn.BatchNorm2d(6),
        nn.Conv2d(6, 4, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ),
    "transposed": lambda: nn.Sequential(
        nn.ConvTranspose2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ),
}
PLANS = [
    Plan(draws=1),
    Plan(draws=3, examples=2),
    Plan(draws=8, examples=1),
    Plan(channels_last=False),
    Plan(trunk=False),
    Plan(channels_last=False, examples=2),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("name", NETS)
def test_every_plan_gives_the_same_members(name: str, plan: Plan) -> None:
    bnn = jittered(NETS[name](), modes=2)
    expected = bnn.predict(X, samples=4, keep_members=True)
    planned = bnn.predict(X, samples=4, keep_members=True, plan=plan)
    assert expected.members is not None
    assert planned.members is not None
    torch.testing.assert_close(planned.members, expected.members, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(planned.energy, expected.energy, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stats", ["per_mode", "frozen"])
def test_draws_together_are_those_of_the_plain_networks(stats: Any) -> None:
    bnn = jittered(cnn(), modes=2, stats=stats)
    members = bnn.predict(X, 2, keep_members=True).members
    assert members is not None
    plain = [bnn.draw(mode, 0, index) for mode in range(2) for index in range(2)]
    with torch.no_grad():
        expected = torch.stack([net(X).softmax(1) for net in plain])
    torch.testing.assert_close(members, expected, rtol=1e-4, atol=1e-6)


def test_what_a_plan_does_is_what_it_says() -> None:
    bnn, rows = jittered(cnn(), modes=2), []
    bnn.plan(X)  # settles how draws share a pass
    bnn.backbone.register_forward_hook(lambda _, args, out: rows.append((len(args[0]), len(out))))
    bnn.predict(X, 4, plan=Plan(draws=4, examples=2))
    assert rows == [(2, 8), (2, 8), (1, 4)] * 2
    rows.clear()
    bnn.predict(X, 4, plan=Plan(draws=4, trunk=False, examples=5))
    assert rows == [(20, 20)] * 2


def test_the_trunk_runs_once_and_the_network_is_left_as_it_was() -> None:
    bnn, rows = jittered(cnn(), modes=2), []
    before = copy.deepcopy(bnn.state_dict())
    bnn.predict(X)
    first = next(m for m in bnn.backbone.modules() if isinstance(m, nn.Conv2d))
    first.register_forward_hook(lambda _, args, out: rows.append(len(out)))
    bnn.predict(X, 4, plan=Plan(examples=5))
    assert rows == [5]
    for name, tensor in bnn.state_dict().items():
        assert torch.equal(tensor, before[name]), name
        assert tensor.stride() == before[name].stride(), name


def test_a_trunk_that_meets_its_branches_again_is_watched() -> None:
    bnn, rows = jittered(Transformer(), modes=2, layers="last:1"), []
    plan = bnn.plan(X)
    assert plan.trunk
    assert share_of_trunk(bnn.backbone, bnn.bayes_layers, X) > 0.9
    bnn = jittered(PreActivation(), modes=2)
    bnn.predict(X, plan=Plan(examples=5))
    bnn.backbone.stem.register_forward_hook(lambda *args: rows.append(len(args[2])))  # type: ignore[union-attr]
    bnn.predict(X, plan=Plan(examples=5))
    assert rows == [5]


def test_an_input_that_others_need_is_not_overwritten() -> None:
    for build in (PreActivation, TwoBranches):
        bnn = jittered(build(), modes=2)
        (folding,) = (bnn.predict(X), list(bnn._known.foldings.values()))[1]
        assert folding is not None
        index = {name: layer.bank.index for name, layer in bnn.bayes_layers.items()}
        shared = {"norm"} if build is PreActivation else {"a", "b"}
        assert not folding.overwrite & {index[name] for name in shared}


@pytest.mark.parametrize("late", [True, False])
def test_what_hooks_have_seen_is_not_overwritten(late: bool) -> None:
    bnn, seen = jittered(cnn(), modes=2), []
    if late:
        bnn.predict(X)  # settles what may be overwritten
    for module in bnn.backbone.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda _, args, out: seen.append((out, out.clone())))
    bnn.predict(X, plan=Plan(trunk=False))
    assert seen
    assert all(torch.equal(now, then) for now, then in seen)


def test_a_network_that_writes_to_its_input_sees_it_anew_for_every_draw() -> None:
    class Doubling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2)

    bnn = jittered(nn.Sequential(Doubling(), cnn()), modes=2)
    nets = [bnn.draw(mode, 0, index) for mode in range(2) for index in range(2)]
    with torch.no_grad():
        expected = torch.stack([net(X.clone()).softmax(1) for net in nets])
    for plan in PLANS:
        members = bnn.predict(X.clone(), 2, keep_members=True, plan=plan).members
        torch.testing.assert_close(members, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", ["in place", "loaded", "modes", "fit"])
def test_what_was_kept_is_forgotten_when_values_change(change: str) -> None:
    """Copies of weights, and weights of draws, must be those of now."""
    net = cnn()
    bnn = jittered(net, modes=2)
    bnn.predict(X)
    other = cnn()
    with torch.no_grad():
        if change == "in place":
            for parameter in net.parameters():
                parameter.mul_(1.5)
        elif change == "loaded":
            net.load_state_dict(other.state_dict())
        elif change == "modes":
            for parameter in bnn.trainable_parameters():
                parameter.add_(0.5)
    if change == "fit":
        abnn.fit(bnn, [(X, torch.randint(3, (5,)))], steps=2, lr=0.5)
    expected = copy.deepcopy(bnn).predict(X, keep_members=True).members
    members = bnn.predict(X, keep_members=True).members
    looped = bnn.predict(X, keep_members=True, plan=Plan(draws=1)).members
    assert members is not None
    torch.testing.assert_close(members, expected, rtol=0, atol=0)
    torch.testing.assert_close(members, looped, rtol=1e-4, atol=1e-5)


def test_the_last_norms_alone_can_be_bayesian() -> None:
    bnn = abnn.convert(cnn(), layers="last:1")
    (name,) = bnn.bayes_layers
    assert name == list(abnn.convert(cnn()).bayes_layers)[-1]
    for wrong in ("last:0", "last:99", "last:x"):
        with pytest.raises(ValueError, match="must be last:1 to last:"):
            abnn.convert(cnn(), layers=wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"draws": 0}, "draws=0"),
        ({"examples": 1.5}, "examples=1.5"),
        ({"trunk": "yes"}, "trunk='yes' must be True"),
    ],
)
def test_impossible_plans_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan(**arguments)


def test_noise_of_its_own_for_every_example_keeps_the_batch_whole() -> None:
    bnn = abnn.convert(cnn(), noise="example")
    assert bnn.plan(X).examples == len(X)
    with pytest.raises(ValueError, match="would split the batch"):
        bnn.predict(X, plan=Plan(examples=2))
