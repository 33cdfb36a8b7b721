"""Packed-Ensembles (Laurent et al., ICLR 2023, arXiv:2210.09184)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from abnn.baselines.method import Method
from abnn.baselines.resizing import blame, ends, narrow, running
from abnn.draws import number, whole_number
from abnn.folding import agree, any_half, clone, head, no_fused_encoder, signature
from abnn.inference import inference
from abnn.order import random_states, set_random_states
from abnn.outputs import Inputs, Output, arguments, logits_of
from abnn.surgery import copied, weighted_layers, widths
from abnn.train import cross_entropy


class PackedEnsembles(Method):
    """M narrower networks, packed into one by grouped convolutions.

    Every width C of the network becomes

        gamma * ceil(alpha * C / (M * gamma)),   and at least 2,

    in each of the M members, and gamma splits each convolution and linear layer into as many
    groups more. So an inner layer has about alpha^2 / (M * gamma) of its weights, in all members
    together. The input of the first layer and the logits of the last one stay as they are. The
    members start from weights of their own, drawn anew as each kind of layer does by default.

    All members run in one pass, as one convolution of M times as many groups. Parameters that are
    not part of a layer, such as a class token, keep their size and start from the network's values;
    where the size does not fit the narrower layers, the first pass says so.

    Args:
        net: the network; copied. Its weights do not matter.
        members: how many there are, M.
        alpha: how much wider all members together are than the network; with alpha = M each is as
            wide, as in a deep ensemble.
        gamma: into how many groups the inner layers of a member are split.
        first: the name of the layer that the input enters; default: the first in the network.
        last: the name of the layer that makes the logits; default: the last in the network.
        output: finds the logits in what the network returns, where that is not obvious.
        class_dim: the dimension of the classes in the logits.

    >>> net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 3))
    >>> packed = PackedEnsembles(net, members=4, alpha=2)
    >>> [tuple(layer.weight.shape) for layer in (packed.net[0], packed.net[2], packed.net[3])]
    [(4, 32, 4), (4, 32, 32), (4, 3, 32)]
    >>> packed.predict(torch.randn(5, 4)).samples_used
    4
    """

    def __init__(
        self,
        net: nn.Module,
        members: int = 4,
        alpha: float = 2.0,
        gamma: int = 1,
        first: str | None = None,
        last: str | None = None,
        output: Output | None = None,
        class_dim: int = 1,
    ) -> None:
        super().__init__(net, output, class_dim)
        self.members = whole_number("members", members, least=1)
        self.gamma = whole_number("gamma", gamma, least=1)
        self.alpha = number("alpha", alpha, above=0)
        self.first, self.last = first, last
        self._first, self._last = ends(net, first, last)
        self._kinds: dict[Any, bool] = {}
        self.net = copied(net)
        narrow(self.net, self._first, self._last, self._width, self.gamma)
        give_banks(self.net, self.members)

    def _width(self, C: int) -> int:
        """How wide a member is where the network has C channels."""
        if C == 1:
            return 1
        # Rounded first, as 0.7 * 10 is a little more than 7. A width of 1 could be broadcast
        # where it does not fit.
        share = round(self.alpha * C / (self.members * self.gamma), 6)
        return max(2, self.gamma * math.ceil(share))

    def member_logits(self, x: Inputs) -> Iterator[Tensor]:
        """The logits of the members, `[M, B, K, ...]` where they run in one pass."""
        if self._packs(x):
            yield self._together(x)
        else:
            for member in range(self.members):
                yield self._alone(x, member).unsqueeze(0)

    def training_loss(self, inputs: Inputs, labels: Tensor, ignore_index: int = -100) -> Tensor:
        """The mean over the members of their cross-entropies; all see the whole batch."""
        logits = torch.cat(list(self.member_logits(inputs)))
        return torch.stack([cross_entropy(each, labels, ignore_index) for each in logits]).mean()

    def _together(self, x: Inputs, trial: bool = False) -> Tensor:
        """The logits of all members in one pass, `[M, B, K, ...]`."""
        banks, shared = state_of(self.net, trial)

        def member(own: dict[str, Tensor]) -> Tensor:
            return self._run(own | shared, x)

        with warnings.catch_warnings():
            # Of single steps that vmap knows only one by one, as those of fused attention.
            warnings.filterwarnings("ignore", "There is a performance drop because")
            logits: Tensor = vmap(member, randomness="different")(banks)
        return logits

    def _alone(self, x: Inputs, member: int, trial: bool = False) -> Tensor:
        """The logits of one member, `[B, K, ...]`."""
        banks, shared = state_of(self.net, trial)
        if member < self.members - 1:  # a batch counts once, however many members see it
            shared = {name: tensor.clone() for name, tensor in shared.items()}
        return self._run({name: bank[member] for name, bank in banks.items()} | shared, x)

    def _run(self, state: dict[str, Tensor], x: Inputs) -> Tensor:
        args, kwargs = arguments(clone(x))
        with no_fused_encoder():
            result = functional_call(self.net, state, args, kwargs)
        return logits_of(result, self.output, self.class_dim)

    def _packs(self, x: Inputs) -> bool:
        """Whether all members can run in one pass; found out once for every kind of input."""
        kind = (self.training, *signature(x))
        if kind not in self._kinds:
            states = random_states()
            cuda = {t.device.index for t in self.net.parameters() if t.is_cuda}
            with torch.random.fork_rng(sorted(cuda)):
                try:
                    self._kinds[kind] = self._trial(head(x, 2))
                finally:
                    set_random_states(states)
            if not self._kinds[kind]:
                warnings.warn(
                    f"The members of the PackedEnsembles can't run in one pass, as torch.func.vmap "
                    f"does not take what the {type(self.net).__name__} does, so they run one after "
                    "another.",
                    stacklevel=2,
                )
        return self._kinds[kind]

    def _trial(self, x: Inputs) -> bool:
        with inference(self):
            self._check(x)
            alone = torch.stack([self._alone(x, m, trial=True) for m in range(self.members)])
        try:
            with inference(self):
                together = self._together(x, trial=True)
            if self.training:  # which may do what a prediction does not
                self._together(x, trial=True)
        except Exception:  # whatever the network does with members as a dimension
            return False
        return self.members == 1 or agree(together, alone, any_half([alone]))

    def _check(self, x: Inputs) -> None:
        """Refuse a network that can't be narrowed so, as its first pass shows."""
        with running(self.net) as modules, torch.enable_grad():
            try:
                logits = self._alone(x, 0, trial=True)
            except Exception as error:  # whatever the network says of other widths
                if not modules:
                    raise
                raise ValueError(
                    f"The {type(self.net).__name__} can't be run with narrower layers: "
                    f"{blame(modules)} ({error}). Pass the names of the layers that the input "
                    f"enters, first= (now {self._first!r}), and that make the logits, last= (now "
                    f"{self._last!r}), members and an alpha that divide the widths, or an alpha as "
                    "large as members, which leaves them as they are."
                ) from error
            weight: Any = self.net.get_submodule(self._last).weight
            gradient: Tensor | None = weight
            if logits.requires_grad and weight.requires_grad:
                (gradient,) = torch.autograd.grad(logits.sum(), weight, allow_unused=True)
        if gradient is None:
            raise ValueError(
                f"The logits do not depend on the layer {self._last!r}; pass last= with the name "
                "of the layer that makes them."
            )
        K = widths(weighted_layers(self.net)[self._last])[1]
        if self.output is None and logits.shape[1] != K:
            raise ValueError(
                f"The logits have {logits.shape[1]} classes, but the layer {self._last!r} makes "
                f"{K}; pass last= with the name of the layer that makes the logits, or output= if "
                "they are made from its outputs otherwise."
            )


def redraw(net: nn.Module) -> None:
    """New weights for every layer that knows how to draw its own."""
    for module in reversed(list(net.modules())):  # those inside first, as they are built
        for name in ("reset_parameters", "_reset_parameters"):
            if callable(reset := getattr(module, name, None)):
                reset()
                for parameter in module._parameters.values():
                    if parameter is not None:
                        parameter.requires_grad_()
                break


def give_banks(net: nn.Module, members: int) -> None:
    """Replace what members have of their own by a bank with a row for each, `[M, ...]`."""
    rows: dict[str, list[Tensor]] = {}
    for _ in range(members):
        redraw(net)
        for name, tensor in state_of(net)[0].items():
            rows.setdefault(name, []).append(tensor.detach().clone())
    names = {id(tensor): name for name, tensor in state_of(net)[0].items()}
    banks: dict[str, Tensor] = {}
    for module in net.modules():
        holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for holder in holders:
            for key, tensor in holder.items():
                name = names.get(id(tensor), "")
                if name and name not in banks:  # a tensor in several places stays one
                    bank = torch.stack(rows[name])
                    learned = isinstance(tensor, nn.Parameter)
                    banks[name] = nn.Parameter(bank, tensor.requires_grad) if learned else bank
                if name:
                    holder[key] = banks[name]


def state_of(net: nn.Module, spare: bool = False) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What every member has of its own, and what all share: buffers of whole numbers.

    Copies of the buffers, if they are to be spared.
    """
    own: dict[str, Tensor] = dict(net.named_parameters())
    shared: dict[str, Tensor] = {}
    for name, buffer in net.named_buffers():
        kind = own if buffer.is_floating_point() else shared
        kind[name] = buffer.clone() if spare else buffer
    return own, shared
