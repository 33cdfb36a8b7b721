"""Algorithm 1: what is trained, under which loss, in which order, and what can go wrong."""

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import abnn
from abnn.draws import channel_noise
from fitting import Data, banks, data, equal
from nets import cnn, mlp


def close(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], rtol=1e-4, atol=1e-6)


# The algorithm


@pytest.mark.parametrize("stats", ["per_mode", "frozen"])
def test_a_mode_follows_sgd_on_the_papers_loss(stats: Any) -> None:
    """Against a plain network whose sampled gamma, loss and update are written out by hand."""
    prior = abnn.RandomPrior(classes=1, weight=2.0)
    recipe = abnn.Recipe(steps=5, lr=0.05, weight_decay=0.1, prior=prior, seed=3)
    bnn = abnn.convert(mlp(), modes=2, alpha=0.2, stats=stats)
    result = abnn.fit(bnn, data(), recipe)

    mode = 1
    net = mlp().requires_grad_(False)
    norm: Any = net[1]
    norm.train(stats == "per_mode")
    gamma, beta = (nn.Parameter(p.detach().clone()) for p in (norm.weight, norm.bias))
    optimizer = torch.optim.SGD([gamma, beta], 0.05, momentum=0.9, weight_decay=0.1)
    eta = prior.draw(3, seed=3, mode=mode)
    for step, (x, y) in enumerate(data()[:5]):
        eps = channel_noise(abnn.Draw(3, mode, step, "fit"), [8])[0]
        del norm.weight, norm.bias
        norm.weight, norm.bias = gamma * (1 + 0.2 * eps), beta
        log_p = net(x).log_softmax(1)[torch.arange(len(y)), y]
        loss = -((1 + eta[y]) * log_p).mean()
        torch.testing.assert_close(result.losses[step, mode], loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    bank = bnn.bayes_layers["1"].bank
    torch.testing.assert_close(bank.gamma[mode], gamma.data)
    torch.testing.assert_close(bank.beta[mode], beta.data)  # type: ignore[index]
    if stats == "per_mode":
        assert bank.mean is not None
        torch.testing.assert_close(bank.mean[mode], norm.running_mean)
        torch.testing.assert_close(bank.var[mode], norm.running_var)  # type: ignore[index]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_modes_in_one_pass_equal_modes_one_by_one(optimizer: str, at_once: int) -> None:
    together, apart = (abnn.convert(mlp(), modes=3) for _ in range(2))
    recipe = abnn.Recipe(epochs=2, lr=0.05, optimizer=optimizer)  # type: ignore[arg-type]
    a = abnn.fit(together, data(), recipe)
    b = abnn.fit(apart, data(), recipe, modes_at_once=at_once)
    close(banks(together), banks(apart))
    torch.testing.assert_close(a.losses, b.losses)


def test_every_mode_goes_its_own_way() -> None:
    bnn = abnn.convert(mlp(), modes=3)
    abnn.fit(bnn, data(), epochs=2, lr=0.05)
    gamma = bnn.bayes_layers["1"].bank.gamma
    assert (gamma[0] - gamma[1]).abs().max() > 1e-4
    assert (gamma[1] - gamma[2]).abs().max() > 1e-4


def test_without_noise_and_prior_the_modes_stay_together() -> None:
    bnn = abnn.convert(mlp(), modes=2, alpha=0)
    abnn.fit(bnn, data(), epochs=2, lr=0.05, prior=None)
    gamma = bnn.bayes_layers["1"].bank.gamma
    torch.testing.assert_close(gamma[0], gamma[1])


@pytest.mark.parametrize("at_once", [None, 1])
def test_a_network_that_can_not_fold_is_fitted_as_well(at_once: int | None) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 1, 8, dropout=0.1)

    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = layer

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.encoder(x.transpose(0, 1)).mean(0)
            return y

    batches = [(torch.randn(4, 3, 4), torch.randint(4, (4,))) for _ in range(3)]
    bnn = abnn.convert(TimeFirst(), modes=2)
    if at_once is None:
        with pytest.warns(UserWarning, match="one draw at a time"):
            result = abnn.fit(bnn, batches, epochs=1)
    else:
        result = abnn.fit(bnn, batches, epochs=1, modes_at_once=at_once)
    assert result.losses.isfinite().all()


def test_the_learning_rate_follows_its_schedule() -> None:
    """Against torch's own schedulers."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.3)
    steps = 20
    multi = abnn.Recipe(lr=0.3, schedule="multistep", milestones=(1.0, 3.0), lr_factor=0.2)
    poly = abnn.Recipe(lr=0.3, schedule="polynomial", power=0.9)
    for recipe, scheduler in (
        (multi, torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 15], gamma=0.2)),
        (poly, torch.optim.lr_scheduler.PolynomialLR(optimizer, steps, power=0.9)),
    ):
        optimizer.param_groups[0]["lr"] = scheduler.base_lrs[0]
        for step in range(steps):
            assert recipe.lr_at(step, steps, epoch=step / 5) == pytest.approx(
                scheduler.get_last_lr()[0] if step else 0.3
            )
            optimizer.step()
            scheduler.step()
    assert abnn.Recipe(lr=0.3).lr_at(7, 10, 0.7) == 0.3


@pytest.mark.parametrize(("epochs", "steps"), [(0.5, 3), (1, 6), (2.34, 14), (0.01, 1)])
def test_epochs_may_be_fractional(epochs: float, steps: int) -> None:
    result = abnn.fit(abnn.convert(mlp(), modes=1), data(), epochs=epochs)
    assert len(result.losses) == steps


def test_mixed_precision_trains() -> None:
    bnn = abnn.convert(mlp(), modes=2)
    result = abnn.fit(bnn, data(), epochs=2, lr=0.05, amp="bf16")
    assert result.losses.isfinite().all()
    reference = abnn.convert(mlp(), modes=2)
    full = abnn.fit(reference, data(), epochs=2, lr=0.05)
    torch.testing.assert_close(result.losses, full.losses, rtol=0.1, atol=0.1)
    assert not torch.equal(result.losses, full.losses)


def test_void_labels_do_not_count() -> None:
    """A segmentation network; what is void has no influence at all."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1))
    x, y = torch.randn(4, 2, 5, 5), torch.randint(3, (4, 5, 5))
    bnn, other = abnn.convert(net, stats="frozen"), abnn.convert(net, stats="frozen")
    void = y.clone()
    void[:, 0] = 255
    changed = x.clone()
    changed[:, :, 0] += 9
    a = abnn.fit(bnn, [(x, void)], steps=2, ignore_index=255)
    b = abnn.fit(other, [(changed, void)], steps=2, ignore_index=255)
    torch.testing.assert_close(a.losses, b.losses)
    with pytest.raises(ValueError, match="Labels go from 0 to 255"):
        abnn.fit(bnn, [(x, void)], steps=2)


def test_transformers_batches_are_mappings() -> None:
    bnn = abnn.convert(mlp(), modes=1)
    batches = [{"input": x, "labels": y} for x, y in data()]
    assert abnn.fit(bnn, batches, epochs=1).losses.isfinite().all()


def test_randomness_outside_is_left_as_it_was() -> None:
    def numbers() -> tuple[float, float, float]:
        return random.random(), np.random.rand(), torch.rand(()).item()  # noqa: NPY002

    bnn, batches = abnn.convert(mlp(), modes=1), data()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    expected = numbers()
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])
    abnn.fit(bnn, batches, epochs=1)
    assert numbers() == expected


def test_the_seed_decides_data_order_noise_and_prior() -> None:
    loader = DataLoader(TensorDataset(*map(torch.cat, zip(*data(), strict=True))), 8, shuffle=True)
    first, same, other = (abnn.convert(mlp(), modes=1) for _ in range(3))
    abnn.fit(first, loader, epochs=1, seed=1)
    torch.rand(3)
    abnn.fit(same, loader, epochs=1, seed=1)
    abnn.fit(other, loader, epochs=1, seed=2)
    assert equal(banks(first), banks(same))
    assert not equal(banks(first), banks(other))


def test_a_fit_makes_the_predictions_better() -> None:
    """A network whose norm was spoilt gets its accuracy back."""
    net = mlp()
    train = data(batches=60)
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    net.train()
    for x, y in train:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    net.eval()
    dict(net.named_parameters())["1.weight"].data *= torch.linspace(0.2, 3, 8)
    bnn = abnn.convert(net)
    result = abnn.fit(bnn, train, epochs=2, lr=0.02, validation=data(batches=20))
    assert result.original is not None
    assert result.whole is not None
    assert result.whole.nll < result.original.nll
    assert "NLL" not in result.worse
    assert len(result.modes) == 4


def test_a_fit_that_makes_it_worse_says_so() -> None:
    net = mlp()
    validation = [(x, net(x).argmax(1)) for x, _ in data()]
    wrong = [(x, (y + 1) % 3) for x, y in validation]
    result = abnn.fit(abnn.convert(net), wrong, epochs=5, lr=0.5, validation=validation)
    assert "WORSE than the original" in str(result)
    assert "Lower the learning rate" in result.verdict
    assert {"NLL", "accuracy"} <= set(result.worse)


def test_a_single_step_of_a_single_mode_is_said_so() -> None:
    result = abnn.fit(abnn.convert(mlp(), modes=1), data(), steps=1)
    assert str(result).startswith("1 step of 1 mode in ")


def test_progress_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    abnn.fit(abnn.convert(mlp(), modes=1), data(), epochs=1, progress=True)
    assert re.search(r"fit 6/6  loss \d+\.\d+  0:00 left", capsys.readouterr().err)


# What can be wrong


def nan_inputs() -> Data:
    batches = data()
    batches[3][0][0, 0] = float("nan")
    return batches


def length_lies() -> Any:
    class Lies(list[Any]):
        def __len__(self) -> int:
            return 10

    return Lies(data())


@pytest.mark.parametrize(
    ("loader", "overrides", "error", "message"),
    [
        ([], {}, ValueError, "empty"),
        (iter(()), {"steps": 3}, ValueError, "empty"),
        (iter(data()), {}, ValueError, "no length.*steps="),
        (iter(data()), {"steps": 9}, ValueError, "after 6 of 9 steps.*not a generator"),
        (length_lies(), {"epochs": 2}, ValueError, "length 10 but gave 6"),
        (data(classes=4), {}, ValueError, "Labels go from 0 to 3, but the network has 3 classes"),
        ([(x, y - 1) for x, y in data()], {}, ValueError, "Labels go from -1 to 1"),
        ([(x, y[:3]) for x, y in data()], {}, ValueError, r"labels have shape \(3,\)"),
        ([(x, y.float()) for x, y in data()], {}, ValueError, "class indices"),
        ([x for x, _ in data()], {}, ValueError, "no labels were found"),
        (data(size=1), {}, ValueError, "batch of one.*drop_last=True.*stats='frozen'"),
        (nan_inputs(), {}, FloatingPointError, "mode 0 is nan at step 3; lower the learning rate"),
        (data(), {"lr": 1e30}, FloatingPointError, "at step"),
        (data(), {"learning_rate": 0.1}, TypeError, "no 'learning_rate'"),
        (data(), {"epochs": 0}, ValueError, "epochs=0"),
        (data(), {"recipe": "cifar10-resnet5"}, ValueError, "did you mean 'cifar10-resnet50'"),
        (data(), {"recipe": "imagenet-vit"}, ValueError, "wants alpha=0.00035.*alpha=0.01"),
        (data(), {"modes": 3}, ValueError, "wants modes=3"),
    ],
)  # fmt: skip
def test_mistakes_are_explained_and_change_nothing(
    loader: Any, overrides: dict[str, Any], error: type[Exception], message: str
) -> None:
    bnn = abnn.convert(mlp())
    before = banks(bnn)
    with pytest.raises(error, match=message):
        abnn.fit(bnn, loader, **overrides)
    assert equal(banks(bnn), before)
    assert not bnn.training


def test_a_last_batch_of_one_is_noticed_before_the_fit() -> None:
    dataset = TensorDataset(torch.randn(9, 4), torch.zeros(9, dtype=torch.long))
    bnn = abnn.convert(mlp(), modes=1)
    with pytest.raises(ValueError, match="drop_last=True"):
        abnn.fit(bnn, DataLoader(dataset, 8), epochs=0.1)
    abnn.fit(bnn, DataLoader(dataset, 8, drop_last=True), epochs=1)
    frozen = abnn.convert(mlp(), modes=1, stats="frozen")
    assert abnn.fit(frozen, DataLoader(dataset, 8), epochs=1).losses.isfinite().all()


def test_a_batch_of_one_is_fine_without_batch_norm() -> None:
    assert abnn.fit(abnn.convert(mlp(nn.LayerNorm)), data(size=1), epochs=1).losses.isfinite().all()


def test_it_takes_only_an_abnn() -> None:
    with pytest.raises(TypeError, match="what abnn.convert returns"):
        abnn.fit(mlp(), data())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="loader of batches"):
        abnn.fit(abnn.convert(mlp()), None)  # type: ignore[arg-type]


def test_it_fits_where_gradients_are_turned_off() -> None:
    bnn = abnn.convert(mlp(), modes=1)
    with torch.no_grad():
        assert abnn.fit(bnn, data(), epochs=1).losses.isfinite().all()


class Recomputing(nn.Module):
    """Its norm runs a second time in the backward pass, or without gradients."""

    def __init__(self, norm: nn.Module, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.norm, self.last = nn.Linear(4, 8), norm, nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if self.how == "no_grad":
            with torch.no_grad():
                h = self.norm(h)
        else:
            h = checkpoint(self.norm, h, use_reentrant=self.how == "reentrant")
        y: torch.Tensor = self.last(h)
        return y


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
@pytest.mark.parametrize("modes_at_once", [None, 1])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("not reentrant", "again in the backward pass.*modes_at_once=1"),
        ("reentrant", "without gradients.*layers="),
        ("no_grad", "without gradients.*layers="),
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_gradients_that_would_be_wrong_or_missing_are_refused(
    norm: type[nn.Module], modes_at_once: int | None, how: str, message: str
) -> None:
    bnn = abnn.convert(Recomputing(norm(8), how), modes=2)
    before = banks(bnn)
    with pytest.raises(RuntimeError, match=message):
        abnn.fit(bnn, data(), epochs=1, modes_at_once=modes_at_once)
    assert equal(banks(bnn), before)
    bnn.predict(torch.randn(2, 4))  # nothing is left behind in the layers


def test_inference_mode_is_no_trap() -> None:
    net = mlp()
    with torch.inference_mode():
        bnn, made_inside = abnn.convert(net, modes=1), mlp()
    assert abnn.fit(bnn, data(), epochs=1).losses.isfinite().all()
    with pytest.raises(ValueError, match="outside of that"):
        abnn.fit(abnn.convert(made_inside), data())


def test_a_loader_with_a_generator_of_its_own() -> None:
    dataset = TensorDataset(torch.randn(16, 3, 8, 8), torch.randint(3, (16,)))
    loader = DataLoader(dataset, 4, shuffle=True, generator=torch.Generator().manual_seed(9))
    state = loader.generator.get_state()
    a, b = abnn.convert(cnn()), abnn.convert(cnn())
    abnn.fit(a, loader, epochs=1)
    abnn.fit(b, loader, epochs=1)
    assert equal(banks(a), banks(b))
    assert torch.equal(loader.generator.get_state(), state)
