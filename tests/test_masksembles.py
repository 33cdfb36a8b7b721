"""Masksembles: what its masks are, and what a masked layer computes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import abnn
from abnn.baselines import load, loading
from abnn.baselines.masksembles import Masksembles, masks_of
from abnn.draws import generator
from fitting import data
from nets import mlp
from networks import NETWORKS, build, run

SHAPES = [(8, 4), (10, 8), (16, 2), (64, 4), (100, 8), (513, 3)]


def wide(width: int = 16, norm: type[nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    return mlp(norm, width)


def members_of(ensemble: Masksembles, x: Any) -> Tensor:
    ensemble.eval()
    with torch.no_grad():
        return torch.cat(list(ensemble.member_logits(x)))


@pytest.mark.parametrize("scale", [1.0, 1.1, 2.0, 3.0, 6.0])
@pytest.mark.parametrize(("width", "members"), SHAPES)
def test_masks_have_equally_many_ones_and_leave_no_channel_out(
    width: int, members: int, scale: float
) -> None:
    masks = masks_of(width, members, scale, generator("init", 0))
    assert masks.shape == (members, width)
    assert len(masks.sum(1).unique()) == 1
    assert masks.any(0).all()


@pytest.mark.parametrize("scale", [1.5, 2.0, 3.0, 5.0])
def test_as_many_channels_are_kept_as_fill_the_width_on_average(scale: float) -> None:
    """Masks of k ones among k * scale positions hit k * scale * (1 - (1 - 1 / scale)^M)."""
    width, M = 256, 4
    kept = int(masks_of(width, M, scale, generator("init", 0))[0].sum())
    assert kept * scale * (1 - (1 - 1 / scale) ** M) == pytest.approx(width, abs=scale)


@pytest.mark.parametrize("scale", [1.0, 1.5, 2.0, 3.0, 5.0])
def test_masks_overlap_as_the_scale_says(scale: float) -> None:
    """Two sets of k among k * scale share k / scale: their IoU is 1 / (2 scale - 1)."""
    ious = []
    for seed in range(10):
        masks = masks_of(512, 4, scale, generator("init", seed))
        for a, b in itertools.combinations(masks, 2):
            ious.append((a & b).sum() / (a | b).sum())
    assert torch.stack(ious).mean().item() == pytest.approx(1 / (2 * scale - 1), rel=0.03)


@pytest.mark.parametrize("scale", [1.5, 2.0, 3.0])
@pytest.mark.parametrize("width", [8, 9, 10, 11])
def test_narrow_masks_overlap_nearly_as_the_scale_says(width: int, scale: float) -> None:
    ious = []
    for seed in range(100):
        masks = masks_of(width, 4, scale, generator("init", seed))
        for a, b in itertools.combinations(masks, 2):
            ious.append((a & b).sum() / (a | b).sum())
    assert torch.stack(ious).mean().item() == pytest.approx(1 / (2 * scale - 1), abs=0.1)


def test_every_channel_is_masked_as_often() -> None:
    masks = torch.stack([masks_of(12, 4, 2.0, generator("init", seed)) for seed in range(600)])
    share = masks.float().mean((0, 1))
    assert (share - share.mean()).abs().max() < 0.04


def test_masks_differ_between_members_layers_and_seeds() -> None:
    net = nn.Sequential(*[nn.Linear(32, 32) for _ in range(3)])
    one, other = Masksembles(net, seed=0), Masksembles(net, seed=1)
    banks = [ensemble.net[i].ensemble_masks for ensemble in (one, other) for i in (1, 2)]
    assert len({tuple(mask.tolist()) for bank in banks for mask in bank}) == 16
    again = Masksembles(net, seed=0)
    assert torch.equal(again.net[1].ensemble_masks, one.net[1].ensemble_masks)


def test_the_global_generator_has_no_say_and_is_left_alone() -> None:
    net, state = wide(), torch.get_rng_state()
    Masksembles(net)
    assert torch.equal(state, torch.get_rng_state())


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "features": (lambda: nn.Linear(12, 4), (12,)),
    "tokens": (lambda: nn.Linear(12, 4), (5, 12)),
    "1d": (lambda: nn.Conv1d(12, 6, 3, padding=1, padding_mode="circular"), (12, 9)),
    "2d, groups": (lambda: nn.Conv2d(12, 6, 3, padding=1, groups=2), (12, 5, 5)),
    "3d, transposed": (lambda: nn.ConvTranspose3d(12, 3, 2), (12, 3, 3, 3)),
}


class Second(nn.Module):
    """A layer that is not the first."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(1, 1), layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(input=x)
        return y


@pytest.mark.parametrize("kind", LAYERS)
def test_a_masked_layer_is_a_layer_that_sees_some_channels(kind: str) -> None:
    make, shape = LAYERS[kind]
    net, x = Second(make()), torch.randn(2, *shape)
    ensemble = Masksembles(net, members=3)
    masks = ensemble.net.layer.ensemble_masks
    expected = []
    for mask in masks:
        last = isinstance(net.layer, nn.Linear)
        expected.append(net(x * (mask if last else mask.view(-1, *[1] * (x.ndim - 2)))))
    torch.testing.assert_close(members_of(ensemble, x), torch.stack(expected))
    assert (masks.sum(1) == 7).all()  # 12 / (2 * (1 - 1 / 2**3)) is 6.86


def test_with_a_scale_of_one_or_a_single_member_nothing_is_masked() -> None:
    net, x = wide(), torch.randn(3, 4)
    for ensemble in (Masksembles(net, 4, scale=1), Masksembles(net, 1, scale=3.0)):
        torch.testing.assert_close(members_of(ensemble, x), net(x).expand(ensemble.members, 3, 3))


@pytest.mark.parametrize(
    "name",
    ["torch/transformer_encoder", "torchvision/mobilenet_v3_small", "torchvision/swin"],
)
def test_members_in_one_pass_are_those_one_by_one(name: str) -> None:
    (network,) = (n for n in NETWORKS if n.name == name)
    net, x = build(network), network.inputs(2)
    ensemble = Masksembles(net, 3).eval()
    with torch.no_grad():
        alone = torch.stack([ensemble._members._alone(ensemble, x, m) for m in range(3)])
        torch.testing.assert_close(members_of(ensemble, x), alone, rtol=1e-4, atol=1e-4)
        assert (alone - run(net, x)).abs().amax((1, 2)).min() > 1e-3
    assert list(ensemble._members._folds.values()) == [True]


def test_the_first_layer_and_narrow_layers_are_not_masked() -> None:
    net = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 7), nn.Linear(7, 8), nn.Linear(8, 2))
    masked = [hasattr(layer, "ensemble_masks") for layer in Masksembles(net).net]
    assert masked == [False, True, False, True]


def test_masks_are_saved_and_cost_no_parameter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(loading.METHODS, "Masksembles", Masksembles)
    net, x = wide(), torch.randn(3, 4)
    ensemble = Masksembles(net, members=3, scale=1.5, seed=7)
    ensemble.save(tmp_path / "run")
    loaded = load(tmp_path / "run", net)
    assert torch.equal(loaded.net[3].ensemble_masks, ensemble.net[3].ensemble_masks)
    assert torch.equal(loaded.predict(x).probs, ensemble.predict(x).probs)
    assert loaded.arguments == {"members": 3, "scale": 1.5, "seed": 7, "class_dim": 1}
    assert ensemble.num_added_parameters == 0
    assert ensemble.num_added_bytes == 3 * 16


def test_what_a_member_never_sees_is_not_trained_by_it() -> None:
    ensemble = Masksembles(wide(norm=nn.LayerNorm), members=2)
    ensemble._members.folds(ensemble, torch.randn(2, 4))
    with ensemble._members.rows_of(0):
        ensemble.network_logits(torch.randn(5, 4)).square().sum().backward()
    last = ensemble.net[3]
    assert not last.weight.grad[:, ~last.ensemble_masks[0]].any()


def test_it_learns_and_its_members_differ() -> None:
    ensemble = Masksembles(wide(), members=3)
    masks = ensemble.net[3].ensemble_masks.clone()
    losses = abnn.train(ensemble, data(batches=8, size=16), epochs=8, lr=0.1).losses
    assert losses[-8:].mean() < 0.5 * losses[:8].mean()
    assert torch.equal(ensemble.net[3].ensemble_masks, masks)
    members = members_of(ensemble, data()[0][0])
    assert (members[0] - members[1]).abs().max() > 0.1


def test_half_precision_and_copies_keep_their_masks() -> None:
    ensemble, x = Masksembles(wide()), torch.randn(3, 4)
    half = copy.deepcopy(ensemble).bfloat16()
    logits = members_of(half, x.bfloat16())
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits.float(), members_of(ensemble, x), rtol=0.05, atol=0.1)


def test_impossible_masks_are_refused() -> None:
    with pytest.raises(ValueError, match="No layer of the Sequential but its first has 8"):
        Masksembles(mlp(width=7))
    with pytest.raises(
        ValueError, match="scale=6.1 is not a number of at least 1 and of at most 6"
    ):
        Masksembles(wide(), scale=6.1)
    with pytest.raises(ValueError, match="members=0"):
        Masksembles(wide(), members=0)
    with pytest.raises(ValueError, match="seed=0.5"):
        Masksembles(wide(), seed=0.5)  # type: ignore[arg-type]
