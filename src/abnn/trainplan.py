"""A training over several processes: what each has of the data, and how all take the same steps.

Every process computes the loss of its rows of a batch, weighed by its share of the labels that
count. So the sum of their gradients is that of the whole batch. A process alone communicates
nothing, and has all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from abnn.batches import device_of, length_of, split_soft, to_device
from abnn.distributed import World
from abnn.draws import generator
from abnn.order import random_states, seed_all, seed_epoch, set_random_states
from abnn.outputs import Inputs
from abnn.recipe import Recipe
from abnn.rundir import Place, RunDirectory
from abnn.shares import check_last_batch, check_pieces, share
from abnn.steps import check_epoch, lr_of_step, number_of_steps
from abnn.syncnorm import WholeBatchOfNetwork


@dataclass(frozen=True)
class Batch:
    """A batch, or a process's share of it, on the device.

    Args:
        raw: what the loader gave.
        inputs, labels: of this share.
        number: which batch of the epoch, from 1.
        part: this share of all labels that count.
        due: whether a checkpoint follows.
    """

    raw: Any
    inputs: Inputs
    labels: Tensor
    number: int
    part: float
    due: bool


class TrainPlan:
    """The data, the number of steps, and what this process has to do of it.

    Args:
        model, loader, recipe, ignore_index: as of `abnn.train`.
        world: the processes that train together.
    """

    def __init__(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        recipe: Recipe,
        ignore_index: int,
        world: World,
    ) -> None:
        self.loader, self.recipe, self.ignore_index = loader, recipe, ignore_index
        self.world = world
        self.epoch_length = length_of(loader)
        self.steps = number_of_steps(recipe, self.epoch_length)
        self.device = device_of(model) or torch.device("cpu")
        check_last_batch(loader, world.size)
        self.pieces = share(loader, world.rank, world.size)
        net = model if world.size > 1 else nn.Identity()
        self.whole_batch = WholeBatchOfNetwork(net, world.sum_)

    @property
    def exchanges(self) -> bool:
        """Whether processes talk within a forward pass, so that they can't meet around it."""
        return bool(self.whole_batch.layers)

    @property
    def processes(self) -> dict[str, str]:
        """What the numbers of the training depend on, as far as processes are concerned."""
        size = self.world.size
        return {} if size == 1 else {"processes": f"{size} that share every batch"}

    def lr(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return lr_of_step(self.recipe, step, self.steps, self.epoch_length)

    def agree(self, settings: dict[str, Any]) -> None:
        """See that all processes run the same training."""
        everyone = self.world.gather(settings)
        for rank, other in enumerate(everyone):
            odd = [key for key in everyone[0] if other[key] != everyone[0][key]]
            if odd:
                raise ValueError(
                    f"Process {rank} runs another training than process 0: its {', '.join(odd)} "
                    "differs; give all processes the same network, arguments and data."
                )

    def take_from_first(self, values: dict[str, Tensor]) -> None:
        """Let all processes have the values of process 0: parameters and buffers, in place."""
        if self.world.size == 1:
            return
        first = self.world.rank == 0
        own = {name: tensor.detach().cpu() for name, tensor in values.items()} if first else {}
        for name, tensor in self.world.furthest((0,), own).items():
            values[name].copy_(tensor)

    @contextmanager
    def randomness(self, step: int) -> Iterator[None]:
        """Let what is random in a step depend on the step, and on the process, alone.

        The loader's randomness is not touched, and process 0 has that of a process alone.
        """
        key = (step, self.world.rank) if self.world.rank else (step,)
        states = random_states()
        seed_all(generator("train", self.recipe.seed, *key))
        try:
            yield
        finally:
            set_random_states(states)

    def batches(self, place: Place, directory: RunDirectory | None) -> Iterator[Batch]:
        """The batches of an epoch that are still to do; the processes agree on each."""
        step, epoch, offset = place
        seed_epoch(self.loader, self.recipe.seed, epoch)
        pieces, number = iter(self.pieces), 0
        while True:
            with self.world.meeting(4) as meeting:
                piece = next(pieces, None)
                while piece is not None and number < offset:  # done before it was interrupted
                    number += 1
                    if directory and number == offset:
                        directory.check_data(piece[0])
                    piece = next(pieces, None)
                number += 1
                if piece is not None:
                    inputs, labels = split_soft(piece[0])
                    inputs, labels = to_device(inputs, self.device), labels.to(self.device)
                    due = directory is not None and directory.is_due(step + 1 == self.steps)
                    meeting.say(1, self._counted(labels), piece[1], due)
            given, counts, checksums, due_there = meeting.heard.T
            check_pieces(given, checksums, epoch, number)
            if piece is None:
                check_epoch(number - 1, epoch, step, self.steps, self.epoch_length)
                return
            part = float(counts[self.world.rank] / counts.sum().clamp_min(1))
            yield Batch(piece[0], inputs, labels, number, part, bool(due_there[0]))
            step += 1

    def all_inputs(self, epoch: int) -> Iterator[Inputs]:
        """The inputs of all batches of an epoch, whole ones on every process."""
        seed_epoch(self.loader, self.recipe.seed, epoch)
        for batch in self.loader:
            yield to_device(split_soft(batch)[0], self.device)

    def add_up(self, parameters: Sequence[Tensor]) -> None:
        """Make the gradients those of the whole batch, where every process has its share's."""
        if self.world.size == 1:
            return
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        used = torch.tensor([float(p.grad is not None) for p in parameters]).to(grads[0])
        flat = self.world.sum_(torch.cat([*(grad.flatten() for grad in grads), used]))
        *pieces, used = flat.split([*(grad.numel() for grad in grads), len(grads)])
        for p, grad, piece, somewhere in zip(parameters, grads, pieces, used.tolist(), strict=True):
            if somewhere:  # else no process has a gradient, and the optimiser is to see none
                p.grad = grad.copy_(piece.view_as(grad))

    def _counted(self, labels: Tensor) -> int:
        if self.world.size == 1:
            return 1  # nobody asks
        if labels.is_floating_point():
            return len(labels)
        return int((labels != self.ignore_index).sum())
