"""Split-conformal prediction sets (Vovk et al. 2005; Angelopoulos & Bates, arXiv:2107.07511)."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

import torch
from torch import Tensor, nn

from abnn.baselines.companion import ask, held_out, total_seconds
from abnn.baselines.method import Method
from abnn.batches import device_of
from abnn.inference import inference
from abnn.outputs import Inputs
from abnn.prediction import Prediction

if TYPE_CHECKING:
    from abnn.evaluate import Predictor

Score = Literal["lac", "aps"]


class Conformal(Method):
    """A predictor whose sets of classes hold the label with a chosen probability.

        set(x) = {k : u(x, k) <= q},   q = the ceil((n + 1) coverage)-th smallest of u(x_i, y_i)

    over n calibration examples. If these and a new one are exchangeable, its label is in its set
    with a probability of at least `coverage`, however good or bad the predictor is; it holds on
    average over inputs and labels, and over each class alone with `per_class`. Pixels of one image
    are not exchangeable, so a guarantee for pixels is a rough one.

    Args:
        predictor: anything with `predict(x) -> Prediction`; shared, not copied.
        coverage: the probability with which the label is to be in the set.
        per_class: a `q` for each class, from the examples of that class.
        score: "lac", `u = 1 - p(k)`, has the smallest sets, and empty ones where no class is likely
            enough (Sadinle et al., JASA 2019, arXiv:1609.00451); "aps", the probability of all
            classes at least as likely as k, has larger sets where an input is harder (Romano et
            al., NeurIPS 2020, arXiv:2006.02544; without randomisation). With "aps" the most likely
            class is always in the set: else the surest predictions would have empty ones.

    >>> x = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.3, 0.7]]).log()
    >>> single = abnn.baselines.Single(nn.Identity())
    >>> conformal = Conformal(single, coverage=0.6).fit([(x, torch.tensor([0, 0, 0, 0]))])
    >>> conformal.predict(x).sets  # p >= 0.6, the third largest of four
    tensor([[ True, False],
            [ True, False],
            [ True, False],
            [False,  True]])
    """

    shared = "predictor"
    threshold: Tensor

    def __init__(
        self,
        predictor: Predictor,
        coverage: float = 0.9,
        per_class: bool = False,
        score: Score = "lac",
    ) -> None:
        if not hasattr(predictor, "predict"):
            raise TypeError(
                f"A {type(predictor).__name__} has no predict(x); give an ABNN, or wrap a plain "
                "network as abnn.baselines.Single(net)."
            )
        super().__init__(predictor)
        self._seconds = None
        if not 0 < coverage < 1:
            raise ValueError(f"coverage={coverage} must lie between 0 and 1, such as 0.9.")
        if score not in get_args(Score):
            raise ValueError(f"score={score!r} must be 'lac' or 'aps'.")
        self.predictor, self.coverage = predictor, float(coverage)
        self.per_class, self.score = per_class, score
        # One number, or one for each class; none before it is fitted.
        self.register_buffer("threshold", torch.empty(0))

    @property
    def num_added_parameters(self) -> int:
        """Parameters beyond the original network's: thresholds, and what `predictor` has added."""
        return self.threshold.numel() + int(getattr(self.predictor, "num_added_parameters", 0))

    @property
    def num_added_bytes(self) -> int:
        """What has to be stored beyond the original network."""
        return self.threshold.nbytes + int(getattr(self.predictor, "num_added_bytes", 0))

    def predict(self, x: Inputs, keep_members: bool = False, **predict: Any) -> Prediction:
        """The predictor's own prediction, with `sets`.

        Args:
            x: a tensor, a tuple of arguments, or a mapping of keyword arguments.
            keep_members: keep the members' probabilities.
            predict: passed on to the predictor, such as `samples=8, seed=0`.
        """
        if keep_members:
            predict["keep_members"] = True
        with inference(self):
            prediction = ask(self.predictor, x, predict)
            return replace(prediction, sets=self.sets(prediction.log_probs))

    def sets(self, log_probs: Tensor) -> Tensor:
        """The sets of predictions that were made already, such as stored ones, `[B, K, ...]`.

        >>> x, y = torch.tensor([[2.0, 1.0, 0.0]]).repeat(5, 1), torch.tensor([0, 0, 0, 1, 1])
        >>> conformal = Conformal(abnn.baselines.Single(nn.Identity()), 0.8).fit([(x, y)])
        >>> conformal.sets(x[:1].log_softmax(1))
        tensor([[ True,  True, False]])
        """
        if self.threshold.numel() == 0:
            raise RuntimeError(
                "The conformal predictor has no threshold yet; call fit(loader) with held-out data."
            )
        if len(self.threshold) not in (1, log_probs.shape[1]):
            raise ValueError(
                f"There are thresholds for {len(self.threshold)} classes, but predictions of "
                f"{log_probs.shape[1]}; fit again on predictions of the same classes."
            )
        threshold = self.threshold.to(log_probs.device).reshape(-1, *[1] * (log_probs.ndim - 2))
        # Not "<=": of a prediction that is NaN nothing is known, so every class is in the set.
        sets = ~(class_scores(log_probs, self.score) > threshold)
        return sets | (log_probs == log_probs.amax(1, True)) if self.score == "aps" else sets

    @property
    def fit_seconds(self) -> float | None:
        """How long the fits took, that of the predictor with them; `None` if that is not known."""
        return total_seconds(self._seconds, self.predictor)

    @fit_seconds.setter
    def fit_seconds(self, seconds: float | None) -> None:
        self._seconds = seconds

    def fit(self, loader: Iterable[Any], ignore_index: int = -100, **predict: Any) -> Self:
        """Find the threshold on calibration data, which nothing else was fitted on.

        A class with too few examples (or, without `per_class`, all classes) is in every set, and a
        warning says so.

        Args:
            loader: batches `(x, y)`, `(x1, x2, ..., y)` or mappings with "labels".
            ignore_index: the label of what is left out.
            predict: passed on to the predictor; give what `predict` will be given.
        """
        started = time.perf_counter()
        scores, labels, K = [], [], 0
        with inference(self):
            for log_probs, y in held_out(
                loader,
                lambda x: ask(self.predictor, x, predict).log_probs,
                device_of(self),
                ignore_index,
            ):
                all_classes = class_scores(log_probs, self.score)
                scores.append(all_classes.gather(1, y.unsqueeze(1)).squeeze(1))
                labels.append(y)
                K = log_probs.shape[1]
        u, y = torch.cat(scores), torch.cat(labels)
        groups = [u[y == k] for k in range(K)] if self.per_class else [u]
        self._warn_of_few([len(group) for group in groups])
        found = [conformal_quantile(group, self.coverage) for group in groups]
        self.threshold = torch.stack(found).to(self.threshold.device)
        self._seconds = time.perf_counter() - started
        return self

    def _warn_of_few(self, counts: list[int]) -> None:
        needed = examples_needed(self.coverage)
        few = [k for k, count in enumerate(counts) if count < needed]
        if not few:
            return
        if self.per_class:
            names = ", ".join(map(str, few[:10])) + (f" and {len(few) - 10} more" * (len(few) > 10))
            what = f"Too few examples of the classes {names}, which are"
            each = " of each class"
        else:
            what, each = f"The {counts[0]} examples are too few, so every class is", ""
        warnings.warn(
            f"{what} in every set now: a coverage of {self.coverage:g} needs at least {needed} "
            f"examples{each}. Give more data, or a lower coverage.",
            stacklevel=3,  # the caller of fit
        )

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        saved = state_dict.get(f"{prefix}threshold")
        if saved is not None:  # how many thresholds there are is known only once it is fitted
            self.threshold = torch.empty_like(saved, device=self.threshold.device)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def class_scores(log_probs: Tensor, score: Score) -> Tensor:
    """How badly each class would fit the prediction, `[B, K, ...]`, as `-log(1 - u)`.

    With "lac" it is `u = 1 - p(k)`; with "aps" u is the probability of all classes that are at
    least as likely as k, so classes of one probability share a score. The logarithm changes no
    order, and keeps apart what rounding would make u = 1.

    >>> log_probs = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    >>> 1 - (-class_scores(log_probs, "lac")).exp()
    tensor([[0.5000, 0.7500, 0.8750, 0.8750]])
    >>> 1 - (-class_scores(log_probs, "aps")).exp()
    tensor([[0.5000, 0.7500, 1.0000, 1.0000]])
    """
    if score == "lac":
        return -log_probs
    rows = log_probs.movedim(1, -1).contiguous()
    rising = rows.sort(-1).values
    below = nn.functional.pad(rising.logcumsumexp(-1), (1, 0), value=-math.inf)
    less_likely = torch.searchsorted(rising, rows)  # how many classes, in the order of `rising`
    return -below.gather(-1, less_likely).movedim(-1, 1)


def conformal_quantile(scores: Tensor, coverage: float) -> Tensor:
    """The `ceil((n + 1) coverage)`-th smallest of n scores; infinity where there are too few.

    >>> scores = torch.tensor([0.4, 0.1, 0.3, 0.2])
    >>> conformal_quantile(scores, 0.6), conformal_quantile(scores, 0.9)
    (tensor(0.3000), tensor(inf))
    """
    # As a fraction, since 100 * 0.07 is more than 7 in floating point.
    rank = math.ceil((len(scores) + 1) * Fraction(str(float(coverage))))
    if rank > len(scores):
        return scores.new_tensor(math.inf)
    return scores.sort().values[rank - 1]


def examples_needed(coverage: float) -> int:
    """The least number of calibration examples for which the quantile is finite.

    >>> examples_needed(0.9), examples_needed(0.99)
    (9, 99)
    """
    share = Fraction(str(float(coverage)))
    return math.ceil(share / (1 - share))
