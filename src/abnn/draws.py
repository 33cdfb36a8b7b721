"""A draw is data: its noise is a function of (seed, mode, draw, layer) and of nothing else."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

T = TypeVar("T")

# What random numbers are for; those of different streams are independent.
STREAMS = ("predict", "fit", "probe", "prior", "data", "antithetic", "train", "init", "tune")


@dataclass(frozen=True)
class Draw:
    """One draw of the noise for one mode.

    Args:
        seed: the seed of the prediction or of the fit.
        mode: index of the mode.
        index: which draw of this mode.
        stream: what the noise is for, one of `STREAMS`. In "antithetic", draws 2k and 2k + 1 are a
            pair whose noise is of opposite sign.
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
    return list(noise_matrix((draw,), sum(sizes))[0].split(list(sizes)))


# Predictions with the same seed ask for the same noise again and again.
_KEPT_NUMBERS = 2**20


def noise_matrix(draws: Sequence[Draw], size: int) -> Tensor:
    """The channel noise of several draws, a row each; not to be written to.

    >>> noise_matrix([Draw(0, 0, 0), Draw(0, 1, 0)], 10).shape
    torch.Size([2, 10])
    """
    if len(draws) * size > _KEPT_NUMBERS:
        return untraced(_noise_matrix, draws, size)
    return untraced(_kept_noise_matrix, tuple(draws), size)


def _noise_matrix(draws: Sequence[Draw], size: int) -> Tensor:
    noise = np.empty((len(draws), size), dtype=np.float32)
    for row, draw in zip(noise, draws, strict=True):
        row[:] = _normal(draw, (size,))
    return torch.from_numpy(noise)


_kept_noise_matrix = lru_cache(maxsize=4)(_noise_matrix)


def untraced(function: Callable[..., T], *args: Any) -> T:
    """Call a function that `torch.compile` should not look into.

    >>> untraced(max, 1, 2)
    2
    """
    # Dynamo's own decorator would load all of it, which takes longer than the rest of abnn.
    dynamo = sys.modules.get("torch._dynamo")
    result: T = function(*args) if dynamo is None else dynamo.disable(function)(*args)
    return result


def local_noise(draw: Draw, layer: int, shape: Sequence[int]) -> Tensor:
    """Noise of its own for every example or activation of one layer, the leading ones first.

    Rows are filled in order, so the first examples of a batch keep their noise in a larger one.

    >>> small, large = local_noise(Draw(0, 0, 0), 3, (2, 5)), local_noise(Draw(0, 0, 0), 3, (4, 5))
    >>> bool((small == large[:2]).all())
    True
    """
    before = 0 if draw.share is None else shape[0] * draw.share[0] // draw.share[1]
    rows = _normal(draw, (before + shape[0], *shape[1:]), layer)
    return torch.from_numpy(rows[before:])


def _normal(draw: Draw, shape: Sequence[int], *key: int) -> npt.NDArray[np.float32]:
    paired = draw.stream == "antithetic"
    index = draw.index // 2 if paired else draw.index
    rng = generator(draw.stream, draw.seed, draw.mode, index, *key)
    noise = rng.standard_normal(tuple(shape), dtype=np.float32)
    return -noise if paired and draw.index % 2 else noise


def all_draws(modes: Iterable[int], samples: int, seed: int, stream: str = "predict") -> list[Draw]:
    """All draws of a prediction, mode by mode.

    >>> [(draw.mode, draw.index) for draw in all_draws(range(2), samples=2, seed=0)]
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    return [Draw(seed, mode, index, stream) for mode in modes for index in range(samples)]


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


def number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> float:
    """An argument that must be a finite number within bounds; anything else is refused by its name.

    >>> number("rho", 0.5, least=0, most=1)
    0.5
    """
    # A bool is a number to Python, but where a number is asked for it is a mistake.
    real = not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    bounds = (
        ("of at least", least, operator.ge),
        ("above", above, operator.gt),
        ("of at most", most, operator.le),
        ("below", below, operator.lt),
    )
    given = [(word, bound, holds) for word, bound, holds in bounds if bound is not None]
    if not real or not all(holds(value, bound) for _, bound, holds in given):
        words = " and ".join(f"{word} {bound:g}" for word, bound, _ in given)
        raise ValueError(f"{name}={value!r} is not a number {words}.")
    return float(value)


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Consecutive pieces of at most `size` items.

    >>> list(chunks([1, 2, 3], 2))
    [[1, 2], [3]]
    """
    for start in range(0, len(items), size):
        yield items[start : start + size]
