"""Find the learning rate and alpha of a network that has no recipe, on validation data.

Successive halving (Jamieson and Talwalkar, 2016): many short fits, of which the best third is
fitted three times as long, until two have had all the steps of the recipe. What is compared is the
negative log-likelihood (NLL) of held-out labels; neither test nor out-of-distribution data is seen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from abnn.baselines import Single
from abnn.batches import device_of, length_of, split, to_device
from abnn.convert import convert
from abnn.distributed import world
from abnn.draws import generator, whole_number
from abnn.files import write
from abnn.fit import fit
from abnn.order import randomness_kept, seed_epoch
from abnn.progress import Progress
from abnn.recipe import Recipe
from abnn.rundir import SEARCH as SETTINGS
from abnn.rundir import SETTINGS as FIT
from abnn.rundir import check_settings, data_digest
from abnn.steps import check_labels, chosen_recipe, number_of_steps
from abnn.store import network_fingerprint
from abnn.table import aligned

ROWS, RECIPE, RESULT = "validation.safetensors", "recipe.toml", "tune.txt"
_ALPHA = 0.01  # the paper's, and that of `abnn.convert`


class Tried(NamedTuple):
    """A learning rate and an alpha, the steps of their fit, and the validation NLL after it.

    The NLL of a fit that diverged is infinite.
    """

    lr: float
    alpha: float
    steps: int
    nll: float


@dataclass(frozen=True)
class TuneResult:
    """What a search found; printed, it says what was tried, what is chosen, and why.

    Args:
        trials: every fit, the longest first, and the best of these first.
        recipe: the recipe with the learning rate and the alpha of the best.
        original: validation NLL of the original network.
        why: the choice, and how sure it is, in words.

    >>> tried = (Tried(0.05, 0.01, 90, 0.27), Tried(0.5, 0.01, 90, math.inf))
    >>> print(TuneResult(tried, Recipe(lr=0.05), 0.38, "That is better."))
      lr  alpha  steps       NLL
    0.05   0.01     90    0.2700
     0.5   0.01     90  diverged
    original network      0.3800
    That is better.
    """

    trials: tuple[Tried, ...]
    recipe: Recipe
    original: float
    why: str

    @property
    def better(self) -> bool:
        """Whether the best beats the original network on validation NLL."""
        return self.trials[0].nll < self.original

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the NLL of a fit that diverged is `None`."""
        trials = [t._asdict() | {"nll": t.nll if t.nll < math.inf else None} for t in self.trials]
        more = {"original": self.original, "better": self.better, "why": self.why}
        return {"recipe": self.recipe.to_dict(), "trials": trials} | more

    def __str__(self) -> str:
        rows = [[f"{t.lr:g}", f"{t.alpha:g}", str(t.steps), _number(t.nll)] for t in self.trials]
        table = aligned(["lr", "alpha", "steps", "NLL"], *rows)
        width = len(table.partition("\n")[0])
        name = "original network"
        return f"{table}\n{name}{self.original:{width - len(name)}.4f}\n{self.why}"


def tune(
    net: nn.Module,
    loader: Iterable[Any],
    validation: Iterable[Any],
    recipe: str | PathLike[str] | Recipe | None = None,
    *,
    run: str | PathLike[str],
    lr: tuple[float, float] = (1e-4, 0.1),
    alpha: tuple[float, float] = (3e-4, 0.1),
    trials: int = 9,
    samples: int = 8,
    ignore_index: int = -100,
    options: Mapping[str, Any] | None = None,
    progress: bool | None = None,
    **overrides: Any,
) -> TuneResult:
    """Find the learning rate and alpha with the best validation NLL, by fits of growing length.

    The first pair that is tried is the recipe's own, the others are spread evenly over the
    logarithms of both ranges, by the recipe's seed. Nine pairs cost four fits of full length.

    Args:
        net: a trained network; it is not changed.
        loader, validation: of training and of held-out batches, as of `abnn.fit`.
        recipe: all other hyper-parameters, as of `abnn.fit`; its epochs, or steps, are those of
            the longest fits.
        run: a directory that holds the search. The same call goes on with one that was killed. The
            chosen recipe is in `recipe.toml`.
        lr, alpha: the lowest and the highest value.
        trials: how many pairs are tried.
        samples: draws per mode of a prediction of validation data.
        ignore_index: label of examples or pixels that do not count.
        options: arguments of `abnn.convert`, such as `layers` and `output`.
        progress: show a line of progress; default: on a terminal.
        overrides: values of the recipe to replace, as `epochs=0.5`.

    >>> import tempfile
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    >>> loader = [(torch.randn(16, 4), torch.randint(3, (16,))) for _ in range(5)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = abnn.tune(net, loader, loader, run=folder, trials=3, steps=6)
    >>> [trial.steps for trial in found.trials]
    [6, 6, 2, 2, 2]
    """
    if world().size > 1:
        raise ValueError(
            "abnn.tune runs in one process; start it without torchrun, and give what it finds to "
            "abnn.fit under torchrun."
        )
    base = chosen_recipe(recipe, overrides)
    pairs = pairs_of(base, lr, alpha, trials)
    search = _Search(net, loader, validation, base, Path(run), samples, ignore_index, options or {})
    search.begin({"lr": lr, "alpha": alpha, "trials": trials})
    original = search.original()
    plan = rounds(len(pairs), number_of_steps(base, length_of(loader)))
    tried: list[Tried] = []
    with Progress(sum(count for count, _ in plan), "tune", progress) as bar:
        for count, steps in plan:
            now = []
            for pair in pairs[:count]:
                now.append(search.trial(*pair, steps))
                told = f"lr {pair[0]:g}, alpha {pair[1]:g}: NLL {_number(now[-1].nll)}"
                bar.update(len(tried) + len(now), told)
            now.sort(key=lambda t: t.nll)
            tried = [*now, *tried]
            pairs = [t[:2] for t in now if t.nll < math.inf]
            if not pairs:
                break
    if not tried[0].nll < math.inf:
        raise FloatingPointError(
            f"No fit of {tried[0].steps} steps has a finite validation NLL; search lower learning "
            f"rates than lr={tuple(lr)}, and check the inputs for NaN."
        )
    best = base.with_(lr=tried[0].lr, alpha=tried[0].alpha)
    result = TuneResult(tuple(tried), best, _nll(original), search.why(tried, original))
    best.save(search.run / RECIPE)
    write(search.run / RESULT, f"{result}\n".encode())
    return result


def rounds(trials: int, steps: int) -> list[tuple[int, int]]:
    """How many pairs there are in every round, and the steps of their fits.

    In each there is the best third of the round before, or two pairs, with three times the steps.

    >>> rounds(9, steps=180), rounds(2, steps=180)
    ([(9, 20), (3, 60), (2, 180)], [(2, 180)])
    """
    counts = [trials]
    while counts[-1] > 2:
        counts.append(max(2, counts[-1] // 3))
    lengths = [max(1, round(steps / 3 ** (len(counts) - 1 - i))) for i in range(len(counts))]
    # Of few steps, several rounds would have as many.
    return [
        (count, length)
        for count, length, before in zip(counts, lengths, [0, *lengths], strict=False)
        if length > before
    ]


def pairs_of(
    recipe: Recipe, lr: Sequence[float], alpha: Sequence[float], trials: int
) -> list[tuple[float, float]]:
    """The pairs to try: the recipe's own, and others of which every value has a part of its own.

    A Latin hypercube in the logarithms: each range is cut into as many parts as there are pairs.

    >>> pairs_of(Recipe(), (0.001, 0.1), (0.01, 0.01), trials=3)
    [(0.0057, 0.01), (0.0358, 0.01), (0.00606, 0.01)]
    """
    n = whole_number("trials", trials, least=1) - 1
    numbers, columns = generator("tune", recipe.seed), []
    for name, ends in (("lr", lr), ("alpha", alpha)):
        if len(ends) != 2 or not 0 < ends[0] <= ends[1] < math.inf:
            raise ValueError(
                f"{name}={tuple(ends)} must be the lowest and the highest value, above 0."
            )
        low, high = (math.log(end) for end in ends)
        places = (numbers.permutation(n) + numbers.random(n)) / max(1, n)
        columns.append([float(f"{math.exp(low + p * (high - low)):.3g}") for p in places])
    own = _ALPHA if recipe.alpha is None else recipe.alpha
    return [(recipe.lr, own), *zip(*columns, strict=True)]


@dataclass(frozen=True)
class _Search:
    """What all trials have in common."""

    net: nn.Module
    loader: Iterable[Any]
    validation: Iterable[Any]
    recipe: Recipe
    run: Path
    samples: int
    ignore_index: int
    options: Mapping[str, Any]

    def begin(self, ranges: Mapping[str, Any]) -> None:
        """Make the directory, or see that it holds this very search."""
        settings = {
            "recipe": self.recipe.to_dict(),
            "samples": self.samples,
            "options": repr(sorted(self.options)),
            "network": network_fingerprint(self.net)["values"],
            "validation": self._first_batch(),
            **{key: list(v) if isinstance(v, tuple) else v for key, v in ranges.items()},
        }
        if (self.run / FIT).exists():
            raise ValueError(
                f"{self.run} holds a training or a fit; give the search a directory of its own."
            )
        if not check_settings(self.run / SETTINGS, settings, "a search"):
            self.run.mkdir(parents=True, exist_ok=True)
            write(self.run / SETTINGS, (json.dumps(settings, indent=2) + "\n").encode())

    def original(self) -> Tensor:
        """The validation NLL of the original network; see `rows_of`."""
        given = {k: v for k, v in self.options.items() if k in ("output", "class_dim")}
        return self._kept(self.run / "original", lambda _: self._rows(Single(self.net, **given)))

    def trial(self, lr: float, alpha: float, steps: int) -> Tried:
        """Fit with so many steps, or see how that was before."""
        share = steps / number_of_steps(self.recipe, length_of(self.loader))
        recipe = self.recipe.with_(
            lr=lr,
            alpha=alpha,
            steps=steps,
            milestones=tuple(share * milestone for milestone in self.recipe.milestones),
        )
        rows = self._kept(self._folder(lr, alpha, steps), lambda run: self._fitted(recipe, run))
        return Tried(lr, alpha, steps, _nll(rows))

    def why(self, tried: Sequence[Tried], original: Tensor) -> str:
        """Why the best is chosen, and how sure that is."""
        best = tried[0]
        rows = self._read(best)
        pair = f"lr={best.lr:g} and alpha={best.alpha:g}"
        gain, noise = difference(original, rows)
        within = "" if abs(gain) > noise else ", which is within the noise"
        against = f"{best.nll:.4f} against {_nll(original):.4f} of the original network (a"
        against += f" difference of {gain:.4f} ± {noise:.4f}{within})"
        if gain > 0:
            text = f"Chosen: {pair}, with a validation NLL of {against}."
        else:
            text = (
                "Nothing that was tried beats the original network on validation NLL. The best is "
                f"{pair}, with {against}; keep the original, or search lower learning rates."
            )
        others = [t for t in tried[1:] if t.steps == best.steps and t.nll < math.inf]
        if not others:
            return f"{text} No other fit was as long."
        second = others[0]
        lead, noise = difference(self._read(second), rows)
        sure = "within the noise, so either will do" if lead <= noise else "more than the noise"
        return (
            f"{text} The runner-up, lr={second.lr:g} and alpha={second.alpha:g}, has "
            f"{second.nll:.4f}: {lead:.4f} ± {noise:.4f} more, {sure}."
        )

    def _fitted(self, recipe: Recipe, run: Path) -> Tensor:
        names = ("modes", "noise", "stats", "alpha")
        given = {name: getattr(recipe, name) for name in names if getattr(recipe, name) is not None}
        bnn = convert(self.net, **{**self.options, **given})
        try:
            fit(bnn, self.loader, recipe, run=run, ignore_index=self.ignore_index, progress=False)
        except FloatingPointError:
            return torch.tensor([[math.inf, 1.0]])
        return self._rows(bnn, samples=self.samples)

    def _rows(self, predictor: Any, **predict: Any) -> Tensor:
        """Of every example: the sum of -log p over its labels that count, and their number."""
        device, rows = device_of(predictor), []
        with randomness_kept(self.validation):
            # Examples in the same order every time, so that they can be compared one by one.
            seed_epoch(self.validation, self.recipe.seed, 0)
            for batch in self.validation:
                inputs, labels = split(batch)
                log_probs = predictor.predict(to_device(inputs, device), **predict).log_probs.cpu()
                check_labels(labels.cpu(), log_probs, self.ignore_index)
                losses = F.nll_loss(
                    log_probs, labels.cpu(), ignore_index=self.ignore_index, reduction="none"
                )
                counts = (labels.cpu() != self.ignore_index).reshape(len(labels), -1).sum(1)
                rows.append(torch.stack([losses.reshape(len(labels), -1).sum(1), counts], 1))
        whole = torch.cat(rows).double() if rows else torch.zeros(0, 2)
        if not whole[:, 1].sum() > 0:
            raise ValueError(
                "The validation loader gave no label that counts; give one of held-out data that "
                "can be iterated again and again."
            )
        return whole

    def _kept(self, folder: Path, make: Any) -> Tensor:
        """Rows that were written to a directory before, or that are made now."""
        file = folder / ROWS
        if not file.is_file():
            rows = make(folder)
            folder.mkdir(parents=True, exist_ok=True)
            write(file, safetensors.torch.save({"rows": rows.contiguous()}))
        return safetensors.torch.load(file.read_bytes())["rows"]

    def _read(self, tried: Tried) -> Tensor:
        folder = self._folder(tried.lr, tried.alpha, tried.steps)
        return safetensors.torch.load((folder / ROWS).read_bytes())["rows"]

    def _folder(self, lr: float, alpha: float, steps: int) -> Path:
        return self.run / f"steps-{steps}" / f"lr-{lr:g}-alpha-{alpha:g}"

    def _first_batch(self) -> str:
        with randomness_kept(self.validation):
            seed_epoch(self.validation, self.recipe.seed, 0)
            return data_digest(next(iter(self.validation), None))


def difference(a: Tensor, b: Tensor) -> tuple[float, float]:
    """How much more NLL one has than the other on the same examples, and the noise of that.

    Rows are sums of -log p and numbers of labels, one for every example. The noise is two standard
    errors of the difference of the means, over the examples; of a single one nothing is known.

    >>> a, b = torch.tensor([[1.0, 1.0], [3.0, 1.0]]), torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    >>> [round(number, 6) for number in difference(a, b)]
    [1.5, 1.0]
    """
    extra, counts = (a - b)[:, 0].double(), b[:, 1].double()
    mean = extra.sum() / counts.sum()
    n = int((counts > 0).sum())
    if n < 2:
        return mean.item(), math.inf
    error = (extra - mean * counts).norm() * math.sqrt(n / (n - 1)) / counts.sum()
    return mean.item(), 2 * error.item()


def _nll(rows: Tensor) -> float:
    nll = float(rows[:, 0].sum() / rows[:, 1].sum())
    return nll if math.isfinite(nll) else math.inf


def _number(nll: float) -> str:
    return f"{nll:.4f}" if nll < math.inf else "diverged"
