"""MIMO: what goes in and comes out, who sees what while it is trained, and what that leads to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import abnn
from abnn.baselines.mimo import MIMO
from nets import cnn, mlp


class Backwards(nn.Module):
    """Registers its layers in the opposite order to that in which they run."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.stem = nn.Linear(8, 3), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.stem(x).relu())
        return y


class TwoHeads(nn.Module):
    """The second head is only an aid to the training of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.main, self.aux = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.trunk(x).relu()
        return {"out": self.main(h), "aux": self.aux(h)}


def fully_convolutional(classes: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, classes, 1))


@pytest.mark.parametrize(
    ("net", "x", "shape"),
    [
        (mlp(), torch.randn(5, 4), (3,)),
        (cnn(), torch.randn(5, 3, 8, 8), (3,)),
        (fully_convolutional(), torch.randn(5, 3, 8, 8), (4, 6, 6)),
        (nn.Sequential(nn.Conv1d(2, 4, 3), nn.Conv1d(4, 3, 3)), torch.randn(5, 2, 9), (3, 5)),
        (nn.Conv3d(2, 3, 2), torch.randn(5, 2, 4, 4, 4), (3, 3, 3, 3)),
        (nn.ConvTranspose2d(2, 3, 2), torch.randn(5, 2, 4, 4), (3, 5, 5)),
        (nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), torch.randn(5, 3, 2, 2), (3,)),
    ],
)
def test_every_member_has_logits_for_every_example(
    net: nn.Module, x: Tensor, shape: tuple[int, ...]
) -> None:
    members = MIMO(net, members=2).predict(x, keep_members=True).members
    assert members is not None
    assert members.shape == (2, 5, *shape)
    torch.testing.assert_close(members.sum(2), torch.ones_like(members[:, :, 0]))


def test_one_member_is_the_network_itself() -> None:
    net, x = mlp(), torch.randn(5, 4)
    torch.testing.assert_close(MIMO(net, members=1).predict(x).probs, net(x).softmax(1))


@pytest.mark.parametrize("M", [2, 5])
def test_only_the_ends_grow(M: int) -> None:
    net = cnn()
    ends = ("0.weight", "7.weight", "7.bias")
    added = (M - 1) * sum(p.numel() for name, p in net.named_parameters() if name in ends)
    mimo = MIMO(net, members=M)
    assert mimo.num_added_parameters == added
    after = dict(mimo.net.named_parameters())
    inner = {name: p for name, p in net.named_parameters() if name[0] not in "07"}
    assert len(inner) == 6
    assert all(torch.equal(p, after[name]) for name, p in inner.items())


def test_the_logits_are_those_of_the_sum_of_what_all_inputs_cause() -> None:
    mimo = MIMO(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), members=3)
    inputs = [torch.randn(5, 4) for _ in range(3)]
    A, B = (layer.weight for layer in (mimo.net[0], mimo.net[2]))
    a, b = (layer.bias for layer in (mimo.net[0], mimo.net[2]))
    parts = [x @ A[:, 4 * j : 4 * j + 4].T for j, x in enumerate(inputs)]
    h = (parts[0] + parts[1] + parts[2] + a).relu()
    expected = [h @ B[3 * m : 3 * m + 3].T + b[3 * m : 3 * m + 3] for m in range(3)]
    torch.testing.assert_close(mimo.heads(inputs), torch.stack(expected))


def test_inputs_of_images_are_side_by_side_as_channels_and_heads_as_classes() -> None:
    mimo = MIMO(fully_convolutional(), members=2)
    inputs = [torch.randn(5, 3, 8, 8) for _ in range(2)]
    first, last = mimo.net[0], mimo.net[2]
    h = F.conv2d(inputs[0], first.weight[:, :3], first.bias)
    h = (h + F.conv2d(inputs[1], first.weight[:, 3:])).relu()
    expected = [F.conv2d(h, last.weight[k : k + 4], last.bias[k : k + 4]) for k in (0, 4)]
    torch.testing.assert_close(mimo.heads(inputs), torch.stack(expected), atol=1e-5, rtol=1e-5)


def test_widened_layers_start_as_layers_of_their_size_do() -> None:
    torch.manual_seed(0)
    mimo = MIMO(nn.Sequential(nn.Linear(50, 40), nn.Linear(40, 20)), members=4)
    for layer in mimo.net:
        bound = layer.in_features**-0.5
        assert 0.98 * bound < layer.weight.abs().max() <= bound
        assert layer.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)


def test_classes_may_be_last_and_logits_anywhere() -> None:
    net, x = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), torch.randn(2, 7, 4)
    mimo = MIMO(net, members=2, class_dim=-1)
    expected = mimo.net(torch.cat([x, x], -1)).unflatten(-1, (2, 3)).movedim(2, 0).movedim(-1, 2)
    torch.testing.assert_close(next(mimo.member_logits(x)), expected)
    odd = MIMO(TwoHeads(), members=2, last="aux", output=lambda result: result["aux"])
    assert odd.predict({"x": torch.randn(2, 3, 6, 6)}).probs.shape == (2, 4, 4, 4)


# Who sees what


def test_members_see_all_examples_in_an_order_of_their_own() -> None:
    rows = MIMO(mlp(), members=3, batch_repetition=2).training_rows(32)
    assert rows.shape == (3, 64)
    assert (rows.sort(1).values == torch.arange(32).repeat_interleave(2)).all()
    assert (rows[0] == rows[1]).float().mean() < 0.2
    assert (rows[1] == rows[2]).float().mean() < 0.2


@pytest.mark.parametrize("rho", [0.25, 0.5, 1.0])
def test_a_share_of_the_rows_is_the_same_for_all_members(rho: float) -> None:
    rows = MIMO(mlp(), members=4, rho=rho).training_rows(400)
    same = (rows == rows[0]).all(0)
    assert same[-int(400 * rho) :].all()
    assert same.float().mean().item() == pytest.approx(rho, abs=0.01)
    assert (rows.sort(1).values == torch.arange(400)).all()
    assert not torch.equal(rows[0], torch.arange(400))


@pytest.mark.parametrize("repetition", [1, 3])
def test_the_loss_is_the_sum_of_what_heads_say_of_their_own_examples(repetition: int) -> None:
    mimo = MIMO(fully_convolutional(), members=2, batch_repetition=repetition)
    x, y = torch.randn(6, 3, 8, 8), torch.randint(4, (6, 6, 6))
    y[:, :3] = 255
    torch.manual_seed(1)
    loss = mimo.training_loss(x, y, ignore_index=255)
    torch.manual_seed(1)
    a, b = mimo.training_rows(6)
    logits = mimo.heads([x[a], x[b]])[..., 3:, :]
    expected = F.cross_entropy(logits[0], y[a, 3:]) + F.cross_entropy(logits[1], y[b, 3:])
    torch.testing.assert_close(loss, expected)


CENTRES = 3 * torch.tensor([[1.0, 0.0], [-0.5, 0.87], [-0.5, -0.87]])


def clusters(n: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (n,), generator=g)
    return CENTRES[y] + 0.5 * torch.randn(n, 2, generator=g), y


def trained(rho: float) -> MIMO:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    mimo = MIMO(net, members=2, rho=rho)
    loader = [clusters(128, seed) for seed in range(20)]
    abnn.train(mimo, loader, epochs=15, lr=0.1, weight_decay=0.0)
    return mimo


def test_a_trained_member_reads_its_own_input_and_no_other() -> None:
    mimo = trained(rho=0.0)
    (a, y_a), (b, y_b) = clusters(500, 100), clusters(500, 101)
    with torch.no_grad():
        heads = mimo.heads([a, b]).argmax(2)
        shuffled = mimo.heads([a, b.flip(0)])[0].argmax(1), mimo.heads([a.flip(0), b])[1].argmax(1)
    for head, own, other, again in zip(heads, (y_a, y_b), (y_b, y_a), shuffled, strict=True):
        assert (head == own).float().mean() > 0.95
        assert (head == other).float().mean() < 0.45  # chance is 1/3
        assert (head == again).float().mean() > 0.95
    assert (mimo.predict(a).label == y_a).float().mean() > 0.95


def test_members_that_always_see_the_same_example_do_not_tell_their_inputs_apart() -> None:
    mimo = trained(rho=1.0)
    (a, y_a), (b, y_b) = clusters(500, 100), clusters(500, 101)
    assert (mimo.predict(a).label == y_a).float().mean() > 0.95
    with torch.no_grad():
        heads = mimo.heads([a, b]).argmax(2)
    own = torch.stack([heads[0] == y_a, heads[1] == y_b]).float().mean()
    assert own < 0.85


# What is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"members": 0}, "members=0 is not a whole number of at least 1"),
        ({"members": 1.5}, "members=1.5 is not a whole number"),
        ({"batch_repetition": 0}, "batch_repetition=0 is not a whole number of at least 1"),
        ({"rho": 1.5}, "rho=1.5 is not a number of at least 0 and of at most 1"),
        ({"first": "1"}, "first='1' is no convolution or linear layer .* '0', '3'"),
        ({"last": "head"}, "last='head' is no convolution"),
    ],
)
def test_half_typed_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MIMO(mlp(), **settings)


def test_networks_whose_ends_cannot_be_widened_are_refused() -> None:
    tied = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    tied[2].weight = tied[0].weight
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)), nn.Linear(8, 3))
    grouped = nn.Sequential(nn.Conv2d(4, 8, 1, groups=2), nn.Conv2d(8, 3, 1))
    with pytest.raises(ValueError, match="'2' shares its weight|'0' shares its weight"):
        MIMO(tied)
    with pytest.raises(ValueError, match="weight of the layer '0' is computed from other tensors"):
        MIMO(normed)
    with pytest.raises(ValueError, match="The layer '0' has 2 groups"):
        MIMO(grouped)
    with pytest.raises(ValueError, match="no convolution and no linear layer"):
        MIMO(nn.Sequential(nn.ReLU()))


def test_a_network_that_runs_its_layers_in_another_order_says_which_to_name() -> None:
    x = torch.randn(5, 4)
    with pytest.raises(ValueError, match="layer 'stem' takes 4 channels and got 8; pass"):
        MIMO(Backwards(), members=2).predict(x)
    assert MIMO(Backwards(), members=2, first="stem", last="head").predict(x).samples_used == 2
    with pytest.raises(ValueError, match="logits have 4 classes, but the layer 'aux' makes 4 for"):
        MIMO(TwoHeads(), members=2).predict(torch.randn(5, 3, 6, 6))
    assert MIMO(TwoHeads(), last="main").predict(torch.randn(5, 3, 6, 6)).samples_used == 3


def test_inputs_that_are_not_channels_are_refused() -> None:
    text = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 3))
    with pytest.raises(TypeError, match=r"tensor of torch.int64, such as tokens; it needs images"):
        MIMO(text).predict(torch.randint(10, (5, 3)))

    class TwoInputs(nn.Linear):
        def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
            return super().forward(x if z is None else x + z)

    with pytest.raises(ValueError, match="holds 2 tensors with a row for every example"):
        MIMO(TwoInputs(4, 3)).predict((torch.randn(5, 4), torch.randn(5, 4)))
    with pytest.raises(ValueError, match=r"shape \(5,\), without the dimension -3 of channels"):
        MIMO(cnn()).predict(torch.randn(5))
    with pytest.raises(ValueError, match="There are 4 labels for 5 inputs"):
        MIMO(mlp()).training_loss(torch.randn(5, 4), torch.zeros(4).long())


def test_an_error_of_the_network_that_has_nothing_to_do_with_widths_stays_as_it_is() -> None:
    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 2:
                raise RuntimeError("out of memory")
            return super().forward(x)

    with pytest.raises(RuntimeError, match="out of memory"):
        MIMO(Broken(4, 3)).predict(torch.randn(5, 4))
