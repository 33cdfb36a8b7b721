"""The order of data: of training data, and of its augmentation, a function of (seed, epoch).

A resumed fit sees the same batches so, and so do all processes of a distributed one. The numbers
of the noise never come from the generators that are seeded here.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from abnn.draws import generator

if TYPE_CHECKING:
    from abnn.distributed import World


def seed_epoch(loader: Iterable[Any], seed: int, epoch: int) -> None:
    """Seed Python's, numpy's and torch's generators, and those of the loader and its samplers."""
    numbers = generator("data", seed, epoch)
    seed_all(numbers)
    for own in _generators(loader):
        own.manual_seed(int(numbers.integers(2**32)))
    for sampler in samplers(loader):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def seed_all(numbers: np.random.Generator) -> None:
    """Seed the global generators of Python, numpy and torch."""
    random.seed(int(numbers.integers(2**32)))
    np.random.seed(int(numbers.integers(2**32)))  # noqa: NPY002  (what augmentations use)
    torch.manual_seed(int(numbers.integers(2**32)))


def random_states() -> tuple[Any, ...]:
    """The states of the global generators, for `set_random_states`.

    >>> states = random_states()
    >>> a = torch.rand(())
    >>> set_random_states(states)
    >>> bool(torch.rand(()) == a)
    True
    """
    return random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002


def set_random_states(states: tuple[Any, ...]) -> None:
    """Bring the global generators back to earlier states."""
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])


@contextmanager
def randomness_kept(loader: Iterable[Any]) -> Iterator[None]:
    """Leave the global generators, and those of the loader, as they were found."""
    states = random_states()
    own = [(g, g.get_state()) for g in _generators(loader)]
    try:
        yield
    finally:
        set_random_states(states)
        for g, state in own:
            g.set_state(state)


@contextmanager
def randomness_of_first(loader: Iterable[Any], team: World) -> Iterator[None]:
    """Give all processes the random numbers of process 0, for a loader that shuffles; for a while.

    A process alone draws on as ever.
    """
    if team.size == 1:
        yield
        return
    with randomness_kept(loader):
        own = _generators(loader)
        states, theirs = team.gather((random_states(), [g.get_state() for g in own]))[0]
        set_random_states(states)
        for g, state in zip(own, theirs, strict=False):
            g.set_state(state)
        yield


def samplers(loader: Iterable[Any]) -> list[Any]:
    """The sampler and the batch sampler of a loader, and the sampler inside the latter."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = [getattr(loader, "sampler", None), batch_sampler]
    return [s for s in (*found, getattr(batch_sampler, "sampler", None)) if s is not None]


def _generators(loader: Iterable[Any]) -> list[torch.Generator]:
    owners = (loader, *samplers(loader))
    found = (getattr(owner, "generator", None) for owner in owners)
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
