"""MIMO (Havasi et al., ICLR 2021, arXiv:2010.06610)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from abnn.baselines.method import Method
from abnn.baselines.resizing import blame, ends, resize, running
from abnn.draws import number, whole_number
from abnn.folding import first_tensor, head, take
from abnn.inference import inference
from abnn.outputs import Inputs, Output, arguments
from abnn.surgery import channel_dim, copied, weighted_layers, widths
from abnn.train import cross_entropy


class MIMO(Method):
    """M members in one network, which takes M inputs and makes M sets of logits in one pass.

        logits_1, ..., logits_M = net(x_1, ..., x_M),   loss = sum_m CE(logits_m, y_m)

    The inputs are laid side by side as channels of the first layer, and the logits come as M times
    as many classes from the last one. While it is trained, the members see different examples, so
    each learns to use its own input and to ignore the others; to predict, all see the same x.

    Args:
        net: the network; copied. Its first and last layer, widened, start from new weights.
        members: how many there are.
        rho: the share of a batch in which all members get the same example, from 0 to 1.
        batch_repetition: how often an example is in a batch, each time beside other ones; the
            paper takes 4 on CIFAR, which makes the training four times as long.
        first: the name of the layer that the input enters; default: the first in the network.
        last: the name of the layer that makes the logits; default: the last in the network.
        output: finds the logits in what the network returns, where that is not obvious.
        class_dim: the dimension of the classes in the logits.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> mimo = MIMO(net, members=2)
    >>> mimo.net[0], mimo.net[2].out_features
    (Linear(in_features=8, out_features=8, bias=True), 6)
    >>> mimo.predict(torch.randn(5, 4), keep_members=True).members.shape
    torch.Size([2, 5, 3])
    """

    def __init__(
        self,
        net: nn.Module,
        members: int = 3,
        rho: float = 0.0,
        batch_repetition: int = 1,
        first: str | None = None,
        last: str | None = None,
        output: Output | None = None,
        class_dim: int = 1,
    ) -> None:
        super().__init__(net, output, class_dim)
        self.members = whole_number("members", members, least=1)
        self.batch_repetition = whole_number("batch_repetition", batch_repetition, least=1)
        self.rho = number("rho", rho, least=0, most=1)
        self.first, self.last = first, last
        self._first, self._last = ends(net, first, last)
        self.net = copied(net)
        layers, M = weighted_layers(self.net), self.members
        self._channel_dim = channel_dim(layers[self._first])
        self._classes = widths(layers[self._last])[1]
        if M == 1:
            return  # the network itself
        for name in dict.fromkeys((self._first, self._last)):  # may be one and the same
            if getattr(layers[name], "groups", 1) > 1:
                raise ValueError(
                    f"The layer {name!r} has {layers[name].groups} groups, which can't hold what "
                    f"{M} members share; pass first= and last= with the names of the layers that "
                    "the input enters and that make the logits, or give a network without groups "
                    "there."
                )
            into, out = widths(layers[name])
            into = M * into if name == self._first else into
            resize(self.net, name, into, M * out if name == self._last else out)

    def member_logits(self, x: Inputs) -> Iterator[Tensor]:
        """The logits of the members, `[M, B, K, ...]`."""
        yield self.heads([x] * self.members)

    def training_loss(self, inputs: Inputs, labels: Tensor, ignore_index: int = -100) -> Tensor:
        """The sum over the members of their mean cross-entropy, each for its own examples."""
        B = len(first_tensor(inputs))
        if len(labels) != B:
            raise ValueError(f"There are {len(labels)} labels for {B} inputs; check the loader.")
        rows = self.training_rows(B)
        logits = self.heads([take(inputs, own.to(first_tensor(inputs).device)) for own in rows])
        losses = [
            cross_entropy(mine, labels[own.to(labels.device)], ignore_index)
            for mine, own in zip(logits, rows, strict=True)
        ]
        return torch.stack(losses).sum()

    def training_rows(self, B: int) -> Tensor:
        """Which examples of a batch the members see, `[M, B * batch_repetition]`."""
        n = B * self.batch_repetition
        shuffled = torch.arange(B).repeat(self.batch_repetition)[torch.randperm(n)]
        apart = n - round(n * self.rho)
        own = [shuffled[:apart][torch.randperm(apart)] for _ in range(self.members)]
        return torch.stack([torch.cat([rows, shuffled[apart:]]) for rows in own])

    def heads(self, inputs: Sequence[Inputs]) -> Tensor:
        """The logits of every member, each with an input of its own, `[M, B, K, ...]`."""
        x = self._side_by_side(inputs)
        try:
            logits = self.network_logits(x)
        except RuntimeError as error:
            place = self._misfit(x)
            if place is None:
                raise
            raise ValueError(
                f"The network can't take {self.members} inputs side by side: {place}; pass the "
                f"names of the layers that the input enters, first= (now {self._first!r}), and "
                f"that make the logits, last= (now {self._last!r})."
            ) from error
        M, K = self.members, self._classes
        if logits.shape[1] != M * K:
            raise ValueError(
                f"The logits have {logits.shape[1]} classes, but the layer {self._last!r} makes "
                f"{K} for each of {M} members; pass last= with the name of the layer whose outputs "
                "are the logits."
            )
        return logits.reshape(len(logits), M, K, *logits.shape[2:]).movedim(1, 0)

    def _side_by_side(self, inputs: Sequence[Inputs]) -> Inputs:
        """One input for all members: the first tensor of each, as more channels."""
        first = [first_tensor(x) for x in inputs]
        dim, x = self._channel_dim, first[0]
        if not x.is_floating_point():
            raise TypeError(
                f"MIMO lays the inputs of its members side by side as channels, but this input is "
                f"a tensor of {x.dtype}, such as tokens; it needs images or features."
            )
        if x.ndim <= -dim:
            raise ValueError(
                f"The input has shape {tuple(x.shape)}, without the dimension {dim} of channels "
                f"of the layer {self._first!r}; pass first= with the layer that the input enters."
            )
        leaves, structure = pytree.tree_flatten(arguments(inputs[0]))
        batched = [t for t in leaves if isinstance(t, Tensor) and t.shape[:1] == x.shape[:1]]
        if len(batched) > 1:
            raise ValueError(
                f"The input holds {len(batched)} tensors with a row for every example, and MIMO "
                "can give its members their own examples in one only; give a network of one input."
            )
        joined = x if self.members == 1 else torch.cat(first, dim)
        args, kwargs = pytree.tree_unflatten([joined if t is x else t for t in leaves], structure)
        return kwargs or args

    def _misfit(self, x: Inputs) -> str | None:
        """Where a pass goes wrong, if it goes wrong with few examples too."""
        try:
            with inference(self), running(self.net) as stack:
                self.network_logits(head(x, 2))
        except RuntimeError:
            return blame(stack) if stack else None
        return None
