"""Anytime prediction: every input gets as many draws as it needs, by a stated statistical rule.

An ABNN's prediction is a mean over M modes, which are fixed, and over noise, which is sampled.
Draws run in rounds that give every mode one draw more, so the mean over modes is exact and only the
noise within modes is Monte Carlo. For a figure (a probability, an entropy) with the sample variance
s_m^2 over the L draws of mode m,

    SE^2 = sum_m s_m^2 / (M^2 L),     nu = (L - 1) (sum_m s_m^2)^2 / sum_m s_m^4,

its half-width is h = t(nu, 1 - delta_j / 2) SE, with Student's t and the degrees of freedom nu of
Welch and Satterthwaite: all modes' variances are pooled, and a mode that varies alone counts alone.

An input stops at the first look j at which h <= tolerance for all its figures: the mean probability
of every class, and the total and the epistemic uncertainty as shares of log K. Looks come after 2,
4, 8, ... rounds. To look often must not make it likely to stop by luck, so the j-th look may only
err with probability delta_j = delta / (j (j + 1)), and these add up to at most delta = 5 %.

Antithetic draws come in pairs whose members are not independent: there the mean of a pair is one
observation, and L counts pairs. More, and what is measured, is in docs/anytime.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from abnn.draws import Draw, chunks, whole_number
from abnn.folding import all_batched, take
from abnn.outputs import Inputs
from abnn.plan import Plan
from abnn.prediction import Prediction, PredictionStream
from abnn.student import student

if TYPE_CHECKING:
    from abnn.model import ABNN

DELTA = 0.05
# Beyond this many degrees of freedom Student's t is nearly normal; fewer are the cautious side.
_MOST_DEGREES = 60

# (rows, draws, size) to logits, `[s, n, K, ...]`, of the inputs at the rows (None: all of them), in
# pieces of whole rounds of `size` draws.
Run = Callable[[Tensor | None, Sequence[Draw], int], Iterator[Tensor]]


def sample_until(
    run: Run,
    modes: Sequence[int],
    *,
    tolerance: float = 0.05,
    max_samples: int = 16,
    seed: int = 0,
    stream: str = "predict",
) -> Prediction:
    """Draw until every input's figures are known to `tolerance`, or `max_samples` are used.

    Args:
        run: gives the logits of draws for some rows of the inputs, in pieces of whole rounds.
        modes: the modes to draw from.
        tolerance: half-width of the confidence interval at which an input stops.
        max_samples: most draws of every mode.
        seed, stream: of the draws; in "antithetic" a pair of draws is one observation.

    >>> noise = torch.randn(100, 1, 3, generator=torch.Generator().manual_seed(0))
    >>> scale = torch.tensor([0.0, 0.1, 3.0]).view(3, 1)  # of no, little and much noise
    >>> def run(rows, draws, size):
    ...     some = scale if rows is None else scale[rows]
    ...     yield torch.stack([some * noise[2 * d.index + d.mode] for d in draws])
    >>> sample_until(run, modes=[0, 1]).samples_used.tolist()
    [4, 8, 32]
    """
    _check_tolerance(tolerance)
    size = 2 if stream == "antithetic" else 1
    counts = looks(max_samples, size)
    rows: Tensor | None = None
    members, spread = PredictionStream(), Spread()
    done: list[Prediction] = []
    order: list[Tensor] = []
    for look, (before, count) in enumerate(pairwise((0, *counts)), start=1):
        draws = [
            Draw(seed, mode, index + i, stream)
            for index in range(before, count, size)
            for mode in modes
            for i in range(size)
        ]
        for logits in run(rows, draws, len(modes) * size):
            members.update(logits)
            spread.update(logits.unflatten(0, (-1, len(modes), size)))
        # Not a number is not larger than the tolerance: what has no answer gets no more draws.
        pending = spread.half_width(look) > tolerance
        if count == counts[-1]:
            pending = torch.zeros_like(pending)
        rows = torch.arange(len(pending), device=pending.device) if rows is None else rows
        result = members.result()[~pending]
        done.append(replace(result, samples_used=result.used_by_input()))
        order.append(rows[~pending])
        rows = rows[pending]
        if not len(rows):
            break
        members.keep(pending)
        spread.keep(pending)
    return Prediction.cat(done)[torch.cat(order).argsort()]


def _check_tolerance(value: Any) -> None:
    number = isinstance(value, Real) and not isinstance(value, bool)
    if not number or not 0 <= float(value) < math.inf:
        raise ValueError(f"tolerance={value!r} is not a number of at least 0, such as 0.01.")


def looks(max_samples: int, size: int = 1) -> list[int]:
    """After how many draws of every mode to look: 2, 4, 8, ..., `max_samples`; twice for pairs.

    >>> looks(16), looks(12), looks(16, size=2)
    ([2, 4, 8, 16], [2, 4, 8, 12], [4, 8, 16])
    """
    least = 2 * size  # a variance needs two observations
    max_samples = whole_number("max_samples", max_samples, least=least)
    if max_samples % size:
        raise ValueError(
            f"max_samples={max_samples} is odd, and antithetic draws come in pairs; give an even "
            "number, or draws='independent'."
        )
    counts = [least]
    while counts[-1] < max_samples:
        counts.append(min(2 * counts[-1], max_samples))
    return counts


class Spread:
    """How far the figures of every mode vary over its draws, as a stream of rounds.

    The figures of a member p are its K probabilities, its cross-entropy -sum_k p_k log q_k and its
    divergence KL(p || q), the latter two over log K. With q the mean of all members, their means
    are the total and the epistemic uncertainty, and to first order these vary by nothing else
    (the delta method). For q the mean of the first round is taken, so that nothing must be kept.
    """

    def __init__(self) -> None:
        self.count = 0

    def update(self, logits: Tensor) -> None:
        """Add rounds, `[rounds, M, size, n, K, ...]`; the mean over `size` is one observation."""
        logits = logits if logits.dtype == torch.float64 else logits.float()
        for members in logits.log_softmax(4):
            if self.count == 0:
                q = members.logsumexp((0, 1)) - math.log(members.shape[:2].numel())
                # A class that every member finds impossible adds 0, not 0 times infinity.
                self._log_q = q.clamp_min(math.log(torch.finfo(q.dtype).tiny))
                self._mean = torch.zeros(())
                self._squares = torch.zeros(())
            figures = self._figures(members.exp()).mean(1)
            self.count += 1
            change = figures - self._mean
            self._mean = self._mean + change / self.count
            self._squares = self._squares + change * (figures - self._mean)

    def _figures(self, probs: Tensor) -> Tensor:
        """`[M, size, n, K + 2, ...]`."""
        largest = math.log(probs.shape[3])
        total = -(probs * self._log_q).sum(3, keepdim=True) / largest
        aleatoric = torch.special.entr(probs).sum(3, keepdim=True) / largest
        return torch.cat([probs, total, total - aleatoric], dim=3)

    def half_width(self, look: int) -> Tensor:
        """Half-width of every input's worst figure, `[n]`; over pixels its root mean square."""
        L, M = self.count, len(self._squares)
        variances = self._squares / (L - 1)
        pooled = variances.sum(0)
        shares = variances / pooled
        degrees = ((L - 1) / (shares * shares).sum(0)).nan_to_num(1)
        # Rounding must not cost a degree of freedom; beyond that, fewer are the safe side.
        index = (degrees + 1e-3).long().clamp(1, _MOST_DEGREES) - 1
        quantiles = pooled.new_tensor(_students(1 - DELTA / (look * (look + 1))))
        worst = (quantiles[index] * (pooled / L).sqrt() / M).amax(1)
        return worst.flatten(1).square().mean(1).sqrt() if worst.ndim > 1 else worst

    def keep(self, rows: Tensor) -> None:
        """Go on with some of the inputs only."""
        self._log_q = self._log_q[rows]
        self._mean, self._squares = self._mean[:, rows], self._squares[:, rows]


@lru_cache(maxsize=64)
def _students(level: float) -> list[float]:
    return [student(level, degrees) for degrees in range(1, _MOST_DEGREES + 1)]


# An ABNN's own inputs


def predict_auto(
    bnn: ABNN,
    x: Inputs,
    modes: Sequence[int],
    plan: Plan,
    *,
    keep_members: bool = False,
    **options: Any,
) -> Prediction:
    """`ABNN.predict(samples="auto")`: inputs that need more draws run again without the others.

    Where an example's logits depend on the rest of the batch (noise of its own for every row, or a
    network whose draws can't share a batch, which may mix its examples), the whole batch runs
    again, and only the rows in need take from it.
    """
    if keep_members:
        raise ValueError(
            "keep_members=True needs as many members of every input, which samples='auto' does "
            "not give; pass a number of samples."
        )

    def run(rows: Tensor | None, draws: Sequence[Draw], size: int) -> Iterator[Tensor]:
        inputs = x
        if rows is not None and bnn.noise == "channel" and all_batched(x) and bnn.is_foldable(x):
            inputs, rows = take(x, rows), None
        sampler = bnn._sampler()
        at_once = sampler.plan(inputs, len(draws), plan).draws
        assert at_once is not None
        for rounds in chunks(draws, size * max(1, at_once // size)):
            logits = sampler.planned_logits(inputs, rounds, plan)
            yield logits if rows is None else logits[:, rows]

    return sample_until(run, modes, **options)
