"""What a fit achieved on held-out data, against the original network, said plainly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from abnn.baselines import Single
from abnn.distributed import World
from abnn.evaluate import evaluate
from abnn.evaluation import Evaluation
from abnn.model import ABNN
from abnn.recipe import Recipe
from abnn.shares import is_share


@dataclass(frozen=True, eq=False)
class FitResult:
    """The outcome of `abnn.fit`; printed, it says what changed and whether it got worse.

    Args:
        recipe: what was used.
        losses: training loss of every step and mode, `[steps, M]`.
        seconds: time of the fit, interrupted parts included.
        original: the original network on the validation data, if there was any.
        whole: all modes together.
        modes: every mode alone.

    >>> import torch
    >>> before = Evaluation(n=100, accuracy=91.0, nll=0.37, brier=0.1, ece=5.0)
    >>> after = Evaluation(n=100, accuracy=91.0, nll=0.41, brier=0.1, ece=6.0)
    >>> print(FitResult(Recipe(), torch.zeros(9, 2), 1.5, before, after, (after, after)))
    9 steps of 2 modes in 1.5 s
                   NLL  accuracy %   ECE %
    original    0.3700       91.00    5.00
    mode 0      0.4100       91.00    6.00
    mode 1      0.4100       91.00    6.00
    all modes   0.4100       91.00    6.00
    WORSE than the original: NLL 0.3700 -> 0.4100, ECE 5.00 -> 6.00. Lower the learning rate or \
alpha; both are best chosen on validation NLL.
    """

    recipe: Recipe
    losses: Tensor
    seconds: float
    original: Evaluation | None = None
    whole: Evaluation | None = None
    modes: tuple[Evaluation | None, ...] = ()

    @property
    def worse(self) -> dict[str, tuple[float, float]]:
        """The validation figures that got worse: their values before and after."""
        if self.original is None or self.whole is None:
            return {}
        pairs = {
            "NLL": (self.original.nll, self.whole.nll),
            "accuracy": (self.original.accuracy, self.whole.accuracy),
            "ECE": (self.original.ece, self.whole.ece),
        }
        sign = {"NLL": 1, "accuracy": -1, "ECE": 1}
        return {k: (a, b) for k, (a, b) in pairs.items() if sign[k] * (b - a) > 0}

    @property
    def verdict(self) -> str:
        """One sentence: better, mixed or worse than the original, and what to do."""
        if self.original is None or self.whole is None:
            return "No validation data was given, so whether this is better is not known."
        changes = ", ".join(
            f"{name} {a:.4f} -> {b:.4f}" if name == "NLL" else f"{name} {a:.2f} -> {b:.2f}"
            for name, (a, b) in self.worse.items()
        )
        if not changes:
            return "Nothing is worse than the original."
        if "NLL" not in self.worse:
            return f"NLL is better than the original's; worse is: {changes}."
        return (
            f"WORSE than the original: {changes}. Lower the learning rate or alpha; both are best "
            "chosen on validation NLL."
        )

    def provenance(self) -> dict[str, Any]:
        """What a saved ABNN remembers of its fit, as plain values."""
        return {
            "recipe": self.recipe.to_dict(),
            "steps": len(self.losses),
            "seconds": round(self.seconds, 3),
            "validation": {
                name: {"n": e.n, "nll": e.nll, "accuracy": e.accuracy, "ece": e.ece}
                for name, e in self._rows()
            },
        }

    def _rows(self) -> list[tuple[str, Evaluation]]:
        named = [
            ("original", self.original),
            *((f"mode {i}", mode) for i, mode in enumerate(self.modes)),
            ("all modes", self.whole),
        ]
        return [(name, e) for name, e in named if e is not None]

    def __str__(self) -> str:
        """The table and the verdict."""
        steps, modes = self.losses.shape
        lines = [f"{_count(steps, 'step')} of {_count(modes, 'mode')} in {self.seconds:.1f} s"]
        if self._rows():
            lines.append(f"{'':9}  {'NLL':>7}  {'accuracy %':>10}  {'ECE %':>6}")
        lines += [
            f"{name:9}  {e.nll:7.4f}  {e.accuracy:10.2f}  {e.ece:6.2f}" for name, e in self._rows()
        ]
        return "\n".join((*lines, self.verdict))


def _count(n: int, thing: str) -> str:
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"


def validate_original(
    bnn: ABNN,
    loader: Iterable[Any] | None,
    ignore_index: int,
    progress: bool | None,
    everyone: World,
) -> Evaluation | None:
    """The original network on validation data."""
    if loader is None:
        return None

    def original() -> Evaluation:
        # The parts of a network that is spread over processes can't be had as a plain one.
        net = bnn.restore() if bnn.sharded is None else bnn
        single = Single(net, output=bnn.output, class_dim=bnn.class_dim)
        with bnn.disabled():
            return evaluate(
                single, loader, ignore_index=ignore_index, alone=True, progress=progress
            )

    return _divide([original], bnn, loader, everyone)[0]


def validate_all(
    bnn: ABNN,
    loader: Iterable[Any] | None,
    ignore_index: int,
    progress: bool | None,
    everyone: World,
) -> tuple[Evaluation | None, tuple[Evaluation | None, ...]]:
    """All modes together, and every mode alone, on validation data."""
    if loader is None:
        return None, (None,) * bnn.modes
    chosen = (None, *([mode] for mode in range(bnn.modes)))
    given = partial(evaluate, bnn, loader, ignore_index=ignore_index, progress=progress)
    one = partial(given, alone=True)  # as it is the evaluations that are divided, not the data
    whole, *modes = _divide([partial(one, modes=m) for m in chosen], bnn, loader, everyone)
    return whole, tuple(modes)


def _divide(
    tasks: Sequence[Callable[[], Evaluation]], bnn: ABNN, loader: Iterable[Any], everyone: World
) -> list[Evaluation]:
    """Evaluations that the processes divide among them, each on all the data."""

    def work() -> dict[int, Evaluation]:
        if everyone.size > 1 and is_share(loader):
            raise ValueError(
                "The validation loader has a DistributedSampler, but every process needs all the "
                "validation data; take the sampler away."
            )
        # A network in parts runs on all processes or on none. Else process 0 takes the first task,
        # which is the largest, and the others take the rest in turn.
        others = max(1, everyone.size - 1)
        everything = bnn.sharded is not None or everyone.size == 1
        mine = [
            i
            for i in range(len(tasks))
            if everything or everyone.rank == (1 + (i - 1) % others if i else 0)
        ]
        return {i: tasks[i]() for i in mine}

    done: dict[int, Evaluation] = {}
    for results in reversed(everyone.together(work)):
        done |= results
    return [done[i] for i in range(len(tasks))]
