"""A callback for the Trainer of transformers: when it is done, the network becomes Bayesian."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import BatchSampler

from abnn.integrations import package
from abnn.integrations.after_training import Fitted, conversion, rebatched
from abnn.model import ABNN
from abnn.outputs import Output
from abnn.recipe import Recipe
from abnn.validation import FitResult

transformers: Any = package("transformers", "transformers")


class ABNNCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Make the network Bayesian at the end of `Trainer.train`.

    The modes are fitted to the Trainer's training data; the figures before and after, on what it
    evaluates on, are added to `state.log_history`. The network stays as it is. The run directory
    is made under `output_dir`. A fit that was killed goes on when the training is resumed by
    `resume_from_checkpoint=True`, which has nothing left to train then. During a search of
    hyper-parameters nothing is done.

    Args:
        recipe: of `abnn.fit`: a name, a TOML file, or a `Recipe`.
        modes, alpha: of `abnn.convert`; default: the recipe's, else 4 and 0.01. Transformers want
            a small alpha: the paper's ImageNet ViT has 0.00035.
        loader, validation: batches to fit to, and held-out ones, if they are to be others than the
            Trainer's; `validation` also where it has not evaluated during this training.
        layers, class_dim, output: of `abnn.convert`; for the classification of tokens,
            `class_dim=-1`.
        run: the run directory, if it is to be another.
        ignore_index, checkpoint_seconds: of `abnn.fit`; labels of -100 do not count by default.
        overrides: values of the recipe to replace, as `lr=0.05`; `noise` and `stats` too.

    Attributes:
        bnn: the Bayesian network, on the device of the training; None before.
        result: the `FitResult`.
        run: the run directory; `abnn.load(callback.run, model)` reads it.

    >>> import tempfile
    >>> from transformers import BertConfig, BertForSequenceClassification, Trainer
    >>> from transformers import TrainingArguments
    >>> config = BertConfig(
    ...     vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
    ...     intermediate_size=8, num_labels=3)
    >>> texts = [{"input_ids": torch.randint(20, (6,)), "labels": i % 3} for i in range(16)]
    >>> callback = ABNNCallback(modes=2, alpha=0.001, epochs=1, lr=0.01)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     arguments = TrainingArguments(
    ...         folder, max_steps=1, use_cpu=True, report_to="none", save_strategy="no",
    ...         logging_strategy="no", disable_tqdm=True)
    ...     trainer = Trainer(
    ...         BertForSequenceClassification(config), arguments, train_dataset=texts,
    ...         callbacks=[callback])
    ...     trainer.remove_callback(transformers.PrinterCallback)
    ...     _ = trainer.train()
    >>> inputs = {"input_ids": torch.randint(20, (5, 6))}
    >>> callback.bnn.predict(inputs).epistemic.shape
    torch.Size([5])
    """

    def __init__(
        self,
        recipe: str | PathLike[str] | Recipe | None = None,
        *,
        modes: int | None = None,
        alpha: float | None = None,
        loader: Iterable[Any] | None = None,
        validation: Iterable[Any] | None = None,
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
        self._loader, self._validation = loader, validation
        self.bnn: ABNN | None = None
        self.result: FitResult | None = None
        self.run: Path | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any, train_dataloader: Any, **_: Any
    ) -> None:
        """See that the network can be converted and fitted, before the long training."""
        if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            raise ValueError(
                "FSDP and DeepSpeed spread the network over processes, and no plain one is left to "
                "convert; train without them, or load the checkpoint into a plain network "
                "afterwards and call abnn.fit."
            )
        kind = getattr(getattr(model, "config", None), "problem_type", None)
        if kind not in (None, "single_label_classification"):
            raise ValueError(
                f"The network is for {kind.replace('_', ' ')}, and ABNN is for classification "
                "with one label; take the callback away."
            )
        with _unwrapped(model):
            self._conversion.check(model, self._training_data(train_dataloader))

    def on_train_end(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any,
        train_dataloader: Any,
        eval_dataloader: Any = None,
        **_: Any,
    ) -> None:
        """Convert and fit: the best checkpoint is loaded, if it is to be."""
        if state.is_hyper_param_search:
            return
        fitted = self._fit(args, model, train_dataloader, eval_dataloader)
        state.log_history.append({**fitted.figures(), "step": state.global_step})

    def fit(self, trainer: Any) -> ABNN:
        """Convert and fit now, whether the Trainer has trained or not; its loggers get the figures.

        Args:
            trainer: has the network and the data.
        """
        held_out, datasets = None, trainer.eval_dataset
        if datasets is not None:
            first = next(iter(datasets)) if isinstance(datasets, dict) else None
            held_out = trainer.get_eval_dataloader(first)
        fitted = self._fit(trainer.args, trainer.model, trainer.get_train_dataloader(), held_out)
        trainer.log(fitted.figures())
        return fitted.bnn

    def _fit(self, args: Any, model: nn.Module, training: Any, held_out: Any) -> Fitted:
        held_out = held_out if self._validation is None else self._validation
        with _unwrapped(model):
            fitted = self._conversion.fit(
                model,
                self._training_data(training),
                None if held_out is None else _of_all_processes(held_out),
                args.output_dir,
                args.device,
                progress=False if args.disable_tqdm else None,
            )
        self.bnn, self.result, self.run = fitted.bnn, fitted.result, fitted.run
        if args.process_index == 0:
            print(fitted, file=sys.stderr)
        return fitted

    def _training_data(self, prepared: Any) -> Iterable[Any]:
        return _of_all_processes(prepared if self._loader is None else self._loader)


def _of_all_processes(prepared: Any) -> Iterable[Any]:
    """The loader inside one of accelerate, as large a batch, but the same on all processes.

    What accelerate puts around it shuffles by how often it was read, which a fit that goes on
    could not do again, and gives every process batches of its own.
    """
    loader = getattr(prepared, "base_dataloader", prepared)
    shard: Any = getattr(loader, "batch_sampler", None)
    processes = getattr(shard, "num_processes", 1)
    if processes == 1:
        return loader  # type: ignore[no-any-return]
    batches = shard.batch_sampler
    if not shard.split_batches:
        batches = BatchSampler(batches.sampler, processes * batches.batch_size, batches.drop_last)
    return rebatched(loader, batches)


@contextmanager
def _unwrapped(model: nn.Module) -> Iterator[None]:
    """Take away the autocast that accelerate puts around `forward`; a conversion would keep it."""
    names = ("forward", "_original_forward")
    held = {name: vars(model).pop(name) for name in names if "_original_forward" in vars(model)}
    try:
        yield
    finally:
        vars(model).update(held)
