"""How many draws are enough: figures of the prediction over the number of draws."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from abnn.batches import device_of, length_of
from abnn.draws import all_draws, generator, whole_number
from abnn.metrics import ece
from abnn.plan import Plan
from abnn.prediction import Prediction, PredictionStream
from abnn.prefetch import batches
from abnn.progress import Progress
from abnn.table import aligned
from abnn.tally import terms_of

if TYPE_CHECKING:
    from abnn.model import ABNN

# How the figures are called in a table and how many digits they have there.
_HEADS = {
    "nll": ("nll", 4),
    "accuracy": ("accuracy %", 2),
    "ece": ("ECE %", 2),
    "epistemic": ("epistemic", 5),
    "difference": ("|p - p_max|", 5),
}


@dataclass(frozen=True)
class SamplesCurve:
    """What predictions are worth with 1, 2, 4, ... draws of every mode.

    Args:
        n: number of examples.
        modes: number of modes, M.
        orders: over how many random orders of the same draws each figure is a mean.
        tolerance: what `recommended` allows for.
        samples: draws of every mode.
        figures: the mean of each figure, one value for each of `samples`: "epistemic", the mean
            epistemic uncertainty; "difference", the largest difference of a class's probability to
            that of all draws, averaged over examples; and with labels "nll", "accuracy" and "ece".
        spread: their standard deviations over the orders. As all orders end with the same draws,
            it falls to 0 at the last.

    >>> figures = {"epistemic": [0.1, 0.2, 0.2], "difference": [0.03, 0.004, 0.0]}
    >>> curve = SamplesCurve(100, 4, 8, 0.01, [1, 2, 4], figures, figures)
    >>> print(curve)
    draws a mode  in all          epistemic        |p - p_max|
               1       4  0.10000 ± 0.10000  0.03000 ± 0.03000
               2       8  0.20000 ± 0.20000  0.00400 ± 0.00400
               4      16  0.20000 ± 0.20000  0.00000 ± 0.00000
    <BLANKLINE>
    2 draws of every mode (8 in all) are enough: more change no figure by more than 0.01.
    >>> SamplesCurve.from_json(curve.to_json()) == curve
    True
    """

    n: int
    modes: int
    orders: int
    tolerance: float
    samples: list[int]
    figures: dict[str, list[float]]
    spread: dict[str, list[float]]

    @property
    def recommended(self) -> int | None:
        """The fewest draws of every mode from which on no figure changes beyond the tolerance.

        These figures are the probabilities ("difference") and, with labels, the NLL, each as a
        mean over the orders plus one standard deviation. `None` if only all draws are enough:
        that they equal themselves says nothing.
        """
        best = None
        for i in reversed(range(len(self.samples) - 1)):
            if self._change(i) > self.tolerance:
                break
            best = self.samples[i]
        return best

    def _change(self, i: int) -> float:
        change = self.figures["difference"][i] + self.spread["difference"][i]
        if "nll" in self.figures:
            nll = self.figures["nll"]
            change = max(change, abs(nll[i] - nll[-1]) + self.spread["nll"][i])
        return change

    @property
    def advice(self) -> str:
        """The recommendation as a sentence."""
        L, most = self.recommended, self.samples[-1]
        if L is None:
            return (
                f"{most} draws of every mode may not be enough: the step to them still changes a "
                f"figure by more than {self.tolerance:g}. Try a larger max_samples."
            )
        return (
            f"{L} draw{'s' if L > 1 else ''} of every mode ({L * self.modes} in all) are enough: "
            f"more change no figure by more than {self.tolerance:g}."
        )

    def to_json(self) -> str:
        """The curve as a JSON object."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> SamplesCurve:
        """Read what `to_json` wrote."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise ValueError(
                "The text is not a SamplesCurve in JSON; give what SamplesCurve.to_json wrote."
            ) from error

    def to_table(self) -> str:
        """One row for each number of draws: mean ± standard deviation over the orders."""
        names = [name for name in _HEADS if name in self.figures]
        rows = [
            [
                str(L),
                str(L * self.modes),
                *(
                    f"{self.figures[name][i]:.{_HEADS[name][1]}f}"
                    f" ± {self.spread[name][i]:.{_HEADS[name][1]}f}"
                    for name in names
                ),
            ]
            for i, L in enumerate(self.samples)
        ]
        return aligned(["draws a mode", "in all", *(_HEADS[name][0] for name in names)], *rows)

    def __str__(self) -> str:
        """The table and the recommendation."""
        return f"{self.to_table()}\n\n{self.advice}"

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the figures over the number of draws to a file, as "curve.png"; needs matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("Plots need matplotlib: pip install 'abnn[plot]'.") from error
        names = [name for name in _HEADS if name in self.figures]
        picture = Figure(figsize=(3.2 * len(names), 3), layout="constrained")
        panels = picture.subplots(1, len(names), squeeze=False)[0]
        for panel, name in zip(panels, names, strict=True):
            panel.errorbar(
                self.samples, self.figures[name], self.spread[name], marker="o", capsize=3
            )
            panel.set_xscale("log", base=2)
            panel.set_xticks(self.samples, [str(L) for L in self.samples])
            panel.set_xlabel("draws of every mode")
            panel.set_title(_HEADS[name][0])
            if self.recommended is not None:
                panel.axvline(self.recommended, color="grey", linestyle=":")
        picture.savefig(path)


def samples_curve(
    bnn: ABNN,
    loader: Iterable[Any],
    max_samples: int = 32,
    *,
    orders: int = 8,
    seed: int = 0,
    tolerance: float = 0.01,
    ignore_index: int = -100,
    plan: Plan | None = None,
    progress: bool | None = None,
) -> SamplesCurve:
    """Measure what 1, 2, 4, ..., `max_samples` draws of every mode are worth on a data set.

    Of an ABNN it is a method: `print(bnn.samples_curve(val_loader))`. Every draw runs once. The
    first order is that of `predict`, so a row of it is what `predict(samples=L)` gives; the others
    are random, and their spread is the Monte-Carlo noise. One batch's draws are held at a time.

    Args:
        bnn: the ABNN.
        loader: batches as for `evaluate`; without labels there is no NLL, accuracy and ECE.
        max_samples: most draws of every mode.
        orders: number of orders of the draws.
        seed: of the draws and of the orders.
        tolerance: see `SamplesCurve.recommended`.
        ignore_index, progress: as of `evaluate`.
        plan: as of `predict`.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    >>> data = [(torch.randn(16, 4), torch.randint(3, (16,)))]
    >>> curve = abnn.convert(net, modes=2).samples_curve(data, max_samples=8)
    >>> curve.samples, curve.recommended
    ([1, 2, 4, 8], 1)
    """
    most = whole_number("max_samples", max_samples, least=2)
    R, seed = whole_number("orders", orders, least=1), whole_number("seed", seed)
    counts = [2**i for i in range(most.bit_length()) if 2**i < most] + [most]
    draws, permutations = all_draws(range(bnn.modes), most, seed), _orders(bnn.modes, most, R, seed)
    # Of every order, number of draws and figure: the values of all examples.
    values: dict[tuple[int, int, str], list[Tensor]] = defaultdict(list)
    total = length_of(loader)
    n, done, labelled = 0, 0, None
    with (
        Progress(total, "samples curve", progress) as bar,
        closing(batches(loader, device_of(bnn))) as feed,
    ):
        for done, batch in enumerate(feed, start=1):
            if labelled not in (None, batch.labels is not None):
                raise ValueError(f"Batch {done} has labels and others have none; give one kind.")
            labelled = batch.labels is not None
            with torch.no_grad(), bnn._evaluating():
                logits = bnn._sampler().planned_logits(batch.inputs, draws, plan or Plan())
            whole = Prediction.from_logits(logits)
            if whole.log_probs.isnan().any():
                raise ValueError(f"The predictions on batch {done} contain NaN; check its inputs.")
            for r, order in enumerate(permutations):
                for L, part in _growing(logits, order, counts):
                    terms = {
                        "epistemic": part.epistemic,
                        "difference": (part.probs - whole.probs).abs().amax(1),
                    }
                    if batch.labels is not None:
                        labels = batch.labels.to(part.log_probs.device)
                        terms |= terms_of(part, labels, labels != ignore_index)
                    for name, value in terms.items():
                        values[r, L, name].append(value.flatten().cpu())
            n += batch.rows
            bar.update(done, f"{n} inputs")
    if done == 0:
        raise ValueError("The loader is empty; give at least one batch.")
    return _summary(values, n, bnn.modes, R, tolerance, counts)


def _orders(modes: int, most: int, R: int, seed: int) -> list[Tensor]:
    """Orders of the draws of every mode, `[M, L]` indices into all draws; the first is as it is."""
    first = torch.arange(modes * most).view(modes, most)
    shuffled = (generator("data", seed, r).permuted(first.numpy(), axis=1) for r in range(1, R))
    return [first, *map(torch.from_numpy, shuffled)]


def _growing(logits: Tensor, order: Tensor, counts: list[int]) -> Iterator[tuple[int, Prediction]]:
    """The prediction from the first draws of every mode, for each number of them, as a stream."""
    stream, before = PredictionStream(), 0
    for L in counts:
        stream.update(logits[order[:, before:L].flatten().to(logits.device)])
        before = L
        yield L, stream.result()


def _summary(
    values: dict[tuple[int, int, str], list[Tensor]],
    n: int,
    modes: int,
    R: int,
    tolerance: float,
    counts: list[int],
) -> SamplesCurve:
    figures: dict[str, list[float]] = defaultdict(list)
    spread: dict[str, list[float]] = defaultdict(list)
    for L in counts:
        rows = []
        for r in range(R):
            here = {name: v for (s, k, name), v in values.items() if (s, k) == (r, L)}
            terms = {name: torch.cat(v).double() for name, v in here.items()}
            row = {name: terms[name].mean().item() for name in ("epistemic", "difference")}
            if "correct" in terms:
                if not terms["correct"].numel():
                    raise ValueError("Every label is ignore_index; give labelled data, or none.")
                row["nll"] = -terms["log_likelihood"].mean().item()
                row["accuracy"] = 100 * terms["correct"].mean().item()
                row["ece"] = 100 * ece(terms["confidence"], terms["correct"].bool())
            rows.append(row)
        for name in rows[0]:
            column = torch.tensor([row[name] for row in rows], dtype=torch.float64)
            figures[name].append(column.mean().item())
            spread[name].append(column.std(correction=1).item() if R > 1 else 0.0)
    return SamplesCurve(n, modes, R, tolerance, counts, dict(figures), dict(spread))
