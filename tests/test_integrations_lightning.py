"""The Lightning callback: what is fitted to what, what is left alone, and what is refused early."""

from __future__ import annotations

import csv
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import abnn
from fitting import banks, data, equal
from nets import mlp

pl: Any = pytest.importorskip("lightning.pytorch")

from abnn.integrations.lightning import ABNNCallback  # noqa: E402


class Steps:
    """A network in an attribute, and steps that are optimised by hand."""

    optimizers: Any
    manual_backward: Any
    parameters: Any

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = mlp().train() if net is None else net
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Any, _: int) -> None:
        self.steps += 1
        rows = batch["labelled"] if isinstance(batch, dict) else batch
        rows = rows[0] if isinstance(rows[0], (list, tuple)) else rows
        self.optimizers().zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self.forward(rows[0]), rows[1]))
        self.optimizers().step()

    def validation_step(self, batch: Any, _: int, dataloader_idx: int = 0) -> None:
        self.forward(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Classifier(Steps, pl.LightningModule):  # type: ignore[misc]
    """As users write it."""


class Headless(Classifier):
    """Has a network, but says nothing of logits by itself."""

    forward = pl.LightningModule.forward

    def training_step(self, batch: Any, step: int) -> None:
        raise AssertionError("the training began")


def rows(dtype: torch.dtype = torch.float32) -> TensorDataset:
    x, y = (torch.cat(part) for part in zip(*data(), strict=True))
    return TensorDataset(x.to(dtype), y)


def shuffled() -> DataLoader[Any]:
    return DataLoader(rows(), 8, shuffle=True)


@pytest.fixture
def trainer(tmp_path: Path) -> Any:
    """Makes trainers that write nothing but where they are told, and print little."""

    def make(*callbacks: Any, **options: Any) -> Any:
        quiet = {"logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0}
        bars = {"enable_progress_bar": False, "enable_model_summary": False}
        given = {"max_epochs": 1, "accelerator": "cpu", "default_root_dir": tmp_path}
        return pl.Trainer(callbacks=list(callbacks), **(given | quiet | bars | options))

    return make


def small(**options: Any) -> ABNNCallback:
    return ABNNCallback(**({"modes": 2, "epochs": 1, "lr": 0.05} | options))


def test_the_callback_is_convert_and_fit(trainer: Any) -> None:
    callback, module = small(alpha=0.02, network="net"), Classifier()
    trainer(callback).fit(module, shuffled(), DataLoader(rows(), 16))
    bnn = abnn.convert(module.net, modes=2, alpha=0.02)
    result = abnn.fit(bnn, shuffled(), epochs=1, lr=0.05, validation=DataLoader(rows(), 16))
    assert callback.bnn is not None
    assert equal(banks(callback.bnn), banks(bnn))
    assert callback.result is not None
    assert callback.result.whole == result.whole
    assert callback.result.original == result.original


def test_the_module_and_the_random_numbers_stay_as_they_are(trainer: Any) -> None:
    module, there = Classifier(), {}

    class Before(pl.Callback):  # type: ignore[misc]
        def on_fit_end(self, trainer: Any, module: Any) -> None:
            there.update({name: value.clone() for name, value in module.state_dict().items()})
            there["training"] = [part.training for part in module.modules()]
            there["random"] = torch.get_rng_state()

    trainer(Before(), small()).fit(module, shuffled(), DataLoader(rows(), 16))
    assert torch.equal(torch.get_rng_state(), there.pop("random"))
    assert [part.training for part in module.modules()] == there.pop("training")
    assert equal(module.state_dict(), there)
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_the_figures_go_to_the_loggers(trainer: Any, tmp_path: Path) -> None:
    logger, callback = pl.loggers.CSVLogger(tmp_path), small()
    trainer(callback, logger=logger).fit(Classifier(), shuffled(), DataLoader(rows(), 16))
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert callback.result is not None
    assert callback.result.whole is not None
    assert float(row["abnn/all_modes/nll"]) == callback.result.whole.nll
    assert {"abnn/original/ece", "abnn/mode_1/accuracy", "abnn/loss"} <= row.keys()


class Dies(TensorDataset):
    """Data of which a row can't be read, when it is asked for the so many-th time."""

    left = 10**9

    def __getitem__(self, index: int) -> Any:
        self.left -= 1
        if self.left == 0:
            raise ConnectionError("the disk is gone")
        return tuple(tensor[index] for tensor in self.tensors)


def test_a_fit_that_was_killed_goes_on_with_the_training_resumed(
    trainer: Any, tmp_path: Path
) -> None:
    whole, broken = Dies(*rows().tensors), Dies(*rows().tensors)
    broken.left = 48 + 20  # an epoch of training, and two batches of the fit
    keep = {"enable_checkpointing": True, "default_root_dir": tmp_path / "broken"}
    callback, validation = small(epochs=2, checkpoint_seconds=0), DataLoader(rows(), 16)
    last = pl.callbacks.ModelCheckpoint(save_last=True)
    dying = DataLoader(broken, 8, shuffle=True)
    with pytest.raises(ConnectionError):
        trainer(callback, last, **keep).fit(Classifier(), dying, validation)
    assert callback.bnn is None
    (checkpoint,) = (tmp_path / "broken").glob("abnn-*/checkpoint.safetensors")

    again, module = small(epochs=2, checkpoint_seconds=0), Classifier()
    resumed = trainer(again, pl.callbacks.ModelCheckpoint(save_last=True), **keep)
    loader = DataLoader(whole, 8, shuffle=True)
    resumed.fit(module, loader, validation, ckpt_path=last.last_model_path)
    assert module.steps == 0
    assert again.run == checkpoint.parent
    straight = abnn.convert(module, modes=2)
    result = abnn.fit(straight, DataLoader(whole, 8, shuffle=True), epochs=2, lr=0.05)
    assert equal(banks(abnn.load(again.run, module)), banks(straight))
    assert again.result is not None
    assert torch.equal(again.result.losses, result.losses)
    assert again.result.whole is not None


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork")
def test_processes_that_train_together_fit_together(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.environ", os.environ.copy())  # where the trainer leaves things
    module, options = Classifier(), {"strategy": "ddp_fork", "devices": 2}
    last = pl.callbacks.ModelCheckpoint(tmp_path, save_weights_only=True)
    together = trainer(small(epochs=2), last, enable_checkpointing=True, **options)
    together.fit(module, shuffled(), DataLoader(rows(), 16))
    (run,) = tmp_path.glob("abnn-*")
    # Batch norms count the rows of their own process: the network is that of process 0.
    weights = torch.load(last.best_model_path, weights_only=True)["state_dict"]
    module.load_state_dict(weights)
    bnn = abnn.load(run, module)
    assert bnn.fitted is not None
    assert (bnn.fitted["steps"], bnn.fitted["validation"]["all modes"]["n"]) == (6, 48)


def test_a_trial_run_makes_a_step_and_writes_nothing(trainer: Any, tmp_path: Path) -> None:
    callback = small(epochs=5)
    trainer(callback, fast_dev_run=True).fit(Classifier(), shuffled(), DataLoader(rows(), 16))
    assert callback.result is not None
    assert callback.result.whole is not None
    assert (len(callback.result.losses), callback.result.whole.n) == (1, 16)
    assert not list(tmp_path.iterdir())


def test_the_fit_sees_as_many_batches_as_the_training(trainer: Any) -> None:
    callback = small(epochs=2)
    limits = {"limit_train_batches": 3, "limit_val_batches": 1}
    trainer(callback, **limits).fit(Classifier(), shuffled(), DataLoader(rows(), 16))
    assert callback.result is not None
    assert callback.result.whole is not None
    assert (len(callback.result.losses), callback.result.whole.n) == (6, 16)


@pytest.mark.parametrize("several", [dict, pl.utilities.CombinedLoader])
def test_one_of_several_dataloaders_is_named(several: Any, trainer: Any) -> None:
    loaders = several({"labelled": shuffled(), "other": DataLoader(rows(), 4)})
    with pytest.raises(ValueError, match="has 2 training dataloaders; say what to fit to"):
        trainer(small()).fit(Classifier(), loaders)
    callback = small(loader=lambda trainer: trainer.train_dataloader["labelled"])
    trainer(callback).fit(Classifier(), loaders, [DataLoader(rows(), 16), DataLoader(rows(), 4)])
    assert callback.result is not None
    assert len(callback.result.losses) == 6


def test_batches_of_any_form_can_be_fitted_to(trainer: Any) -> None:
    x, y = rows().tensors
    odd: Any = [((a, b), "name") for a, b in zip(x, y, strict=True)]
    callback = small(batch=lambda batch: tuple(batch[0]))
    trainer(callback).fit(Classifier(), DataLoader(odd, 8))
    assert callback.bnn is not None


def test_inputs_get_the_precision_of_the_trainer(trainer: Any) -> None:
    callback, module = small(), Classifier()
    trainer(callback, precision="64-true").fit(module, shuffled(), DataLoader(rows(), 16))
    assert callback.bnn is not None
    assert callback.bnn.predict(torch.randn(2, 4).double()).probs.dtype == torch.float64


def test_another_checkpoint_can_be_converted_later(trainer: Any) -> None:
    done, callback, best = trainer(), small(), Classifier()
    done.fit(Classifier(), shuffled())
    bnn = callback.fit(done, best)
    assert bnn is callback.bnn
    assert equal(bnn.restore().state_dict(), best.state_dict())


@pytest.mark.parametrize(
    ("options", "module", "sentence"),
    [
        ({}, Headless(), "no forward that could give logits; say which .* one of net"),
        ({"network": "model"}, Headless(), "no module 'model'; give .* network=, one of net"),
        ({"network": "net"}, Headless(nn.Linear(4, 3)), "No normalisation layer was found"),
        ({"network": "net", "layers": "5"}, Headless(), "No norm matches layers='5'"),
    ],
)
def test_a_mistake_is_told_before_the_training(
    options: dict[str, Any], module: Any, sentence: str, trainer: Any
) -> None:
    with pytest.raises(ValueError, match=sentence):
        trainer(small(**options)).fit(module, shuffled())


def test_an_unknown_value_of_the_recipe_is_told_at_once() -> None:
    with pytest.raises(TypeError, match="no 'epoch'; did you mean 'epochs'"):
        ABNNCallback(epoch=1)


def test_a_network_that_is_spread_over_processes_is_refused() -> None:
    spread = SimpleNamespace(strategy=object.__new__(pl.strategies.FSDPStrategy))
    with pytest.raises(ValueError, match="FSDPStrategy spreads the network over processes"):
        small().setup(spread, None, "fit")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module as it is where the package pytorch_lightning alone is installed."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightning"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, "abnn.integrations.lightning")
    yield importlib.import_module("abnn.integrations.lightning")
    monkeypatch.undo()


def test_the_older_package_does_as_well(alone: Any, tmp_path: Path) -> None:
    assert alone.pl.__name__ == "pytorch_lightning"
    callback = alone.ABNNCallback(modes=2, epochs=1, network="net")
    module: Any = type("Old", (Steps, alone.pl.LightningModule), {})()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options = {"default_root_dir": tmp_path, "enable_checkpointing": False, "accelerator": "cpu"}
    trainer = alone.pl.Trainer(max_epochs=1, callbacks=[callback], **quiet, **options)
    trainer.fit(module, shuffled(), DataLoader(rows(), 16))
    assert callback.result.whole is not None
    assert module.steps == 6


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning.pytorch", "lightning", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    from abnn.integrations import package

    with pytest.raises(ModuleNotFoundError, match=r'pip install "abnn\[lightning\]"'):
        package("lightning", "lightning.pytorch", "pytorch_lightning")
