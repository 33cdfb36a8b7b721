"""MultiSWAG (Wilson & Izmailov, NeurIPS 2020, arXiv:2002.08791)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Self

from torch import Tensor, nn

from abnn.baselines.method import Method, several
from abnn.baselines.swag import SWAG
from abnn.outputs import Inputs, Output
from abnn.store import ArtifactError


class MultiSWAG(Method):
    """Several SWAGs, trained from different seeds: an equal mixture of their Gaussians.

        p(y | x) = 1/M sum_m 1/S sum_s softmax(net(x; w_ms))[y],   w_ms ~ SWAG_m

    Each is trained by itself, as by `abnn.train(swag, loader, seed=m)`.

    Args:
        swags: the SWAGs, with as many members each; shared, not copied.
        fit_seconds: how long their training took; default: what they say of it together.

    >>> from abnn.baselines.swag import SWAG
    >>> loader = [(torch.randn(16, 4), torch.randint(3, (16,))) for _ in range(5)]
    >>> swags = [SWAG(nn.Linear(4, 3), members=4) for _ in range(2)]
    >>> for m, swag in enumerate(swags):
    ...     result = abnn.train(swag, loader, epochs=1, seed=m)
    >>> MultiSWAG(swags).predict(torch.zeros(5, 4)).samples_used
    8
    """

    def __init__(self, swags: Iterable[SWAG], fit_seconds: float | None = None) -> None:
        swags = several("SWAGs", swags)
        if len(swags) == 0:
            raise ValueError("The MultiSWAG has no SWAGs; give at least one.")
        for swag in swags:
            if not isinstance(swag, SWAG):
                raise TypeError(f"MultiSWAG mixes SWAGs, not a {type(swag).__name__}; wrap it.")
        if len(set(swags)) < len(swags):
            raise ValueError(
                "The MultiSWAG has the same SWAG twice, which adds nothing; give SWAGs that were "
                "trained separately."
            )
        if len({swag.members for swag in swags}) > 1:
            raise ValueError(
                "The SWAGs have different numbers of members, so that some would count for more; "
                "build them with the same members=."
            )
        super().__init__(swags[0].net, swags[0].output, swags[0].class_dim)
        self.swags, self.fit_seconds = nn.ModuleList(swags), fit_seconds
        seconds = [swag.fit_seconds for swag in swags]
        if fit_seconds is None and None not in seconds:
            self.fit_seconds = sum(filter(None, seconds))

    def member_logits(self, x: Inputs, samples: int | None = None) -> Iterator[Tensor]:
        """The logits of the first members of each SWAG, or of all, `[1, B, K, ...]` each."""
        shapes = set()
        for swag in self._each():
            for logits in swag.member_logits(x, samples):
                shapes.add(tuple(logits.shape[1:]))
                if len(shapes) > 1:
                    raise ValueError(
                        "The SWAGs' logits differ in shape "
                        f"({' and '.join(map(str, sorted(shapes)))}); give SWAGs for the same "
                        "classes."
                    )
                yield logits

    def training_logits(self, inputs: Inputs) -> Tensor:
        """None: every SWAG is trained by itself."""
        raise RuntimeError(
            "A MultiSWAG is not trained as a whole; train each of its SWAGs by abnn.train, from "
            "different seeds."
        )

    @property
    def num_added_parameters(self) -> int:
        """The other means, and the variances and deviations of all."""
        added = sum(swag.num_added_parameters + len(swag.mean) for swag in self._each())
        return added - self._given[0]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the SWAGs."""
        if len({swag.network_state()["structure"] for swag in self._each()}) > 1:
            raise ArtifactError(
                "The networks of the MultiSWAG are of different kinds, and it is loaded from one; "
                "save each SWAG by itself."
            )
        return {"swags": [swag.arguments for swag in self._each()]}

    @classmethod
    def rebuild(cls, net: Any, output: Output | None, arguments: dict[str, Any]) -> Self:
        """As many SWAGs of the one network."""
        return cls(SWAG.rebuild(net, output, each) for each in arguments["swags"])

    def _each(self) -> Iterator[SWAG]:
        for swag in self.swags:
            assert isinstance(swag, SWAG)
            yield swag
