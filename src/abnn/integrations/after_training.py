"""What a callback does with a trained network: convert it, fit its modes, tell what came of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.data import BatchSampler, DataLoader

from abnn.batches import device_of, length_of
from abnn.convert import convert
from abnn.distributed import World, world
from abnn.fit import fit
from abnn.fitplan import FitPlan
from abnn.model import ABNN
from abnn.order import randomness_kept
from abnn.recipe import Recipe
from abnn.rundir import settings_of
from abnn.steps import chosen_recipe, number_of_steps
from abnn.surgery import twin
from abnn.validation import FitResult


@dataclass(frozen=True)
class Conversion:
    """How a trained network is to become Bayesian.

    Args:
        recipe: of the fit; what it says of modes, alpha, noise and stats is for the conversion too.
        options: more for `abnn.convert`.
        run: the run directory; None: one under that of the training.
        ignore_index, checkpoint_seconds: as of `abnn.fit`.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> Conversion(Recipe(modes=2)).convert(net)
    ABNN(Sequential, modes=2, alpha=0.01, 1 Bayesian norm, 32 added parameters)
    """

    recipe: Recipe
    options: Mapping[str, Any] | None = None
    run: str | PathLike[str] | None = None
    ignore_index: int = -100
    checkpoint_seconds: float = 30.0

    def convert(self, net: nn.Module) -> ABNN:
        """The network as an ABNN, not fitted yet."""
        names = ("modes", "alpha", "noise", "stats")
        wanted = {name: getattr(self.recipe, name) for name in names}
        given = {name: value for name, value in wanted.items() if value is not None}
        return convert(net, **given, **(self.options or {}))

    def check(self, net: nn.Module, loader: Iterable[Any]) -> None:
        """Notice before a training what would else be noticed after it."""
        if not any(is_lazy(tensor) for tensor in (*net.parameters(), *net.buffers())):
            FitPlan(self.convert(net), loader, self.recipe, self.ignore_index, World(), None)

    def fit(
        self,
        net: nn.Module,
        loader: Iterable[Any],
        validation: Iterable[Any] | None,
        root: str | PathLike[str] | None,
        device: torch.device,
        progress: bool | None = None,
    ) -> Fitted:
        """Convert a network and fit its modes; the network and the random numbers stay as they are.

        Args:
            net: the trained network.
            loader, validation: as of `abnn.fit`.
            root: directory of the training; None: nothing is written.
            device: where to compute.
            progress: as of `abnn.fit`.

        >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        >>> loader = [(torch.randn(16, 4), torch.randint(3, (16,))) for _ in range(5)]
        >>> conversion = Conversion(Recipe(epochs=1, modes=2))
        >>> fitted = conversion.fit(net, loader, None, None, torch.device("cpu"))
        >>> fitted.result.losses.shape, fitted.run
        (torch.Size([5, 2]), None)
        """
        with randomness_kept(loader), randomness_kept(() if validation is None else validation):
            bnn = self.convert(_alike(net)).to(device)
            run = None if root is None else self._directory(bnn, loader, root)
            result = fit(
                bnn,
                loader,
                self.recipe,
                validation=validation,
                run=run,
                ignore_index=self.ignore_index,
                checkpoint_seconds=self.checkpoint_seconds,
                progress=progress,
            )
            return Fitted(bnn, result, run)

    def _directory(self, bnn: ABNN, loader: Iterable[Any], root: str | PathLike[str]) -> Path:
        """Named by what decides how the fit ends: only the same fit comes back to it, to resume."""
        if self.run is not None:
            return Path(self.run)
        steps = number_of_steps(self.recipe, length_of(loader))
        settings = json.dumps(settings_of(bnn, self.recipe, steps), sort_keys=True)
        return Path(root) / f"abnn-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"


def conversion(
    recipe: str | PathLike[str] | Recipe | None,
    modes: int | None,
    alpha: float | None,
    overrides: Mapping[str, Any],
    *,
    run: str | PathLike[str] | None,
    ignore_index: int,
    checkpoint_seconds: float,
    **options: Any,
) -> Conversion:
    """A conversion as a callback is asked for it.

    >>> wanted = {"run": None, "ignore_index": -100, "checkpoint_seconds": 30.0}
    >>> asked = conversion("imagenet-vit", 2, None, {"lr": 0.1}, **wanted)
    >>> asked.recipe.modes, asked.recipe.alpha, asked.recipe.lr
    (2, 0.00035, 0.1)
    """
    named = {"modes": modes, "alpha": alpha}
    given = dict(overrides) | {name: value for name, value in named.items() if value is not None}
    return Conversion(chosen_recipe(recipe, given), options, run, ignore_index, checkpoint_seconds)


@dataclass(frozen=True)
class Fitted:
    """What came of a conversion.

    Args:
        bnn: the network, fitted.
        result: what `abnn.fit` says of it.
        run: the run directory, if there is one.
    """

    bnn: ABNN
    result: FitResult
    run: Path | None

    def figures(self) -> dict[str, float]:
        """What a logger of a training framework takes: the last loss, and the validation figures.

        >>> from abnn import Evaluation
        >>> before = Evaluation(n=100, accuracy=91.0, nll=0.37, brier=0.1, ece=5.0)
        >>> result = FitResult(Recipe(), torch.tensor([[0.5, 0.7]]), 1.5, original=before)
        >>> Fitted(abnn.convert(nn.LayerNorm(8)), result, None).figures()["abnn/original/nll"]
        0.37
        """
        figures = {"abnn/loss": self.result.losses[-1].mean().item()}
        for name, row in self.result.provenance()["validation"].items():
            for figure in ("nll", "accuracy", "ece"):
                figures[f"abnn/{name.replace(' ', '_')}/{figure}"] = row[figure]
        return figures

    def __str__(self) -> str:
        """The result, and where it is."""
        return f"{self.result}" + ("" if self.run is None else f"\nWritten to {self.run}.")


class Batches:
    """The first batches of a loader, each changed by some functions.

    The samplers and the generator of the loader stay in sight: a fit seeds them.

    Args:
        loader: gives the batches.
        limit: how many of them; None: all.
        changes: what is done to each, one after the other.

    >>> list(Batches([1, 2, 3], 2, lambda batch: 10 * batch))
    [10, 20]
    """

    def __init__(
        self, loader: Iterable[Any], limit: int | None, *changes: Callable[[Any], Any]
    ) -> None:
        self.loader, self.limit, self.changes = loader, limit, changes
        for name in ("generator", "sampler", "batch_sampler"):
            setattr(self, name, getattr(loader, name, None))

    def __iter__(self) -> Iterator[Any]:
        for batch in islice(self.loader, self.limit):
            yield reduce(lambda changed, change: change(changed), self.changes, batch)

    def __len__(self) -> int:
        length = length_of(self.loader)
        if length is None:
            raise TypeError(f"A {type(self.loader).__name__} has no length.")
        return length if self.limit is None else min(length, self.limit)


def rebatched(loader: DataLoader[Any], batches: BatchSampler) -> DataLoader[Any]:
    """A loader of the same data in other batches.

    >>> loader = DataLoader(range(4), batch_size=1)
    >>> [batch.tolist() for batch in rebatched(loader, BatchSampler(loader.sampler, 3, False))]
    [[0, 1, 2], [3]]
    """
    return DataLoader(
        loader.dataset,
        batch_sampler=batches,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
    )


def _alike(net: nn.Module) -> nn.Module:
    """The network with the buffers of process 0: batch norms count rows of their own process."""
    here = world()
    if here.size == 1:
        return net
    with here.joined(device_of(net)) as everyone:
        first = everyone.gather({name: buffer.cpu() for name, buffer in net.named_buffers()})[0]
    net = twin(net)
    for name, buffer in net.named_buffers():
        buffer.data = first[name].to(buffer.device)
    return net
