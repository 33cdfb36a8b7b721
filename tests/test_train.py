"""Training a network as a whole: against a loop written out, and through whatever goes wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import abnn
from abnn import Recipe
from abnn.baselines import BatchEnsemble
from fitting import Data, data, equal
from nets import mlp

PLAIN = Recipe(epochs=2, lr=0.1, prior=None)


def values(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


class Breaking:
    """A loader that fails after so many batches, the first time only."""

    def __init__(self, batches: Data, good: int) -> None:
        self.batches, self.good = batches, good

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.batches:
            self.good -= 1
            if self.good == -1:
                raise KeyboardInterrupt
            yield batch


@pytest.mark.parametrize("schedule", ["constant", "polynomial", "multistep"])
def test_training_is_sgd_with_momentum_decay_and_a_schedule(schedule: Any) -> None:
    recipe = PLAIN.with_(schedule=schedule, milestones=[1], weight_decay=0.01, momentum=0.8)
    net, batches = mlp(), data()
    other = copy.deepcopy(net).train()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.8, weight_decay=0.01)
    for step in range(12):
        rate = {
            "constant": 1.0,
            "polynomial": (1 - step / 12) ** 0.9,
            "multistep": 0.1 ** (step // 6),
        }
        optimizer.param_groups[0]["lr"] = 0.1 * rate[schedule]
        x, y = batches[step % 6]
        optimizer.zero_grad()
        F.cross_entropy(other(x), y).backward()
        optimizer.step()
    abnn.train(net, batches, recipe)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value)


def test_training_learns_and_tells_its_losses() -> None:
    net, batches = mlp(), data()
    result = abnn.train(net, batches, epochs=10)
    assert result.losses.shape == (60,)
    assert result.losses[-6:].mean() < 0.5 * result.losses[:6].mean()
    assert "60 steps" in str(result)
    assert result.recipe.schedule == "polynomial"


def test_what_is_frozen_stays_and_modes_come_back() -> None:
    net = mlp()
    net[0].requires_grad_(False)
    net[1].train()
    before = values(net)
    abnn.train(net, data(), PLAIN)
    after = values(net)
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert not torch.equal(after["3.weight"], before["3.weight"])
    assert net[1].training
    assert not net[3].training
    assert all(p.grad is None for p in net.parameters())


def test_a_fraction_of_an_epoch_stops_within_it() -> None:
    assert len(abnn.train(mlp(), data(), PLAIN, epochs=1.5).losses) == 9


def test_training_leaves_the_global_generators_alone() -> None:
    net, batches = nn.Sequential(nn.Dropout(), mlp()), data()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    abnn.train(net, batches, PLAIN)
    assert torch.equal(torch.rand(2), expected)


def test_dropout_depends_on_the_seed_alone() -> None:
    ends: list[dict[str, Tensor]] = []
    for seed in (0, 0, 1):
        torch.manual_seed(len(ends))
        net = nn.Sequential(nn.Dropout(), copy.deepcopy(mlp()))
        torch.manual_seed(100 + len(ends))
        abnn.train(net, data(), PLAIN, seed=seed)
        ends.append(values(net))
    assert equal(ends[0], ends[1])
    assert not equal(ends[0], ends[2])


@pytest.mark.parametrize("good", [1, 5, 6, 8])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_killed_training_resumes_bit_identical(tmp_path: Path, good: int, optimizer: Any) -> None:
    recipe = PLAIN.with_(optimizer=optimizer, schedule="polynomial")
    start = nn.Sequential(nn.Dropout(), mlp())
    whole, parts = copy.deepcopy(start), copy.deepcopy(start)
    losses = abnn.train(whole, data(), recipe).losses
    with pytest.raises(KeyboardInterrupt):
        abnn.train(parts, Breaking(data(), good), recipe, run=tmp_path, checkpoint_seconds=0)
    assert equal(values(parts), values(start))
    again = abnn.train(parts, data(), recipe, run=tmp_path)
    assert equal(values(parts), values(whole))
    assert torch.equal(again.losses, losses)


def test_a_finished_training_is_not_done_again(tmp_path: Path) -> None:
    net, start = mlp(), copy.deepcopy(mlp())
    abnn.train(net, data(), PLAIN, run=tmp_path)
    abnn.train(start, [(torch.full_like(x, torch.nan), y) for x, y in data()], PLAIN, run=tmp_path)
    assert equal(values(start), values(net))


def test_the_run_directory_holds_the_network_and_its_losses(tmp_path: Path) -> None:
    net = mlp()
    result = abnn.train(net, data(), PLAIN, run=tmp_path)
    assert equal(load_file(tmp_path / "network.safetensors"), values(net))
    rows = (tmp_path / "losses.csv").read_text().split()
    assert rows[0] == "step,loss,lr"
    assert rows[-1].endswith(",0.1")
    assert float(rows[-1].split(",")[1]) == pytest.approx(result.losses[-1].item())


def test_another_training_is_not_mistaken_for_this_one(tmp_path: Path) -> None:
    abnn.train(mlp(), data(), PLAIN, run=tmp_path)
    with pytest.raises(ValueError, match=r"other settings \(lr was 0.1 and now is 0.2"):
        abnn.train(mlp(), data(), PLAIN, lr=0.2, run=tmp_path)
    other = mlp()
    nn.init.zeros_(other.get_parameter("3.bias"))
    with pytest.raises(ValueError, match="other settings.*start"):
        abnn.train(other, data(), PLAIN, run=tmp_path)


def test_a_method_resumes_whatever_its_arguments_are(tmp_path: Path) -> None:
    ensemble = BatchEnsemble(mlp(), members=2, factors="ones")
    json.dumps(ensemble.arguments)
    abnn.train(ensemble, data(), PLAIN, run=tmp_path)
    with pytest.raises(ValueError, match="other settings"):
        abnn.train(BatchEnsemble(mlp(), members=3, factors="ones"), data(), PLAIN, run=tmp_path)


def test_a_nan_stops_the_training_and_loses_nothing() -> None:
    net, batches = mlp(), data()
    batches[4] = (batches[4][0] * torch.nan, batches[4][1])
    before = values(net)
    with pytest.raises(FloatingPointError, match="loss is nan at step 4; lower the learning rate"):
        abnn.train(net, batches, PLAIN)
    assert equal(values(net), before)


@pytest.mark.parametrize(
    ("model", "loader", "message"),
    [
        (mlp(), [], "loader is empty"),
        (mlp(), [(torch.zeros(2, 4), torch.tensor([0, 3]))], "Labels go from 0 to 3"),
        (mlp(), [(torch.zeros(2, 4), torch.zeros(3).long())], r"shape \(3,\)"),
        (mlp().requires_grad_(False), data(), "has nothing to train"),
        (nn.Identity(), data(), "has nothing to train"),
    ],
)
def test_what_can_not_be_trained_is_refused(model: Any, loader: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        abnn.train(model, loader, PLAIN)


def test_only_modules_are_trained() -> None:
    with pytest.raises(TypeError, match="train takes a network, not a int"):
        abnn.train(3, data())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="did you mean 'lr'"):
        abnn.train(mlp(), data(), PLAIN, lrr=1)


def test_a_generator_is_noticed_when_it_is_used_up() -> None:
    class Once:
        def __init__(self) -> None:
            self.batches = iter(data())

        def __len__(self) -> int:
            return 6

        def __iter__(self) -> Iterator[Any]:
            return self.batches

    with pytest.raises(ValueError, match="no batch in epoch 1, after 6 of 12"):
        abnn.train(mlp(), Once(), PLAIN)


class Flat(nn.Module):
    """A network that flattens its images by the order in which they lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(2, 4, 3), nn.Linear(4 * 6 * 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, 2, 8, 8]` -> `[B, 3]`."""
        self.layout = x.is_contiguous(memory_format=torch.channels_last)
        features: Tensor = self.linear(self.flat(self.conv(x)))
        return features

    def flat(self, x: Tensor) -> Tensor:
        return x.view(len(x), -1)


class Odd(Flat):
    """One that reads another order without an error."""

    def flat(self, x: Tensor) -> Tensor:
        return x.as_strided((len(x), 4 * 6 * 6), (4 * 6 * 6, 1))


class Well(Flat):
    """One that does not mind."""

    def flat(self, x: Tensor) -> Tensor:
        return x.flatten(1)


@pytest.mark.parametrize("kind", [Flat, Odd, Well])
def test_images_lie_channels_last_where_that_changes_nothing(kind: type[Flat]) -> None:
    loader = [(torch.randn(6, 2, 8, 8), torch.randint(3, (6,))) for _ in range(4)]
    net = kind()
    written_out = copy.deepcopy(net)
    abnn.train(net, loader, steps=4, lr=0.1, schedule="constant", weight_decay=0.0)
    sgd = torch.optim.SGD(written_out.parameters(), 0.1, momentum=0.9)
    for x, y in loader:
        sgd.zero_grad()
        F.cross_entropy(written_out(x), y).backward()
        sgd.step()
    assert net.layout == (kind is Well)
    for one, other in zip(net.parameters(), written_out.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
