"""BatchEnsemble (Wen et al., ICLR 2020, arXiv:2002.06715)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

from torch import Tensor, nn

from abnn.baselines.members import Members
from abnn.baselines.method import Method
from abnn.outputs import Inputs, Output
from abnn.surgery import channel_dim, copied, weighted_layers, widths

Factors = Literal["normal", "signs", "ones"]


class BatchEnsemble(Method):
    """M members that share all weights but for a factor of rank one in every layer.

        W_m = W * (s_m r_m^T),   so   y = (W (x * r_m)) * s_m + b_m

    in every convolution and linear layer; norms are shared. While it is trained, every member gets
    an equal share of each batch, so a step costs what a step of the network costs. All members
    predict in one pass.

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
        factors = [p for name, p in named if name.endswith(("ensemble_r", "ensemble_s"))]
        rest = [p for name, p in named if not name.endswith(("ensemble_r", "ensemble_s"))]
        return [{"params": rest}, {"params": factors, "weight_decay": 0.0}]


def _multiply(layer: nn.Module, members: Members, factors: Factors) -> None:
    """Give a layer factors and a bias for every member, and what applies them."""
    weight, M = layer.weight, members.count
    assert isinstance(weight, Tensor)
    for name, width in zip(("ensemble_r", "ensemble_s"), widths(layer), strict=True):
        values = weight.new_ones(M, width).detach()
        if factors == "normal":
            values.normal_(1.0, 0.5)
        elif factors == "signs":
            values.bernoulli_(0.5).mul_(2).sub_(1)
        layer.register_parameter(name, nn.Parameter(values))
    bias = layer.bias
    if isinstance(bias, Tensor):
        layer.register_parameter("ensemble_b", nn.Parameter(bias.detach().repeat(M, 1)))
        layer.register_parameter("bias", None)
    layer.register_forward_pre_hook(_Before(members))
    layer.register_forward_hook(_After(members))


class _Before:
    """Multiplies what goes into a layer by r."""

    def __init__(self, members: Members) -> None:
        self.members = members

    def __call__(self, layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Any, ...]:
        x, *rest = args
        return x * spread(layer.ensemble_r, layer, x, self.members), *rest


class _After(_Before):
    """Multiplies what comes out of a layer by s, and adds the bias."""

    def __call__(self, layer: nn.Module, args: tuple[Tensor, ...], y: Tensor) -> Tensor:  # type: ignore[override]
        y = y * spread(layer.ensemble_s, layer, y, self.members)
        bias = getattr(layer, "ensemble_b", None)
        return y if bias is None else y + spread(bias, layer, y, self.members)


def spread(bank: Any, layer: nn.Module, x: Tensor, members: Members) -> Tensor:
    """The members' numbers `[M, C]` for the rows of a layer's input or output.

    >>> members, x = Members(2), torch.zeros(4, 3, 5, 5)
    >>> with members.rows_of(torch.tensor([0, 0, 1, 1])):
    ...     spread(torch.ones(2, 3), nn.Conv2d(3, 1, 1), x, members).shape
    torch.Size([4, 3, 1, 1])
    """
    rows = members.select(bank, len(x))
    after = -1 - channel_dim(layer)  # dimensions behind the channels
    return rows.reshape(len(rows), *[1] * (x.ndim - 2 - after), -1, *[1] * after)
