"""Deep ensembles (Lakshminarayanan et al., NeurIPS 2017, arXiv:1612.01474)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Self

from torch import Tensor, nn

from abnn.baselines.method import Method, several
from abnn.outputs import Inputs, Output, call, logits_of
from abnn.store import ArtifactError, structure_of
from abnn.surgery import check_network, copied


class DeepEnsemble(Method):
    """M networks trained from different seeds, whose probabilities are averaged.

        p(y | x) = 1/M sum_m softmax(net_m(x))[y]

    Each is trained by itself, as by `abnn.train(net, loader, seed=m)`.

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
        nets = several("networks", nets)
        if len(nets) == 0:
            raise ValueError("The ensemble has no networks; give at least one.")
        for net in nets:
            check_network(net)
        if len(set(nets)) < len(nets):
            raise ValueError(
                "The ensemble has the same network twice, which adds nothing; "
                "give networks that were trained separately."
            )
        super().__init__(nets[0], output, class_dim)
        self.nets, self.fit_seconds = nn.ModuleList(nets), fit_seconds

    def member_logits(self, x: Inputs) -> Iterator[Tensor]:
        """The logits of the networks, run one after another, `[1, B, K, ...]` each."""
        shapes = set()
        for net in self.nets:
            logits = logits_of(call(net, x), self.output, self.class_dim)
            shapes.add(tuple(logits.shape))
            if len(shapes) > 1:
                raise ValueError(
                    "The networks' logits differ in shape "
                    f"({' and '.join(map(str, sorted(shapes)))}); "
                    "give networks for the same classes."
                )
            yield logits.unsqueeze(0)

    @property
    def arguments(self) -> dict[str, Any]:
        """How many networks there are, and where their classes are."""
        kinds = {structure_of(net) for net in self.nets}
        if len(kinds) > 1:
            raise ArtifactError(
                "The networks of the ensemble are of different kinds, and it is loaded from one; "
                "save each network by itself."
            )
        return {"members": len(self.nets), "class_dim": self.class_dim}

    @classmethod
    def rebuild(cls, net: Any, output: Output | None, arguments: dict[str, Any]) -> Self:
        """As many copies of the one network."""
        nets = [copied(net) for _ in range(arguments["members"])]
        return cls(nets, output, arguments["class_dim"])
