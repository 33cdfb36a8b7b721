"""A draw is data: its noise is a function of (seed, mode, draw, layer) and of nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")

# What random numbers are for; those of different streams are independent.
STREAMS = ("predict", "fit", "probe", "prior", "data")


@dataclass(frozen=True)
class Draw:
    """One draw of the noise for one mode.

    Args:
        seed: the seed of the prediction or of the fit.
        mode: index of the mode.
        index: which draw of this mode.
        stream: what the noise is for, one of `STREAMS`.
        share: where only a part of a batch is: how many rows come before it, and how many are here.

    >>> Draw(seed=0, mode=2, index=5)
    Draw(seed=0, mode=2, index=5, stream='predict')
    """

    seed: int
    mode: int
    index: int
    stream: str = "predict"
    share: tuple[int, int] | None = field(default=None, repr=False)


def generator(stream: str, seed: int, *key: int) -> np.random.Generator:
    """The random numbers of one purpose: independent for every (stream, seed, key).

    Numbers come from the CPU whatever device the network is on, so that every device and every
    process sees the same ones.

    >>> a, b = generator("predict", 0, 1), generator("predict", 0, 1)
    >>> bool(a.random() == b.random())
    True
    """
    sequence = np.random.SeedSequence(seed % 2**64, spawn_key=(STREAMS.index(stream), *key))
    return np.random.Generator(np.random.Philox(sequence))


def channel_noise(draw: Draw, sizes: Sequence[int]) -> list[Tensor]:
    """The noise vectors of one draw, standard normal, one for every layer of the given sizes.

    >>> [eps.shape for eps in channel_noise(Draw(0, 0, 0), [4, 6])]
    [torch.Size([4]), torch.Size([6])]
    """
    rng = generator(draw.stream, draw.seed, draw.mode, draw.index)
    flat = torch.from_numpy(rng.standard_normal(sum(sizes), dtype=np.float32))
    return list(flat.split(list(sizes)))


def local_noise(draw: Draw, layer: int, shape: Sequence[int]) -> Tensor:
    """Noise of its own for every example or activation of one layer, the leading ones first.

    Rows are filled in order, so the first examples of a batch keep their noise in a larger one.

    >>> small, large = local_noise(Draw(0, 0, 0), 3, (2, 5)), local_noise(Draw(0, 0, 0), 3, (4, 5))
    >>> bool((small == large[:2]).all())
    True
    """
    before = 0 if draw.share is None else shape[0] * draw.share[0] // draw.share[1]
    rng = generator(draw.stream, draw.seed, draw.mode, draw.index, layer)
    rows = rng.standard_normal((before + shape[0], *shape[1:]), dtype=np.float32)
    return torch.from_numpy(rows)[before:]


def plan(modes: Iterable[int], samples: int, seed: int) -> list[Draw]:
    """All draws of a prediction, mode by mode.

    >>> [(draw.mode, draw.index) for draw in plan(range(2), samples=2, seed=0)]
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    return [Draw(seed, mode, index) for mode in modes for index in range(samples)]


def whole_number(name: str, value: Any, least: int | None = None) -> int:
    """An argument that must be an integer, numpy's too; anything else is refused by its name.

    >>> whole_number("samples", np.int64(8), least=1)
    8
    """
    # A bool is an integer to Python, but where a number is asked for it is a mistake.
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or (least is not None and int(value) < least):
        bound = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name}={value!r} is not a whole number{bound}.")
    return int(value)


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Consecutive pieces of at most `size` items.

    >>> list(chunks([1, 2, 3], 2))
    [[1, 2], [3]]
    """
    for start in range(0, len(items), size):
        yield items[start : start + size]
