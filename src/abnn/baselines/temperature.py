"""Temperature scaling (Guo et al., ICML 2017, arXiv:1706.04599)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn

from abnn.baselines.inference import inference
from abnn.batches import device_of, split, to_device
from abnn.outputs import Inputs, Output, call, logits_of
from abnn.prediction import Prediction


class TemperatureScaling(nn.Module):
    """One network whose logits are divided by a temperature fitted on held-out data.

        p(y | x) = softmax(net(x) / T)[y]

    The predicted classes stay the same. The network may itself be a predictor, whose
    log-probabilities are then scaled.

    Args:
        net: the network; shared, not copied.
        output: finds the logits in what the network returns, where that is not obvious.
        class_dim: the dimension of the classes in the logits.

    >>> logits = torch.tensor([[9.0, 0.0]]).repeat(4, 1)  # sure, and wrong once in four times
    >>> scaled = TemperatureScaling(nn.Identity()).fit([(logits, torch.tensor([0, 0, 0, 1]))])
    >>> scaled.predict(logits[:1]).probs
    tensor([[0.7500, 0.2500]])
    """

    temperature: Tensor

    def __init__(self, net: nn.Module, output: Output | None = None, class_dim: int = 1) -> None:
        super().__init__()
        self.net, self.output, self.class_dim = net, output, class_dim
        self.register_buffer("temperature", torch.tensor(1.0))

    @property
    def num_added_parameters(self) -> int:
        """Parameters beyond the original network's: the temperature, and what `net` has added."""
        return 1 + int(getattr(self.net, "num_added_parameters", 0))

    def forward(self, x: Inputs) -> Tensor:
        """Log-probabilities, `[B, K, ...]`."""
        return self.predict(x).log_probs

    def predict(self, x: Inputs, keep_members: bool = False) -> Prediction:
        """The prediction of the one member."""
        with inference(self):
            logits = self._logits(x) / self.temperature
            return Prediction.from_logits(logits.unsqueeze(0), keep_members)

    def fit(self, loader: Iterable[Any], ignore_index: int = -100) -> Self:
        """Set the temperature to the one of least NLL on held-out data, whose logits are kept.

        Args:
            loader: batches `(x, y)`, `(x1, x2, ..., y)` or mappings with "labels".
            ignore_index: the label of what is left out.
        """
        kept: list[tuple[Tensor, Tensor]] = []
        with inference(self):
            for batch in loader:
                inputs, labels = split(batch)
                logits = self._logits(to_device(inputs, device_of(self))).movedim(1, -1).cpu()
                if labels.shape != logits.shape[:-1]:
                    raise ValueError(
                        f"The labels have shape {list(labels.shape)}, but the network's "
                        f"predictions {list(logits.shape[:-1])}; give one label per prediction."
                    )
                keep = labels.cpu() != ignore_index
                kept.append((logits[keep], labels.cpu()[keep]))
        if sum(len(labels) for _, labels in kept) == 0:
            raise ValueError("The loader has no labelled examples to fit a temperature on.")
        logits, labels = (torch.cat(parts) for parts in zip(*kept, strict=True))
        self.temperature.fill_(best_temperature(logits, labels))
        return self

    def _logits(self, x: Inputs) -> Tensor:
        logits = logits_of(call(self.net, x), self.output, self.class_dim)
        return logits if logits.dtype == torch.float64 else logits.float()


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
    if labels.min() < 0 or labels.max() >= logits.shape[1]:
        raise ValueError(
            f"The labels run from {labels.min()} to {labels.max()}, but there are "
            f"{logits.shape[1]} classes; remap the labels, or leave some out by ignore_index."
        )
    if not logits.isfinite().all():
        raise ValueError("The logits contain NaN or infinity; check the network and its inputs.")
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
