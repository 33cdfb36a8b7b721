"""The original network, alone."""

from __future__ import annotations

from torch import Tensor, nn

from abnn.baselines.inference import inference
from abnn.outputs import Inputs, Output, call, logits_of
from abnn.prediction import Prediction


class Single(nn.Module):
    """One deterministic network: its softmax is the prediction, and nothing is epistemic.

    Args:
        net: the network; shared, not copied.
        output: finds the logits in what the network returns, where that is not obvious.
        class_dim: the dimension of the classes in the logits.

    >>> import torch
    >>> Single(nn.Identity()).predict(torch.zeros(1, 2)).probs
    tensor([[0.5000, 0.5000]])
    """

    def __init__(self, net: nn.Module, output: Output | None = None, class_dim: int = 1) -> None:
        super().__init__()
        self.net, self.output, self.class_dim = net, output, class_dim

    @property
    def num_added_parameters(self) -> int:
        """Parameters beyond the original network's: none."""
        return 0

    @property
    def num_added_bytes(self) -> int:
        """What has to be stored beyond the original network: nothing."""
        return 0

    @property
    def fit_seconds(self) -> float:
        """Time of training beyond that of the original network: none."""
        return 0.0

    def forward(self, x: Inputs) -> Tensor:
        """Log-probabilities, `[B, K, ...]`."""
        return self.predict(x).log_probs

    def predict(self, x: Inputs, keep_members: bool = False) -> Prediction:
        """The prediction of the one member."""
        with inference(self):
            logits = logits_of(call(self.net, x), self.output, self.class_dim)
            return Prediction.from_logits(logits.unsqueeze(0), keep_members)
