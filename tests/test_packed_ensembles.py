"""Packed-Ensembles: every member is a narrower network, and knows nothing of the others."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import abnn
from abnn.baselines.packed_ensembles import PackedEnsembles
from abnn.baselines.resizing import Grouped, resize_norm
from nets import cnn, mlp


class Mixed(nn.Module):
    """All that convolutional networks are made of, as wide as one likes."""

    def __init__(self, width: int, groups: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.gn = nn.GroupNorm(groups, width)
        self.grouped = nn.Conv2d(width, 2 * width, 1, groups=2)
        self.act = nn.PReLU(2 * width)
        self.squeeze = nn.Linear(2 * width, width // 2)
        self.excite = nn.Linear(width // 2, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.flat = nn.Linear(2 * width * 16, 2 * width)
        self.ln = nn.LayerNorm(2 * width)
        self.head = nn.Linear(2 * width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(self.stem(x)).relu()
        x = x + self.gn(self.depthwise(x))
        y = self.act(self.grouped(F.max_pool2d(x, 2)))
        y = y * self.excite(self.squeeze(y.mean((2, 3))).relu()).sigmoid()[:, :, None, None]
        z = torch.cat([self.up(y), x], 1)  # as a U-Net does
        z = z.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)  # shuffles the channels
        h = self.flat(F.adaptive_avg_pool2d(z, 4).flatten(1))
        logits: Tensor = self.head(self.ln(h) + h)
        return logits


def randomised(packed: PackedEnsembles) -> PackedEnsembles:
    """With norms and statistics that are not trivial, and differ from member to member."""
    for name, tensor in packed.net.state_dict().items():
        if tensor.is_floating_point() and any(n in name for n in ("bn.", "gn.", "ln.", "act.")):
            tensor.uniform_(0.5, 1.5)
    return packed


def member(packed: PackedEnsembles, m: int, net: nn.Module) -> nn.Module:
    """An ordinary network with the weights of one member."""
    state = packed.net.state_dict()
    own = {name: t[m] if t.is_floating_point() else t for name, t in state.items()}
    net.load_state_dict(own)
    return net


def packed_mixed(members: int = 4) -> PackedEnsembles:
    torch.manual_seed(0)
    return randomised(PackedEnsembles(Mixed(8 * members // 2, 2 * members), members=members))


@pytest.mark.parametrize("members", [2, 4])
def test_every_member_is_an_ordinary_network_of_narrower_layers(members: int) -> None:
    packed, x = packed_mixed(members), torch.randn(5, 3, 8, 8)
    probs = packed.predict(x, keep_members=True).members
    assert probs is not None
    for m in range(members):
        alone = member(packed, m, Mixed(8)).eval()
        torch.testing.assert_close(probs[m], alone(x).softmax(1), atol=1e-5, rtol=1e-4)


def test_training_is_that_of_the_members_with_a_share_of_the_loss_each() -> None:
    packed, x, y = packed_mixed(), torch.randn(5, 3, 8, 8), torch.tensor([0, 1, 2, -100, 1])
    nets = [member(packed, m, Mixed(8)).train() for m in range(4)]
    packed.train()
    loss = packed.training_loss(x, y)
    losses = [F.cross_entropy(net(x), y) for net in nets]
    torch.testing.assert_close(loss, torch.stack(losses).mean())
    loss.backward()
    for m, net in enumerate(nets):
        (losses[m] / 4).backward()
        own = dict(net.named_parameters()) | dict(net.named_buffers())
        for name, bank in packed.net.named_parameters():
            assert bank.grad is not None
            torch.testing.assert_close(bank.grad[m], own[name].grad, atol=1e-5, rtol=1e-3)
        for name in ("bn.running_mean", "bn.running_var"):
            torch.testing.assert_close(packed.net.state_dict()[name][m], own[name])
    assert packed.net.state_dict()["bn.num_batches_tracked"] == 1


def test_no_member_depends_on_the_weights_of_another() -> None:
    packed, x = packed_mixed(), torch.randn(5, 3, 8, 8)
    logits = torch.cat(list(packed.train().member_logits(x)))
    for m in range(4):
        weights = list(packed.net.parameters())
        for gradient in torch.autograd.grad(logits[m].square().sum(), weights, retain_graph=True):
            others = [k for k in range(4) if k != m]
            assert gradient[m].abs().max() > 0
            assert gradient[others].abs().max() == 0


class Convolutions(TorchDispatchMode):
    """Notes the groups of every convolution that is really run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.groups: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            self.groups.append(args[8])
        return func(*args, **(kwargs or {}))


def test_all_members_are_one_convolution_of_more_groups() -> None:
    packed, x = PackedEnsembles(Mixed(16), members=4), torch.randn(5, 3, 8, 8)
    packed.predict(x)
    with Convolutions() as noted:
        packed.predict(x)
    # The input is the same for all members; a depthwise layer has 4 times 8 channels.
    assert noted.groups == [1, 32, 8, 4]


@pytest.mark.parametrize(
    ("members", "alpha", "gamma"), [(4, 2, 1), (4, 2, 2), (2, 3, 4), (8, 4, 1)]
)
def test_inner_layers_have_as_many_weights_as_the_paper_says(
    members: int, alpha: int, gamma: int
) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 64, 3),
        nn.Conv2d(64, 128, 3),
        nn.Flatten(),
        nn.Linear(128, 64),
        nn.Linear(64, 5),
    )
    packed = PackedEnsembles(net, members=members, alpha=alpha, gamma=gamma)
    sizes = {name: bank.numel() for name, bank in packed.net.named_parameters()}
    ratio = alpha**2 / (members * gamma)
    assert sizes["1.weight"] == 64 * 128 * 9 * ratio
    assert sizes["3.weight"] == 128 * 64 * ratio
    assert sizes["0.weight"] == 3 * 64 * 9 * alpha
    assert sizes["4.weight"] == 64 * 5 * alpha
    assert sizes["4.bias"] == 5 * members
    assert packed.predict(torch.randn(2, 3, 5, 5)).probs.shape == (2, 5)


def test_a_linear_layer_in_groups_is_a_grouped_convolution_and_a_block_diagonal_matrix() -> None:
    net = nn.Sequential(nn.Linear(4, 24), nn.Linear(24, 12), nn.Linear(12, 3))
    packed, x = PackedEnsembles(net, members=2, alpha=1, gamma=3), torch.randn(5, 4)
    logits = next(packed.member_logits(x))
    state = packed.net.state_dict()
    for m in range(2):
        h = F.linear(x, state["0.weight"][m], state["0.bias"][m])
        weight, bias = state["1.weight"][m], state["1.bias"][m]
        grouped = F.conv1d(h[:, :, None], weight[:, :, None], bias, groups=3).squeeze(2)
        blocks = torch.block_diag(*weight.chunk(3))
        torch.testing.assert_close(h @ blocks.T + bias, grouped)
        expected = F.linear(grouped, state["2.weight"][m], state["2.bias"][m])
        torch.testing.assert_close(logits[m], expected)
    assert isinstance(packed.net[1], Grouped)


@pytest.mark.parametrize(
    ("C", "members", "alpha", "gamma", "width"),
    [
        (64, 4, 2, 1, 32),
        (10, 4, 2, 1, 5),
        (10, 4, 1, 1, 3),
        (64, 3, 2, 1, 43),
        (64, 3, 2, 2, 44),
        (10, 7, 0.7, 1, 2),
        (1, 4, 8, 1, 1),
        (3, 4, 1, 1, 2),
        (50, 4, 4, 1, 50),
    ],
)
def test_widths_are_shared_out_and_rounded_up(
    C: int, members: int, alpha: float, gamma: int, width: int
) -> None:
    net = nn.Sequential(nn.Linear(4, C), nn.Linear(C, 3))
    packed = PackedEnsembles(net, members=members, alpha=alpha, gamma=gamma)
    assert packed.net.state_dict()["0.weight"].shape == (members, width, 4)
    assert packed.predict(torch.randn(2, 4)).samples_used == members


def test_members_start_apart_and_as_their_layers_do() -> None:
    torch.manual_seed(0)
    first = PackedEnsembles(cnn())
    torch.manual_seed(0)
    again = PackedEnsembles(cnn())
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in first.state_dict().items())
    kernel = first.net.state_dict()["3.weight"]
    assert all((kernel[0] != kernel[m]).all() for m in range(1, 4))
    bound = (4 * 9) ** -0.5  # a fan-in of 4 channels
    assert 0.95 * bound < kernel.abs().max() <= bound
    assert (first.net.state_dict()["1.running_mean"] == 0).all()


def test_members_as_wide_as_the_network_can_have_attention_and_tokens_of_their_own() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.randn(1, 1, 8))
            self.embed = nn.Linear(4, 8)
            self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1)
            y: Tensor = self.head(self.block(x)[:, 0])
            return y

    packed, x = PackedEnsembles(Tokens(), members=3, alpha=3), torch.randn(5, 6, 4)
    members = packed.predict(x, keep_members=True).members
    assert members is not None
    for m in range(3):
        alone = member(packed, m, Tokens()).eval()
        torch.testing.assert_close(members[m], alone(x).softmax(1))
    with pytest.raises(ValueError, match=r"'block.self_attn' can't be given other widths; give"):
        PackedEnsembles(Tokens())


def test_a_norm_of_the_input_keeps_its_width() -> None:
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    packed = PackedEnsembles(net, members=4)
    assert packed.predict(torch.randn(2, 4)).samples_used == 4
    assert packed.net.state_dict()["0.weight"].shape == (4, 4)
    assert packed.net.state_dict()["2.weight"].shape == (4, 4)
    assert packed.net.state_dict()["1.weight"].shape == (4, 4, 4)


@pytest.mark.parametrize(
    ("norm", "width", "groups"),
    [
        (nn.GroupNorm(4, 64), 32, 2),
        (nn.GroupNorm(1, 64), 128, 1),
        (nn.GroupNorm(64, 64), 32, 32),
        (nn.GroupNorm(2, 64), 16, 1),
    ],
)
def test_groups_of_a_group_norm_keep_their_size(
    norm: nn.GroupNorm, width: int, groups: int
) -> None:
    resize_norm(norm, width)
    assert norm.num_groups == groups
    assert norm(torch.randn(2, width, 3)).shape == (2, width, 3)


def test_a_resnet_packs_and_predicts() -> None:
    net = torchvision.models.resnet18(weights=None, num_classes=10)
    packed, x = PackedEnsembles(net, members=4, alpha=2, gamma=2), torch.randn(2, 3, 32, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one pass, and no fallback
        prediction = packed.predict(x, keep_members=True)
    assert prediction.members is not None
    assert prediction.members.shape == (4, 2, 10)
    assert prediction.members.var(0).min() > 0
    assert packed.num_added_parameters < -0.4 * sum(p.numel() for p in net.parameters())


# Where members can't be one pass


class Branching(nn.Module):
    """Looks at numbers to decide what to do, in training or else only in prediction."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.inner, self.when = mlp(width=16), training
        self.inner[1] = nn.BatchNorm1d(16, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y + 1 if self.training == self.when and y.sum().item() > -1e9 else y


@pytest.mark.parametrize("training", [True, False])
def test_members_that_cannot_run_together_run_one_by_one(training: bool) -> None:
    torch.manual_seed(0)
    packed = PackedEnsembles(Branching(training), members=2, alpha=1)
    plain = copy.deepcopy(packed)
    plain.net.when = None
    x, y = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    packed.train(training)
    plain.train(training)
    with pytest.warns(UserWarning, match="can't run in one pass, .* so they run one after"):
        loss = packed.training_loss(x, y)
    torch.testing.assert_close(loss, plain.training_loss(x, y))
    for name, tensor in plain.net.state_dict().items():
        torch.testing.assert_close(packed.net.state_dict()[name], tensor)


def test_the_first_pass_leaves_the_random_numbers_of_a_step_alone() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 3))
    packed, x, y = PackedEnsembles(net).train(), torch.randn(6, 4), torch.tensor([0, 1, 2] * 2)
    losses = []
    for _ in range(2):
        torch.manual_seed(1)
        losses.append(packed.training_loss(x, y).item())
    assert losses[0] == losses[1]
    logits = next(packed.member_logits(torch.ones(500, 4)))
    assert (logits[0] != logits[1]).all()  # with dropout of its own


def test_training_learns_an_easy_task() -> None:
    torch.manual_seed(0)
    centres = 3 * torch.randn(3, 4)
    labels = torch.randint(3, (10, 32))
    loader = [(centres[y] + torch.randn(32, 4), y) for y in labels]
    packed = PackedEnsembles(mlp(width=32), members=4)
    abnn.train(packed, loader, epochs=10, lr=0.1)
    members = packed.predict(loader[0][0], keep_members=True).members
    assert members is not None
    assert ((members.argmax(2) == labels[0]).float().mean(1) > 0.8).all()


# What is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"members": 0}, "members=0 is not a whole number of at least 1"),
        ({"gamma": 0}, "gamma=0 is not a whole number of at least 1"),
        ({"gamma": 1.5}, "gamma=1.5 is not a whole number"),
        ({"first": "stem"}, "first='stem' is no convolution or linear layer"),
    ],
)
def test_half_typed_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedEnsembles(mlp(), **settings)


class Scaled(nn.Module):
    """A parameter of no layer, as large as the layers are wide."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale, self.head = nn.Linear(4, 8), nn.Parameter(torch.ones(8)), mlp()
        self.head[0] = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.inner(x) * self.scale)
        return y


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.main, self.aux = nn.Linear(4, 8), nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.trunk(x)
        return {"out": self.main(h), "aux": self.aux(h)}


class Backwards(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.stem = nn.Linear(8, 3), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.stem(x))
        return y


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    return net


def weight_normed() -> nn.Module:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 8))
    return nn.Sequential(layer, nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("build", "settings", "message"),
    [
        (tied, {}, "'0' shares its weight with another layer"),
        (weight_normed, {}, "weight of the layer '0' is computed from other tensors"),
        (lambda: nn.ReLU(), {}, "no convolution and no linear layer"),
        (
            lambda: nn.Sequential(nn.Conv2d(4, 6, 1), nn.Conv2d(6, 6, 1, groups=2), cnn()),
            {},
            "'1' would have 3 channels in and 3 out, which 2 groups don't divide",
        ),
        (
            lambda: nn.Sequential(nn.Linear(4, 8), nn.GroupNorm(4, 8), nn.Linear(8, 3)),
            {"alpha": 2.5},
            "The 5 channels of a member don't make 2 groups",
        ),
    ],
)
def test_networks_that_cannot_be_packed_are_refused_at_once(
    build: Callable[[], nn.Module], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        PackedEnsembles(build(), **settings)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Scaled, "can't be run with narrower layers: the Scaled itself failed on"),
        (Backwards, "the layer 'stem' takes 2 channels and got 4 .* first= .now 'head'."),
        (TwoHeads, "The logits do not depend on the layer 'aux'; pass last="),
        (
            lambda: nn.Sequential(nn.Linear(4, 5), nn.Unflatten(1, (5, 1)), nn.Flatten(), mlp()),
            "can't be run with narrower layers: '1', a Unflatten",
        ),
    ],
)
def test_networks_that_cannot_be_packed_are_refused_at_the_first_pass(
    build: Callable[[], nn.Module], message: str
) -> None:
    packed, x = PackedEnsembles(build()), torch.randn(5, 4)
    with pytest.raises(ValueError, match=message):
        packed.predict(x)
    with pytest.raises(ValueError, match=message):
        packed.training_loss(x, torch.zeros(5).long())


def test_naming_the_ends_packs_what_the_order_of_layers_hides() -> None:
    x = torch.randn(5, 4)
    packed = PackedEnsembles(Backwards(), first="stem", last="head")
    assert packed.predict(x).probs.shape == (5, 3)
    assert PackedEnsembles(TwoHeads(), last="main").predict(x).probs.shape == (5, 5)
    wrong = PackedEnsembles(TwoHeads(), last="main", output=lambda result: result["aux"])
    with pytest.raises(ValueError, match="do not depend on the layer 'main'"):
        wrong.predict(x)


def test_logits_of_another_number_of_classes_are_refused() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).repeat(1, 2)

    net = nn.Sequential(nn.Linear(4, 8), Doubled(8, 3))
    with pytest.raises(ValueError, match="logits have 6 classes, but the layer '1' makes 3"):
        PackedEnsembles(net).predict(torch.randn(5, 4))
    packed = PackedEnsembles(net, output=lambda logits: logits)
    assert packed.predict(torch.randn(5, 4)).probs.shape == (5, 6)
