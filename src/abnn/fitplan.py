"""What does not change during a fit: data, number of steps, groups of modes, who does what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cached_property
from os import PathLike
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from abnn.batches import device_of, length_of
from abnn.distributed import World
from abnn.draws import whole_number
from abnn.journal import Journal, check_unwritten
from abnn.model import ABNN
from abnn.recipe import Recipe
from abnn.rundir import RunDirectory, columns_of_modes, settings_of
from abnn.shares import check_last_batch, is_share, share
from abnn.snapshots import snapshot_steps
from abnn.steps import lr_of_step, number_of_steps
from abnn.syncnorm import WholeBatch, whole_batch

Split = Literal["data", "modes"]


class FitPlan:
    """The data, the number of steps, the groups of modes, and the share of this process.

    Args:
        bnn, loader, recipe, ignore_index: as of `abnn.fit`.
        everyone: all processes of the fit.
        split: what they share; None: the modes where every process gets as many, else the data.
    """

    def __init__(
        self,
        bnn: ABNN,
        loader: Iterable[Any],
        recipe: Recipe,
        ignore_index: int,
        everyone: World,
        split: Split | None,
    ) -> None:
        _check_arguments(bnn, loader, recipe)
        self.bnn, self.loader, self.recipe, self.ignore_index = bnn, loader, recipe, ignore_index
        self.everyone = everyone
        self.split = _choose(split, bnn, loader, everyone.size)
        self.shares_data = self.split == "data"
        self.epoch_length = length_of(loader)
        self.steps = number_of_steps(recipe, self.epoch_length)
        self.device = device_of(bnn) or torch.device("cpu")
        owners = everyone.size if self.split == "modes" else 1
        rank = everyone.rank if self.split == "modes" else 0
        self.own = _modes_of(bnn.modes, rank, owners)
        self.groups = _groups(self.own, recipe.modes_at_once)
        self.all_groups = [
            group
            for rank in range(owners)
            for group in _groups(_modes_of(bnn.modes, rank, owners), recipe.modes_at_once)
        ]
        self.batch_statistics = [
            name
            for name, layer in bnn.bayes_layers.items()
            if layer.bank.mean is not None and layer.bank.form.family == "batch"
        ]
        _check_last_batch(loader, self.batch_statistics)
        # Those with whom every step is taken together: nobody, unless batches are shared.
        self.world = everyone if self.shares_data else World()
        check_last_batch(loader, self.world.size)
        self.pieces = share(loader, self.world.rank, self.world.size)
        none = WholeBatch([], self.world.sum_)
        self.whole_batch = whole_batch(bnn, everyone) if self.shares_data else none

    def owners(self) -> AbstractContextManager[World]:
        """The processes that have modes of their own; they may have to wait long for each other."""
        if self.split != "modes":
            return nullcontext(World())
        return self.everyone.joined(timeout=timedelta(days=1))

    def lr(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return lr_of_step(self.recipe, step, self.steps, self.epoch_length)

    def directory(
        self,
        run: str | PathLike[str] | None,
        every: float,
        snapshots: int,
        config: Mapping[str, Any] | None,
        tensorboard: bool,
    ) -> RunDirectory | None:
        """The run directory of this process, if there is to be one."""
        snapshots = whole_number("snapshots", snapshots, least=0)
        if run is None:
            if snapshots:
                raise ValueError(f"snapshots={snapshots} need a directory; pass run= too.")
            check_unwritten(config, tensorboard)
            return None
        modes = self.own if self.split == "modes" else None
        marks = snapshot_steps(self.steps, snapshots)
        columns = columns_of_modes(self.bnn.modes)
        world = self.everyone
        events = tensorboard and world.rank == 0
        journal = Journal(repr(self.bnn), self.recipe, self.lr, config, events, world.size)
        return RunDirectory(run, self.settings, every, journal, columns, modes, world.rank, marks)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What decides how the fit ends; the number of processes only as far as it does."""
        processes = None
        if self.split == "data":
            processes = f"{self.everyone.size} that share every batch"
        elif self.split == "modes":
            sizes = ", ".join(str(len(group)) for group in self.all_groups)
            processes = f"several that share the modes in groups of {sizes}"
        return settings_of(self.bnn, self.recipe, self.steps, processes)

    def agree(self, directory: RunDirectory | None, validation: Any) -> None:
        """See that all processes run the same fit, and let them go on from the same checkpoint."""
        if self.everyone.size == 1:
            return
        own = self.settings | {
            "ignore_index": self.ignore_index,
            "run directory": directory is not None,
            "number of snapshots": len(directory.snapshots) if directory else 0,
            "validation data": validation is not None,
        }
        settings = self.everyone.gather(own)
        for rank, other in enumerate(settings):
            odd = [key for key in settings[0] if other.get(key) != settings[0][key]]
            if odd:
                raise ValueError(
                    f"Process {rank} runs another fit than process 0: its {', '.join(odd)} "
                    "differs; give all processes the same network, weights, arguments and data."
                )
        if directory and self.shares_data:
            directory.share(self.everyone)

    def eta(self, group: range, classes: int) -> Tensor:
        """The class weights of the random prior of every mode in a group, `[S, K]`."""
        prior, seed = self.recipe.prior, self.recipe.seed
        if prior is None:
            return torch.zeros(len(group), classes, device=self.device)
        return torch.stack([prior.draw(classes, seed, mode) for mode in group]).to(self.device)

    def check_rows(self, rows: int) -> None:
        """Refuse a batch that has no statistics."""
        if rows == 1 and self.batch_statistics:
            raise _batch_of_one(self.batch_statistics)


def _choose(wanted: Split | None, bnn: ABNN, loader: Iterable[Any], size: int) -> Split | None:
    """What processes share."""
    if wanted is not None and wanted not in get_args(Split):
        raise ValueError(f"split={wanted!r} must be 'data' or 'modes'.")
    if size == 1:
        return None
    whole_modes = bnn.modes % size == 0 and not is_share(loader) and bnn.sharded is None
    chosen: Split = wanted or ("modes" if whole_modes else "data")
    if chosen == "modes":
        if bnn.modes < size:
            raise ValueError(
                f"modes={bnn.modes} is too few for {size} processes to have one each; use "
                "split='data'."
            )
        if is_share(loader):
            raise ValueError(
                "With split='modes' every process needs all the data, but the loader has a "
                "DistributedSampler; take that away, or use split='data'."
            )
        if bnn.sharded is not None:
            raise ValueError(
                "The processes hold a part of the network each, so they must take every step "
                "together; use split='data'."
            )
    return chosen


def _modes_of(modes: int, rank: int, size: int) -> range:
    return range(modes * rank // size, modes * (rank + 1) // size)


def _groups(own: range, at_once: int | None) -> list[range]:
    k = min(at_once or len(own), len(own))
    return [range(i, min(i + k, own.stop)) for i in range(own.start, own.stop, k)]


def _check_arguments(bnn: ABNN, loader: Iterable[Any], recipe: Recipe) -> None:
    if not isinstance(bnn, ABNN):
        raise TypeError(f"fit takes what abnn.convert returns, not a {type(bnn).__name__}.")
    if not isinstance(loader, Iterable):
        raise TypeError(f"fit takes a loader of batches, not a {type(loader).__name__}.")
    if any(tensor.is_inference() for tensor in bnn.state_dict().values()):
        raise ValueError(
            "The network was made under torch.inference_mode(), so no gradient passes through it; "
            "build it and load its weights outside of that."
        )
    for name in ("alpha", "noise", "stats", "modes"):
        wanted, has = getattr(recipe, name), getattr(bnn, name)
        if wanted is not None and wanted != has:
            raise ValueError(
                f"The recipe wants {name}={wanted!r}, but the network was converted with "
                f"{name}={has!r}; convert it with {name}={wanted!r}, or pass fit(..., {name}="
                f"{has!r})."
            )


def _check_last_batch(loader: Iterable[Any], batch_statistics: list[str]) -> None:
    """A last batch of one would stop the fit at the end of the epoch: say so at its start."""
    size, data = getattr(loader, "batch_size", None), getattr(loader, "dataset", None)
    if not batch_statistics or not isinstance(size, int) or not isinstance(data, Sized):
        return
    if not getattr(loader, "drop_last", False) and len(data) % size == 1:
        raise _batch_of_one(batch_statistics)


def _batch_of_one(batch_statistics: list[str]) -> ValueError:
    return ValueError(
        f"A batch of one example has no batch statistics, which {batch_statistics[0]!r} needs; "
        "use a larger batch size, DataLoader(..., drop_last=True), or convert with stats='frozen'."
    )
