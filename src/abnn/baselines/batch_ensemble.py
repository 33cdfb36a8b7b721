"""BatchEnsemble (Wen et al., ICLR 2020, arXiv:2002.06715)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

from torch import Tensor, nn

from abnn.baselines.members import Members, change_first
from abnn.baselines.method import Method
from abnn.outputs import Inputs, Output
from abnn.surgery import copied, swapped, weighted_layers, widths

Factors = Literal["normal", "signs", "ones"]
FACTORS = ("ensemble_r", "ensemble_s")


class BatchEnsemble(Method):
    """M members that share all weights but for a factor of rank one in every layer.

        W_m = W * (s_m r_m^T),   so   y = (W (x * r_m)) * s_m + b_m

    in every convolution and linear layer; norms are shared. While it is trained, every member gets
    an equal share of each batch, so a step costs what a step of the network costs. All members
    predict in one pass.

    A layer whose weight is read without calling it stays shared: the projections of
    `nn.MultiheadAttention`, and those of torchvision's Swin and timm's BEiT.

    Args:
        net: the network, with the weights from which the shared ones start; copied.
        members: how many there are.
        factors: what r and s start from: "normal", N(1, 1/4); "signs", 1 or -1; or "ones", at
            which every member is the network itself.
        output: finds the logits in what the network returns, where that is not obvious.
        class_dim: the dimension of the classes in the logits.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> ensemble, x = BatchEnsemble(net, members=3), torch.randn(2, 4)
    >>> ensemble.predict(x).samples_used
    3
    >>> same = BatchEnsemble(net, members=3, factors="ones").predict(x, keep_members=True).members
    >>> bool((same - net(x).softmax(1)).abs().max() < 1e-6)
    True
    """

    def __init__(
        self,
        net: nn.Module,
        members: int = 4,
        factors: Factors = "normal",
        output: Output | None = None,
        class_dim: int = 1,
    ) -> None:
        super().__init__(net, output, class_dim)
        if factors not in get_args(Factors):
            raise ValueError(f"factors={factors!r} must be 'normal', 'signs' or 'ones'.")
        self._members = Members(members)
        self.members, self.factors = self._members.count, factors
        weighted_layers(net)
        self.net = copied(net)
        for layer in weighted_layers(self.net).values():
            _multiply(layer, self._members, factors)

    def member_logits(self, x: Inputs) -> Iterator[Tensor]:
        """The logits of the members, `[M, B, K, ...]` where they run in one pass."""
        return self._members.logits(self, x)

    def training_logits(self, inputs: Inputs) -> Tensor:
        """The logits of a batch that the members share."""
        return self._members.training_logits(self, inputs)

    def parameter_groups(self) -> Sequence[dict[str, Any]]:
        """The shared weights, and the factors: decay would pull these to 0, not to 1."""
        named = list(self.named_parameters())
        factors = [p for name, p in named if name.endswith(FACTORS)]
        rest = [p for name, p in named if not name.endswith(FACTORS)]
        return [{"params": rest}, {"params": factors, "weight_decay": 0.0}]


def _multiply(layer: nn.Module, members: Members, factors: Factors) -> None:
    """Give a layer factors and a bias for every member, and what applies them."""
    weight, bias, M = layer.weight, layer.bias, members.count
    assert isinstance(weight, Tensor)
    for name, width in zip(FACTORS, widths(layer), strict=True):
        values = weight.new_ones(M, width).detach()
        if factors == "normal":
            values.normal_(1.0, 0.5)
        elif factors == "signs":
            values.bernoulli_(0.5).mul_(2).sub_(1)
        layer.register_parameter(name, nn.Parameter(values))
    biases = nn.Parameter(bias.detach().repeat(M, 1)) if isinstance(bias, Tensor) else None
    layer.register_parameter("ensemble_b", biases)
    layer.forward = _RankOne(layer, members)


class _RankOne:
    """What a layer of the members computes: (W (x * r)) * s + b.

    The layer keeps a bias of its own, for networks that read it without calling the layer.
    """

    def __init__(self, layer: Any, members: Members) -> None:
        self.layer, self.members, self.plain = layer, members, layer.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        layer, spread = self.layer, self.members.spread
        args, kwargs = change_first(lambda x: x * spread(layer.ensemble_r, layer, x), args, kwargs)
        with swapped(layer, {"bias": None}):
            y: Tensor = self.plain(*args, **kwargs)
        y = y * spread(layer.ensemble_s, layer, y)
        return y if layer.ensemble_b is None else y + spread(layer.ensemble_b, layer, y)
