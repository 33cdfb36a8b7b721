"""MC dropout (Gal and Ghahramani, ICML 2016, arXiv:1506.02142)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

from abnn.baselines.members import Members, change_first
from abnn.baselines.method import Method
from abnn.draws import chunks, generator, number, whole_number
from abnn.outputs import Inputs, Output
from abnn.surgery import channel_dim, copied, weighted_layers

ADDED_RATE = 0.1
AT_ONCE = 4  # draws in one pass
ALPHA = -1.7580993408473766  # what a SELU tends to, which is what AlphaDropout drops to


class MCDropout(Method):
    """A network whose dropout stays on at prediction, so that its weights are drawn.

        p(y | x) = 1/S sum_s softmax(net(x; masks_s))[y],   masks_s ~ Bernoulli(1 - p)

    The dropout modules of the network are used. Where it has none, what goes into every
    convolution and linear layer but the first is dropped; whole channels of convolutions, because
    a lone pixel can be guessed from its neighbours. Training is that of the network with dropout,
    a mask for every example. At prediction a draw has one mask for all examples of a batch: so a
    draw is a network, and what it says of an example does not depend on the others. Norms use
    their running statistics.

    What drops without being a module stays off at prediction: the attention weights of
    `nn.MultiheadAttention` and `scaled_dot_product_attention`, the rate of an `nn.LSTM`, calls of
    `F.dropout`; and so does what drops whole branches, as timm's DropPath. Where a network has its
    batch in another dimension than the first, masks depend on the place of an example in it.

    Args:
        net: the network, with the weights that training, if there is any, starts from; copied.
        p: the rate at which is dropped, in every dropout module. Default: the rates of the
            network's modules; 0.1 where none has any.
        output: finds the logits in what the network returns, where that is not obvious.
        class_dim: the dimension of the classes in the logits.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    >>> dropout, x = MCDropout(net), torch.randn(2, 4)
    >>> dropout.predict(x, samples=8).samples_used
    8
    >>> bool((dropout.predict(x, seed=1).probs == dropout.predict(x, seed=1).probs).all())
    True
    """

    def __init__(
        self,
        net: nn.Module,
        p: float | None = None,
        output: Output | None = None,
        class_dim: int = 1,
    ) -> None:
        super().__init__(net, output, class_dim)
        self.p = None if p is None else number("p", p, least=0, below=1)
        if not _dropouts(net, p) and len(weighted_layers(net)) < 2:
            raise ValueError(
                f"The {type(net).__name__} has no dropout, and no layer but its first to add it "
                "to; give a network with dropout or with more layers."
            )
        self._members = Members(2)  # how many a trial takes; a pass says how many there are
        self._draws = _Draws(self._members)
        self.net = copied(net)
        found = _dropouts(self.net, p)
        for place, module in enumerate(found):
            module.p = module.p if p is None else float(p)
            module.register_forward_hook(_After(self._draws, place))
        if not found:
            rate = ADDED_RATE if p is None else float(p)
            for place, layer in enumerate(list(weighted_layers(self.net).values())[1:]):
                before = _Before(self._draws, place, rate)
                layer.register_forward_pre_hook(before, with_kwargs=True)

    def member_logits(self, x: Inputs, samples: int = 16, seed: int = 0) -> Iterator[Tensor]:
        """The logits of the draws, `[s, B, K, ...]`, some at a time."""
        samples, seed = whole_number("samples", samples, least=1), whole_number("seed", seed)
        with self._draws.of(seed, range(2)):
            folds = samples > 1 and self._members.folds(self, x)
        for indices in chunks(range(samples), AT_ONCE if folds else 1):
            with self._draws.of(seed, indices):
                logits = list(self._members.logits(self, x, len(indices)))
            if not self._draws.calls:
                raise RuntimeError(
                    f"The {type(self.net).__name__} calls none of its dropout modules, so all "
                    "draws are alike; give it an nn.Dropout that it calls, or remove those that "
                    "it does not, and dropout is added to its layers."
                )
            yield from logits

    def network_logits(self, inputs: Inputs) -> Tensor:
        """The logits of one pass of the network inside, `self.net`."""
        self._draws.calls.clear()
        return super().network_logits(inputs)


class _Draws:
    """The draws that a pass of the network is for, if it is for any, and their masks."""

    def __init__(self, members: Members) -> None:
        self.members, self.seed = members, 0
        self.indices: Sequence[int] = ()
        self.calls: dict[int, int] = {}  # how often each place was passed

    @contextmanager
    def of(self, seed: int, indices: Sequence[int]) -> Iterator[None]:
        """Let passes be for these draws for a while."""
        before, self.seed, self.indices = (self.seed, self.indices), seed, indices
        try:
            yield
        finally:
            self.seed, self.indices = before

    def kept(self, place: int, p: float, shape: Sequence[int], x: Tensor) -> Tensor:
        """What of the rows of `x` is kept, 1 or 0, with a mask of such a shape for every draw."""
        call = self.calls[place] = self.calls.get(place, -1) + 1
        numbers = [
            generator("predict", self.seed, 0, index, place, call).random(shape, dtype=np.float32)
            for index in self.indices
        ]
        bank = torch.from_numpy(np.stack(numbers) >= p).to(x.device, x.dtype)
        if len(shape) == x.ndim:  # no batch
            return self.members.select(bank, 1)[0]
        return self.members.select(bank, len(x))


class _Before:
    """Drops some of what goes into a layer."""

    def __init__(self, draws: _Draws, place: int, p: float) -> None:
        self.draws, self.place, self.p = draws, place, p

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def drop(x: Tensor) -> Tensor:
            behind = -1 - channel_dim(layer)  # dimensions behind the channels
            whole = not isinstance(layer, nn.Linear)
            shape = (x.shape[-1 - behind], *[1] * behind) if whole else _features(x)
            if self.draws.indices:
                return x * self.draws.kept(self.place, self.p, shape, x) / (1 - self.p)
            if not layer.training:
                return x
            batch = x.shape[: x.ndim - len(shape)]
            return x * F.dropout(x.new_ones(*batch, *shape), self.p)

        return change_first(drop, args, kwargs)


class _After:
    """Drops some of what comes out of a dropout module, which is off at prediction."""

    def __init__(self, draws: _Draws, place: int) -> None:
        self.draws, self.place = draws, place

    def __call__(self, module: Any, args: Any, x: Tensor) -> Tensor | None:
        if not self.draws.indices:
            return None
        p, shape = float(module.p), _features(x)
        if isinstance(module, (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)):
            shape = (x.shape[1], *[1] * (x.ndim - 2))
        kept = self.draws.kept(self.place, p, shape, x)
        if isinstance(module, (nn.AlphaDropout, nn.FeatureAlphaDropout)):
            scale = ((1 - p) * (1 + p * ALPHA**2)) ** -0.5 if p < 1 else 0.0
            x = x * kept + ALPHA * (1 - kept) - ALPHA * p
            return scale * x
        scale = 1 / (1 - p) if p < 1 else 0.0
        return scale * x * kept


def _features(x: Tensor) -> tuple[int, ...]:
    """The shape of one example."""
    return tuple(x.shape[1:] if x.ndim > 1 else x.shape)


def _dropouts(net: nn.Module, p: float | None) -> list[_DropoutNd]:
    """The dropout modules that are used: all if they get another rate, or those that have one."""
    found = [module for module in net.modules() if isinstance(module, _DropoutNd)]
    return [module for module in found if p is not None or module.p > 0]
