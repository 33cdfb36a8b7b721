"""Deep ensembles (Lakshminarayanan et al., NeurIPS 2017, arXiv:1612.01474)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from abnn.baselines.inference import inference
from abnn.outputs import Inputs, Output, call, logits_of
from abnn.prediction import Prediction, PredictionStream


class DeepEnsemble(nn.Module):
    """M networks trained from different seeds, whose probabilities are averaged.

        p(y | x) = 1/M sum_m softmax(net_m(x))[y]

    Args:
        nets: the networks; shared, not copied.
        output: finds the logits in what a network returns, where that is not obvious.
        class_dim: the dimension of the classes in the logits.
        fit_seconds: how long the training of all but the first took, if that is to be told.

    >>> import torch
    >>> ensemble = DeepEnsemble([nn.Linear(3, 2), nn.Linear(3, 2)])
    >>> ensemble.predict(torch.zeros(5, 3)).samples_used
    2
    >>> ensemble.num_added_parameters
    8
    """

    def __init__(
        self,
        nets: Iterable[nn.Module],
        output: Output | None = None,
        class_dim: int = 1,
        fit_seconds: float | None = None,
    ) -> None:
        super().__init__()
        self.fit_seconds = fit_seconds
        self.nets, self.output, self.class_dim = nn.ModuleList(nets), output, class_dim
        if len(self.nets) == 0:
            raise ValueError("The ensemble has no networks; give at least one.")
        if len(set(self.nets)) < len(self.nets):
            raise ValueError(
                "The ensemble has the same network twice, which adds nothing; "
                "give networks that were trained separately."
            )

    @property
    def num_added_parameters(self) -> int:
        """Parameters beyond those of the first network."""
        return _size(self) - _size(self.nets[0])

    @property
    def num_added_bytes(self) -> int:
        """What has to be stored beyond the first network."""
        return sum(_bytes(net) for net in self.nets) - _bytes(self.nets[0])

    def forward(self, x: Inputs) -> Tensor:
        """Log of the mean probabilities, `[B, K, ...]`."""
        return self.predict(x).log_probs

    def predict(self, x: Inputs, keep_members: bool = False) -> Prediction:
        """The prediction of all networks, run one after another."""
        stream = PredictionStream(keep_members)
        shapes = set()
        with inference(self):
            for net in self.nets:
                logits = logits_of(call(net, x), self.output, self.class_dim)
                shapes.add(tuple(logits.shape))
                if len(shapes) > 1:
                    raise ValueError(
                        "The networks' logits differ in shape "
                        f"({' and '.join(map(str, sorted(shapes)))}); "
                        "give networks for the same classes."
                    )
                stream.update(logits.unsqueeze(0))
        return stream.result()


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
