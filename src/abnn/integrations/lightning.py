"""A Lightning callback: when the trainer is done, the network becomes Bayesian."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import BatchSampler, SequentialSampler

from abnn.batches import length_of
from abnn.integrations import package
from abnn.integrations.after_training import Batches, conversion, rebatched
from abnn.model import ABNN
from abnn.outputs import Output
from abnn.recipe import Recipe
from abnn.shares import is_share
from abnn.validation import FitResult

pl: Any = package("lightning", "lightning.pytorch", "pytorch_lightning")

Choose = Callable[[Any], Iterable[Any]]
_SPREAD = {"FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"}


class ABNNCallback(pl.Callback):  # type: ignore[misc]
    """Make the network of a LightningModule Bayesian at the end of `trainer.fit`.

    The modes are fitted to the trainer's training dataloader; the figures before and after, on its
    validation dataloader, go to its loggers. The LightningModule stays as it is. The run directory
    is made under the trainer's `default_root_dir`. A fit that was killed goes on when the training
    is resumed by `ckpt_path="last"`, which has nothing left to train then. With
    `fast_dev_run`, as many steps are made and nothing is written.

    Args:
        recipe: of `abnn.fit`: a name, a TOML file, or a `Recipe`.
        modes, alpha: of `abnn.convert`; default: the recipe's, else 4 and 0.01.
        network: the attribute of the LightningModule that holds the network, as "model" or
            "model.backbone"; default: itself, if its `forward` gives logits.
        loader, validation: functions of the trainer that give the data, as `lambda trainer:
            trainer.train_dataloader["labelled"]`; default: its only training dataloader, and the
            first of its validation dataloaders.
        batch: makes a batch what `abnn.fit` takes, as `lambda batch: (batch["x"], batch["y"])`.
        layers, class_dim, output: of `abnn.convert`.
        run: the run directory, if it is to be another.
        ignore_index, checkpoint_seconds: of `abnn.fit`.
        overrides: values of the recipe to replace, as `lr=0.05`; `noise` and `stats` too.

    Attributes:
        bnn: the Bayesian network, on the device of the training; None before.
        result: the `FitResult`.
        run: the run directory; `abnn.load(callback.run, network)` reads it.

    >>> import tempfile
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> class Classifier(pl.LightningModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    ...     def training_step(self, batch, _):
    ...         return nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    ...     def configure_optimizers(self):
    ...         return torch.optim.SGD(self.parameters(), lr=0.1)
    >>> rows = TensorDataset(torch.randn(32, 4), torch.randint(3, (32,)))
    >>> callback = ABNNCallback(network="net", modes=2, epochs=1, lr=0.05)
    >>> quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     trainer = pl.Trainer(
    ...         max_epochs=1, callbacks=[callback], default_root_dir=folder, accelerator="cpu",
    ...         enable_checkpointing=False, **quiet)
    ...     trainer.fit(Classifier(), DataLoader(rows, 8))
    >>> callback.bnn.predict(torch.randn(5, 4)).epistemic.shape
    torch.Size([5])
    """

    def __init__(
        self,
        recipe: str | PathLike[str] | Recipe | None = None,
        *,
        modes: int | None = None,
        alpha: float | None = None,
        network: str | None = None,
        loader: Choose | None = None,
        validation: Choose | None = None,
        batch: Callable[[Any], Any] | None = None,
        layers: str | Sequence[str] | None = None,
        class_dim: int = 1,
        output: Output | None = None,
        run: str | PathLike[str] | None = None,
        ignore_index: int = -100,
        checkpoint_seconds: float = 30.0,
        **overrides: Any,
    ) -> None:
        self._conversion = conversion(
            recipe,
            modes,
            alpha,
            overrides,
            run=run,
            ignore_index=ignore_index,
            checkpoint_seconds=checkpoint_seconds,
            layers=layers,
            class_dim=class_dim,
            output=output,
        )
        self._network, self._batch = network, batch
        self._loader, self._validation = loader, validation
        self.bnn: ABNN | None = None
        self.result: FitResult | None = None
        self.run: Path | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse strategies under which no process has the whole network."""
        strategy = type(trainer.strategy)
        if stage == "fit" and _SPREAD & {cls.__name__ for cls in strategy.__mro__}:
            raise ValueError(
                f"{strategy.__name__} spreads the network over processes, and no plain one is left "
                "to convert; train with another strategy, or load the checkpoint into a plain "
                "network afterwards and call abnn.fit."
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """See that the network can be converted and fitted, before the long training."""
        self._conversion.check(self._net(pl_module), self._training_data(trainer))

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Convert and fit: the checkpoints are written, and the weights those of the end."""
        self.fit(trainer, pl_module)

    def fit(self, trainer: Any, pl_module: Any) -> ABNN:
        """Convert and fit now, as after `trainer.fit` with the best checkpoint loaded.

        Args:
            trainer: has fitted, so it has the data.
            pl_module: with the weights that are wanted.
        """
        developing = bool(trainer.fast_dev_run)
        asked = self._conversion
        if developing:
            asked = replace(asked, recipe=asked.recipe.with_(steps=int(trainer.fast_dev_run)))
        fitted = asked.fit(
            self._net(pl_module),
            self._training_data(trainer),
            self._validation_data(trainer),
            None if developing else trainer.default_root_dir,
            trainer.strategy.root_device,
            progress=None if trainer.progress_bar_callback else False,
        )
        self.bnn, self.result, self.run = fitted.bnn, fitted.result, fitted.run
        for logger in trainer.loggers:
            logger.log_metrics(fitted.figures(), step=trainer.global_step)
            logger.save()
        pl.utilities.rank_zero_info(str(fitted))
        return fitted.bnn

    def _net(self, pl_module: Any) -> nn.Module:
        if self._network is not None:
            try:
                net: nn.Module = pl_module.get_submodule(self._network)
            except AttributeError as error:
                own = ", ".join(name for name, _ in pl_module.named_children())
                raise ValueError(
                    f"{type(pl_module).__name__} has no module {self._network!r}; give the name of "
                    f"its network as network=, one of {own}."
                ) from error
            return net
        if type(pl_module).forward.__qualname__ in ("LightningModule.forward", "Module.forward"):
            own = ", ".join(name for name, _ in pl_module.named_children())
            raise ValueError(
                f"{type(pl_module).__name__} has no forward that could give logits; say which of "
                f"its modules is the network, as network=, one of {own}."
            )
        module: nn.Module = pl_module
        return module

    def _training_data(self, trainer: Any) -> Iterable[Any]:
        if self._loader is not None:
            return self._batches(trainer, self._loader(trainer), trainer.fast_dev_run or None)
        loaders = _leaves(trainer.train_dataloader)
        if len(loaders) != 1:
            raise ValueError(
                f"The trainer has {len(loaders) or 'no'} training dataloaders; say what to fit to, "
                "as loader=lambda trainer: trainer.train_dataloader[0]."
            )
        return self._batches(trainer, loaders[0], trainer.num_training_batches)

    def _validation_data(self, trainer: Any) -> Iterable[Any] | None:
        if self._validation is not None:
            return self._batches(trainer, self._validation(trainer), trainer.fast_dev_run or None)
        if not trainer.enable_validation:
            return None
        # A resumed training that has nothing left to do has not asked for them.
        trainer.fit_loop.epoch_loop.val_loop.setup_data()
        first, limit = _leaves(trainer.val_dataloaders)[0], trainer.num_val_batches[0]
        if is_share(first):  # abnn shares the work, and every process needs all the data
            everything = SequentialSampler(first.dataset)
            first = rebatched(
                first, BatchSampler(everything, first.batch_sampler.batch_size, False)
            )
            limit *= trainer.world_size
        return self._batches(trainer, first, limit)

    def _batches(self, trainer: Any, loader: Any, limit: float | None) -> Iterable[Any]:
        """A loader as the trainer would use it: so many batches, and of its precision."""
        plugin = trainer.precision_plugin
        plain = type(plugin).convert_input.__qualname__ == "Precision.convert_input"
        changes = [self._batch, None if plain else plugin.convert_input]
        wanted = [change for change in changes if change is not None]
        length = length_of(loader)
        some = limit is not None and limit < (math.inf if length is None else length)
        if not some and not wanted:
            return loader  # type: ignore[no-any-return]
        return Batches(loader, int(limit) if some and limit is not None else None, *wanted)


def _leaves(loaders: Any) -> list[Any]:
    """The dataloaders in what a trainer holds: one, or collections of them."""
    if loaders is None:
        return []
    if isinstance(loaders, Mapping):
        loaders = list(loaders.values())
    if isinstance(loaders, Sequence):
        return [leaf for part in loaders for leaf in _leaves(part)]
    return [loaders]
