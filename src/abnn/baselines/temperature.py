"""Temperature scaling (Guo et al., ICML 2017, arXiv:1706.04599)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from abnn.baselines.companion import ask, held_out, total_seconds
from abnn.baselines.method import Method
from abnn.batches import device_of
from abnn.inference import inference
from abnn.outputs import Inputs, Output
from abnn.prediction import Prediction

if TYPE_CHECKING:
    from abnn.evaluate import Predictor


class TemperatureScaling(Method):
    """A network or a predictor, with a temperature fitted on held-out data.

        p(y | x) = softmax(net(x) / T)[y]        of a network,
        p(y | x) = softmax(log q(. | x) / T)[y]  of a predictor with mean probabilities q.

    For one member the two are the same. The order of the classes of an input stays, and with it the
    label; with more than two classes, the order of inputs by their confidence may not.

    Args:
        net: the network; or anything with `predict(x) -> Prediction`, such as an ABNN, an ensemble
            or another baseline, of which `tempered` says what becomes. Shared, not copied.
        output: finds the logits in what a network returns, where that is not obvious.
        class_dim: the dimension of the classes in a network's logits; a predictor's is always 1.

    >>> logits = torch.tensor([[9.0, 0.0]]).repeat(4, 1)  # sure, and wrong once in four times
    >>> scaled = TemperatureScaling(nn.Identity()).fit([(logits, torch.tensor([0, 0, 0, 1]))])
    >>> scaled.predict(logits[:1]).probs
    tensor([[0.7500, 0.2500]])
    >>> bnn = abnn.convert(nn.Sequential(nn.LayerNorm(2)), modes=2)
    >>> scaled = TemperatureScaling(bnn).fit([(logits, torch.tensor([0, 0, 0, 1]))], samples=4)
    >>> scaled.predict(logits[:1], samples=4).samples_used
    8
    """

    shared = "net"
    temperature: Tensor

    def __init__(
        self, net: nn.Module | Predictor, output: Output | None = None, class_dim: int = 1
    ) -> None:
        super().__init__(net, output, class_dim)
        self._seconds = None
        if output is not None and hasattr(net, "predict"):
            raise ValueError(
                f"output= finds the logits of a plain network, but a {type(net).__name__} has "
                "predict(x); leave output= out, or wrap a plain network as "
                "abnn.baselines.Single(net, output)."
            )
        self.net = net
        self.register_buffer("temperature", torch.tensor(1.0))

    @property
    def num_added_parameters(self) -> int:
        """Parameters beyond the original network's: the temperature, and what `net` has added."""
        return 1 + int(getattr(self.net, "num_added_parameters", 0))

    @property
    def num_added_bytes(self) -> int:
        """What has to be stored beyond the original network."""
        return self.temperature.nbytes + int(getattr(self.net, "num_added_bytes", 0))

    def predict(self, x: Inputs, keep_members: bool = False, **predict: Any) -> Prediction:
        """The prediction of the one network, or what `tempered` makes of a predictor's.

        Args:
            x: a tensor, a tuple of arguments, or a mapping of keyword arguments.
            keep_members: keep the members' probabilities.
            predict: passed on to the predictor, such as `samples=8, seed=0`.
        """
        if keep_members and self._predicts:
            predict["keep_members"] = True
        with inference(self):
            if self._predicts:
                return tempered(ask(self.net, x, predict), self.temperature)
            logits = self._logits(x, predict) / self.temperature
            return Prediction.from_logits(logits.unsqueeze(0), keep_members)

    @property
    def fit_seconds(self) -> float | None:
        """How long the fits took, that of the predictor with them; `None` if that is not known."""
        return total_seconds(self._seconds, self.net)

    @fit_seconds.setter
    def fit_seconds(self, seconds: float | None) -> None:
        self._seconds = seconds

    def fit(self, loader: Iterable[Any], ignore_index: int = -100, **predict: Any) -> Self:
        """Set the temperature to the one of least NLL on held-out data, whose logits are kept.

        Args:
            loader: batches `(x, y)`, `(x1, x2, ..., y)` or mappings with "labels".
            ignore_index: the label of what is left out.
            predict: passed on to the predictor; give what `predict` will be given.
        """
        started = time.perf_counter()
        with inference(self):
            kept = list(
                held_out(loader, lambda x: self._logits(x, predict), device_of(self), ignore_index)
            )
        logits, labels = (torch.cat(parts) for parts in zip(*kept, strict=True))
        self.temperature.fill_(best_temperature(logits, labels))
        self._seconds = time.perf_counter() - started
        return self

    @property
    def _predicts(self) -> bool:
        return hasattr(self.net, "predict")

    def _logits(self, x: Inputs, predict: dict[str, Any]) -> Tensor:
        """The network's logits, or the predictor's log-probabilities."""
        if self._predicts:
            return ask(self.net, x, predict).log_probs
        if predict:
            raise TypeError(
                f"A {type(self.net).__name__} has no predict(x) to take {', '.join(predict)}; "
                "leave that out, or give a predictor."
            )
        assert isinstance(self.net, nn.Module)
        logits = self.network_logits(x)
        return logits if logits.dtype == torch.float64 else logits.float()


def tempered(prediction: Prediction, temperature: Tensor | float) -> Prediction:
    """The prediction with mean probabilities `p^(1/T)`, normalised; T=1 changes nothing.

    The total uncertainty is the entropy of the new probabilities, and is split into aleatoric and
    epistemic in the proportion that it had, so both stay non-negative and add up. What speaks of
    single members is left as it was, as no member has a temperature: the members, their
    `variation_ratio`, `max_logit` and `energy`; and so are `sets`.

    >>> before = Prediction.from_logits(torch.tensor([[[4.0, 0.0]], [[1.0, 0.0]]]))
    >>> after = tempered(before, 2.0)
    >>> before.probs, after.probs
    (tensor([[0.8565, 0.1435]]), tensor([[0.7096, 0.2904]]))
    >>> before.epistemic / before.total, after.epistemic / after.total
    (tensor([0.1825]), tensor([0.1825]))
    """
    scaled = replace(prediction, log_probs=(prediction.log_probs / temperature).log_softmax(1))
    # Where nothing is uncertain, no part of it is epistemic.
    share = (prediction.aleatoric / prediction.total).nan_to_num(1.0).clamp(0, 1)
    return replace(scaled, aleatoric=share * scaled.total)


def best_temperature(logits: Tensor, labels: Tensor) -> float:
    """The T that minimises the NLL of `softmax(logits / T)`, to float64 precision.

    The NLL is convex in `b = 1/T`, with slope `mean(E_p[z] - z[y])` and curvature
    `mean(Var_p[z])`, where z are the logits, p the scaled probabilities. Newton's method,
    with bisection where it would leave the bracket, finds where the slope is zero.

    Args:
        logits: one row for each example, `[N, K]`.
        labels: class indices, `[N]`.

    >>> z = torch.tensor([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [4.0, 0.0]])
    >>> round(best_temperature(z, torch.tensor([0, 0, 0, 1])), 6)  # 4 / log 3
    3.640957
    """
    if not logits.isfinite().all():
        raise ValueError(
            "The logits contain NaN or infinity (the logarithm of a probability of 0 is minus "
            "infinity); check the network and its inputs."
        )
    # Measured from the label's logit, which changes no probability.
    gap = logits.double() - logits.double().gather(1, labels.unsqueeze(1))
    if gap.mean() >= 0:
        raise ValueError(
            "The logits are no better than chance on the held-out data, so no temperature is the "
            "best; check that its labels match the network's classes."
        )
    if gap.amax(1).sum() == 0:
        raise ValueError(
            "Every held-out example is classified correctly, so no temperature is the best "
            "(the NLL falls for ever as T goes to 0); fit on more or harder data."
        )

    def slope_and_curvature(b: float) -> tuple[float, float]:
        slope = curvature = 0.0
        for rows in torch.split(gap, 4096):  # never a second copy of all logits
            p = (b * rows).softmax(1)
            mean = (p * rows).sum(1, keepdim=True)
            slope += mean.sum().item()
            curvature += (p * (rows - mean).square()).sum().item()
        return slope / len(gap), curvature / len(gap)

    low, high = 0.0, 1 / gap.abs().max().item()
    while slope_and_curvature(high)[0] < 0:
        low, high = high, 2 * high
    b = high
    for _ in range(100):
        slope, curvature = slope_and_curvature(b)
        low, high = (b, high) if slope < 0 else (low, b)
        following = b - slope / curvature if curvature > 0 else -1.0
        if not low <= following <= high:
            following = (low + high) / 2
        if abs(following - b) <= 1e-12 * b:
            break
        b = following
    return 1 / b
