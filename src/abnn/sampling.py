"""Run draws through a network: one loaded into its layers, or several folded into one batch.

The two must give the same numbers. Whether they do is tried on the network itself, once for every
kind of input, and a network that can't share a batch between draws runs them one by one.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from abnn.draws import Draw, chunks, noise_matrix, untraced
from abnn.folding import (
    agree,
    any_half,
    channels_last,
    clone,
    first_tensor,
    head,
    no_fused_encoder,
    pieces,
    repeat,
    signature,
)
from abnn.layout import ChannelsLast, has_images
from abnn.norm import Active, BayesNorm, Noise, NotFoldable, activated
from abnn.outputs import Inputs, Output, call, logits_of
from abnn.plan import Plan, rows_of, weights_are_small
from abnn.prediction import Prediction, PredictionStream
from abnn.surgery import swapped
from abnn.survey import Survey, share_of_trunk, survey
from abnn.trunk import Trunk, WatchedTrunk
from abnn.weights import Weights

# Draws are handed to the layers of a network, so two threads can't run one network at once.
_RUNNING = threading.RLock()

_NONE: frozenset[int] = frozenset()

# Numbers of each kind that the weights of a prediction's draws may hold at once.
_KEPT_WEIGHTS = 2**20

# A trunk that must be watched is worth the watching when it is this much of the network.
_WORTH_WATCHING = 0.05


@dataclass(frozen=True)
class Folding:
    """How several draws share a pass, so that they equal draws that run one by one.

    Args:
        survey: what the network showed of itself.
        channels_last: whether images are laid out channels last.
        overwrite: the Bayesian layers that may overwrite their input.
        trunk: the Bayesian layers at which the trunk ends, if it runs once.
        watched: whether the trunk meets the branches again.
        in_weights: whether batch norms can be made part of the weights before them.
    """

    survey: Survey
    channels_last: bool = False
    overwrite: frozenset[int] = frozenset()
    trunk: frozenset[int] | None = None
    watched: bool = False
    in_weights: bool = False


class Known:
    """What was found out of a network and need not be found again; never copied nor stored.

    Attributes:
        foldings: for kinds of input how draws can share a pass, None if they can't.
        weights: those of the last prediction.
        channels_last: the weights of convolutions in that order.
    """

    def __init__(self) -> None:
        self.foldings: dict[Any, Folding | None] = {}
        self.weights: Weights | None = None
        self.channels_last = ChannelsLast()

    def __deepcopy__(self, memo: Any) -> Known:
        return Known()

    def __reduce__(self) -> Any:
        return Known, ()


@dataclass(frozen=True, eq=False)
class Sampler:
    """A network with Bayesian norms, and how its noise and its logits are to be had.

    Args:
        backbone: the network.
        layers: its Bayesian norms by name, in the order of their noise.
        alpha, noise, class_dim, output: as of `abnn.convert`.
        known: what was found out before.
    """

    backbone: nn.Module
    layers: Mapping[str, BayesNorm]
    alpha: float
    noise: Noise
    class_dim: int
    output: Output | None
    known: Known

    # What a prediction runs

    def predict(
        self, inputs: Inputs, draws: Sequence[Draw], plan: Plan, keep_members: bool
    ) -> Prediction:
        """The prediction of the draws, in passes as planned."""
        streams: list[PredictionStream] = []
        with closing(self._planned(inputs, draws, plan)) as groups:
            for passes in groups:
                for i, logits in enumerate(passes):
                    if i == len(streams):
                        streams.append(PredictionStream(keep_members))
                    streams[i].update(logits)
        parts = [stream.result() for stream in streams]
        return parts[0] if len(parts) == 1 else Prediction.cat(parts)

    def planned_logits(self, inputs: Inputs, draws: Sequence[Draw], plan: Plan) -> Tensor:
        """Logits of the draws, `[S, B, K, ...]`, in passes as planned."""
        with closing(self._planned(inputs, draws, plan)) as groups:
            return torch.cat([torch.cat(list(passes), 1) for passes in groups])

    def _planned(
        self, inputs: Inputs, draws: Sequence[Draw], plan: Plan
    ) -> Generator[Iterator[Tensor], None, None]:
        """For one group of draws after the other their logits, a piece of the batch at a time."""
        _check_examples(inputs)
        with _RUNNING:
            folding = self._folding(inputs) if len(draws) > 1 else None
            plan = self._completed(plan, inputs, len(draws), folding)
            folding = folding and _restricted(folding, plan)
            batches = list(pieces(inputs, plan.examples))
            assert plan.draws is not None
            for weights, part in self._parts(draws, plan.draws):
                with closing(self._passes(batches, weights, part, folding)) as passes:
                    yield passes

    def plan(self, inputs: Inputs, draws: int, plan: Plan) -> Plan:
        """The plan of a prediction, with nothing left to choose."""
        _check_examples(inputs)
        with _RUNNING:
            folding = self._folding(inputs) if draws > 1 else None
            return self._completed(plan, inputs, draws, folding)

    def logits(self, inputs: Inputs, draws: Sequence[Draw]) -> Tensor:
        """Logits of the draws, `[S, B, K, ...]`: together where that is right, else one by one."""
        _check_examples(inputs)
        with _RUNNING:
            folding = self._folding(inputs) if len(draws) > 1 else None
            folding = folding and replace(folding, in_weights=False)
            part = range(len(draws))
            (logits,) = self._passes([inputs], self.weights(draws), part, folding)
            return logits

    def at_once(self, inputs: Inputs, several: bool) -> int:
        """Draws of which it is fastest to run so many together, with gradients.

        Args:
            several: whether there are more than one; who has none to share a pass with need not
                know that they could not.
        """
        _check_examples(inputs)
        with _RUNNING:
            folding = self._folding(inputs) if several else self._find_folding(inputs)
            if folding is None:
                return 1
            x = first_tensor(inputs)
            return max(1, rows_of(folding.survey, x) // x.shape[0])

    def training_logits(self, inputs: Inputs, draws: Sequence[Draw]) -> Tensor:
        """As `logits`, but a single draw too runs in the layout that is fastest."""
        _check_examples(inputs)
        with _RUNNING, ExitStack() as stack:
            folding = self._find_folding(inputs)
            inputs = clone(inputs)  # a network that writes to them would change the next pass
            if len(draws) == 1 and folding is not None and folding.channels_last:
                inputs = channels_last(inputs)
                stack.enter_context(self.known.channels_last.weights(self.backbone))
            folding = folding and replace(folding, in_weights=False)
            part = range(len(draws))
            (logits,) = self._passes([inputs], self.weights(draws), part, folding)
            return logits

    def _parts(self, draws: Sequence[Draw], most: int) -> Iterator[tuple[Weights, range]]:
        """The draws in parts of at most so many; weights serve several parts if they are small."""
        size = sum(layer.bank.form.shape.numel() for layer in self.layers.values())
        if len(draws) * size > _KEPT_WEIGHTS or torch.is_grad_enabled():
            for group in chunks(draws, most):
                yield self.weights(group), range(len(group))
            return
        kept = self.known.weights  # most predictions are made with the same seed
        layers = list(self.layers.values())
        if kept is None or not kept.are_still(layers, draws, self.alpha, self.noise):
            self.known.weights = kept = self.weights(draws)
        for start in range(0, len(draws), most):
            yield kept, range(start, min(start + most, len(draws)))

    def _passes(
        self, batches: Sequence[Inputs], weights: Weights, part: range, folding: Folding | None
    ) -> Generator[Tensor, None, None]:
        """Logits of part of the draws, `[S, B, K, ...]`, for one batch after the other."""
        if self.noise == "example" and not self.is_foldable(batches[0]):
            raise ValueError(
                "noise='example' needs norms that see the batch as their leading dimension, "
                "which this network's do not; use noise='channel'."
            )
        if folding is not None and folding.in_weights:
            yield from self._in_weights(batches, weights, part, folding)
            return
        done = 0
        if len(part) > 1 and folding is not None:
            try:
                with closing(self._together(batches, weights, part, folding)) as passes:
                    for logits in passes:
                        yield logits
                        done += 1
            except NotFoldable:  # inputs of this kind were fine so far, these are not
                self.known.foldings[_kind(batches[done])] = None
        for batch in batches[done:]:
            yield self._one_by_one(batch, weights, part)

    def _completed(self, plan: Plan, inputs: Inputs, draws: int, folding: Folding | None) -> Plan:
        if not isinstance(plan, Plan):
            raise TypeError(f"plan={plan!r} is not an abnn.Plan; write plan=abnn.Plan(draws=4).")
        x = first_tensor(inputs)
        B = len(x)
        if folding is None:
            return Plan(1, B, False, False, False)
        # The noise of an example is a matter of its place in the batch, but for channel noise.
        apart = self.noise == "channel"
        if plan.examples is not None and plan.examples < B and not apart:
            raise ValueError(
                f"Plan(examples={plan.examples}) would split the batch, and with noise="
                f"{self.noise!r} an example's noise depends on its place in it; leave it out."
            )
        rows = rows_of(folding.survey, x)
        can = folding.in_weights and apart
        plan = plan if can else replace(plan, weights=False)
        if can and plan.draws is None and plan.weights is None:
            plan = replace(plan, weights=weights_are_small(folding.survey, x))
        if can and plan.weights:
            examples = plan.examples or min(B, rows)
            last = folding.channels_last and plan.channels_last is not False
            return Plan(1, examples, last, False, True)
        if plan.draws is None:
            share = rows // (plan.examples or (1 if apart else B))
            plan = replace(plan, draws=max(1, min(draws, share)))
        assert plan.draws is not None
        if plan.examples is None:
            plan = replace(plan, examples=min(B, max(1, rows // plan.draws)) if apart else B)
        alone = plan.draws == 1
        chosen = not alone and folding.channels_last and plan.channels_last is not False
        shared = not alone and folding.trunk is not None and plan.trunk is not False
        return replace(plan, channels_last=chosen, trunk=shared, weights=False)

    def weights(self, draws: Sequence[Draw], eps: Tensor | None = None) -> Weights:
        """What the layers run with for these draws; `eps` is the noise if not theirs."""
        eps = self.channel_noise(draws) if eps is None else eps
        return Weights(list(self.layers.values()), draws, eps, self.alpha, self.noise)

    def channel_noise(self, draws: Sequence[Draw]) -> Tensor:
        """The noise of all layers side by side, a row a draw; zero where it is not per draw."""
        size = sum(layer.bank.form.shape.numel() for layer in self.layers.values())
        if self.noise != "channel":
            return torch.zeros(len(draws), size)
        return noise_matrix(draws, size)

    def _one_by_one(self, inputs: Inputs, weights: Weights, part: range) -> Tensor:
        """One pass a draw, each of the original network with this draw's weights."""
        B, logits = first_tensor(inputs).shape[0], []
        layers = list(self.layers.values())
        for s in part:
            with activated(layers, weights.of(range(s, s + 1), B)):
                # A network that writes to its input would hand the next draw what it left.
                result = call(self.backbone, clone(inputs))
            logits.append(logits_of(result, self.output, self.class_dim))
        return torch.stack(logits)

    def _together(
        self,
        batches: Sequence[Inputs],
        weights: Weights,
        part: range,
        folding: Folding,
        called: set[int] | None = None,
    ) -> Generator[Tensor, None, None]:
        """One pass a batch over part of the draws, folded sample-major into it."""
        layers, S = list(self.layers.values()), len(part)
        actives = weights.of(part, first_tensor(batches[0]).shape[0], called)
        trunk = None if folding.trunk is None else Trunk(folding.trunk)
        for layer, active in zip(layers, actives, strict=True):
            active.trunk = trunk
            active.overwrite = layer.bank.index in folding.overwrite
        with ExitStack() as stack:
            if folding.channels_last:
                stack.enter_context(self.known.channels_last.weights(self.backbone))
            stack.enter_context(activated(layers, actives))
            stack.enter_context(no_fused_encoder())
            for inputs in batches:
                if folding.channels_last:
                    inputs = channels_last(inputs)
                if folding.watched:
                    result = self._watched(inputs, actives)
                else:
                    result = call(self.backbone, inputs if trunk else repeat(inputs, S))
                logits = logits_of(result, self.output, self.class_dim)
                if logits.shape[0] % S:
                    raise NotFoldable
                yield logits.unflatten(0, (S, -1))

    def _in_weights(
        self, batches: Sequence[Inputs], weights: Weights, part: range, folding: Folding
    ) -> Generator[Tensor, None, None]:
        """One pass a batch over a single draw, whose norms are part of the weights before them."""
        layers, makers = list(self.layers.values()), folding.survey.makers
        actives = weights.of(part, first_tensor(batches[0]).shape[0])
        with ExitStack() as stack:
            if folding.channels_last:
                stack.enter_context(self.known.channels_last.weights(self.backbone))
            for layer, active in zip(layers, actives, strict=True):
                active.trunk, active.done = None, layer.bank.index in makers
                if active.done:
                    values = scaled(makers[layer.bank.index], active.scale, active.shift)
                    stack.enter_context(swapped(makers[layer.bank.index], values))
            stack.callback(_undo, actives)
            stack.enter_context(activated(layers, actives))
            for inputs in batches:
                inputs = clone(inputs) if folding.survey.writes_input else inputs
                inputs = channels_last(inputs) if folding.channels_last else inputs
                result = call(self.backbone, inputs)
                yield logits_of(result, self.output, self.class_dim)[None]

    def _watched(self, inputs: Inputs, actives: Sequence[Active]) -> Any:
        """The network's output, its trunk run once and watched."""
        trunk = WatchedTrunk(len(first_tensor(inputs)), len(actives[0].draws))
        for active in actives:
            active.trunk = trunk
        with trunk:
            return call(self.backbone, trunk.plant(inputs))

    # Whether, and how, draws can share a pass

    def is_foldable(self, inputs: Inputs) -> bool:
        """Whether several draws can run as one larger batch: see `ABNN.is_foldable`."""
        return self._find_folding(inputs) is not None

    def _folding(self, inputs: Inputs) -> Folding | None:
        """How draws share a pass, or None; says so the first time that they can't."""
        known = _kind(inputs) in self.known.foldings
        folding = self._find_folding(inputs)
        if not known and folding is None and _kind(inputs) in self.known.foldings:
            warnings.warn(
                "Draws of this network can't share a batch: its batch is not the leading "
                "dimension, it mixes examples, or it uses a norm's weight without calling the "
                "norm. Predictions are right, but run one draw at a time; a batch-first version "
                "of the network would be faster.",
                stacklevel=5,  # the caller of predict
            )
        return folding

    def _find_folding(self, inputs: Inputs) -> Folding | None:
        kind = _kind(inputs)
        if kind not in self.known.foldings:
            # With strong noise a mistake is far larger than rounding.
            probe = replace(self, alpha=0.3, noise="channel")
            with torch.no_grad(), _evaluating(self.layers.values()):
                found, certain = untraced(probe._try_foldings, clone(inputs))
            if not certain:
                return None
            self.known.foldings[kind] = found
        return self.known.foldings[kind]

    def _try_foldings(self, inputs: Inputs) -> tuple[Folding | None, bool]:
        """The first folding that is right; not certain where outputs are not finite."""
        if first_tensor(inputs).shape[0] > 2:
            try:
                return self._right_folding(head(inputs, 2))
            except Exception:  # a network may not take fewer rows: all of them, then
                pass
        return self._right_folding(inputs)

    def _right_folding(self, inputs: Inputs) -> tuple[Folding | None, bool]:
        modes = len(next(iter(self.layers.values())).bank.gamma)
        draws = [Draw(0, index % modes, index, "probe") for index in range(3)]
        weights, every = self.weights(draws), range(len(draws))
        one_by_one = self._one_by_one(inputs, weights, every)
        if not one_by_one.isfinite().all():
            return None, False
        with activated(list(self.layers.values()), weights.of(range(1), batch=1)):
            seen = survey(self.backbone, self.layers, clone(inputs))
        leaves = (*self.backbone.parameters(), *self.backbone.buffers(), first_tensor(inputs))
        half = any_half(leaves)

        def is_right(folding: Folding) -> bool:
            called: set[int] = set()
            try:
                (together,) = self._together([inputs], weights, every, folding, called)
            except Exception:  # whatever the network says to a batch three times as large
                return False
            return agree(together, one_by_one, half) and not self._is_bypassed(
                inputs, draws, called
            )

        images = has_images(self.backbone, first_tensor(inputs))
        # The fastest first. A plan may leave out any part of what is right with all its parts, so
        # the trunk, in which nothing is overwritten, comes on top of what is right without it.
        ways = [Folding(seen, last, own) for last in (images, False) for own in (seen.owned, _NONE)]
        folding = next((way for way in dict.fromkeys(ways) if is_right(way)), None)
        if folding is None:
            return None, True
        trunk, watched = self._trunk(inputs, weights)
        if trunk is not None and not seen.writes_input:
            shared = replace(folding, trunk=trunk, watched=watched)
            folding = shared if is_right(shared) else folding
        inside = self._fits_in_weights(inputs, weights, folding, one_by_one, half)
        return replace(folding, in_weights=inside), True

    def _fits_in_weights(
        self, inputs: Inputs, weights: Weights, folding: Folding, expected: Tensor, half: bool
    ) -> bool:
        """Whether batch norms that are made part of weights give what they should."""
        if not folding.survey.makers:
            return False
        try:
            members = [
                logits
                for s in range(len(expected))
                for logits in self._in_weights([clone(inputs)], weights, range(s, s + 1), folding)
            ]
        except Exception:  # whatever a module does with other weights
            return False
        return agree(torch.cat(members), expected, half)

    def _trunk(self, inputs: Inputs, weights: Weights) -> tuple[frozenset[int] | None, bool]:
        """The layers at which the trunk ends, and whether it has to be watched."""
        B, layers = len(first_tensor(inputs)), list(self.layers.values())
        actives = weights.of(range(len(weights.draws)), B)
        try:
            with activated(layers, actives), no_fused_encoder():
                self._watched(clone(inputs), actives)
            trunk = actives[0].trunk
            assert isinstance(trunk, WatchedTrunk)
            if trunk.meetings == 0:
                return frozenset(trunk.found), False
            with activated(layers, weights.of(range(1), B)):
                share = share_of_trunk(self.backbone, self.layers, clone(inputs))
        except Exception:  # whatever a network does with tensors of two sizes
            return None, False
        return (frozenset(), True) if share >= _WORTH_WATCHING else (None, False)

    def _is_bypassed(self, inputs: Inputs, draws: Sequence[Draw], called: set[int]) -> bool:
        """Whether a norm that was not called changes the output all the same."""
        if len(called) == len(self.layers):
            return False
        eps = self.channel_noise(draws[:1]).clone()
        columns = eps.split([layer.bank.form.shape.numel() for layer in self.layers.values()], 1)
        for layer, column in zip(self.layers.values(), columns, strict=True):
            if layer.bank.index in called:
                column.zero_()
        noisy = self.weights(draws[:1], eps)
        plain = replace(self, alpha=0.0).weights(draws[:1], eps)
        moved, still = (self._one_by_one(inputs, each, range(1)) for each in (noisy, plain))
        return not torch.equal(moved, still)


def scaled(module: nn.Module, scale: Tensor | None, shift: Tensor | None) -> dict[str, Tensor]:
    """The weights of a convolution or linear layer after which a scale and a shift are the same.

    >>> linear = nn.Linear(1, 1)
    >>> values = scaled(linear, torch.tensor([[2.0]]), torch.tensor([[1.0]]))
    >>> bool(values["bias"] == 2 * linear.bias + 1)
    True
    """
    assert scale is not None
    assert shift is not None
    weight: Any = module._parameters["weight"]
    bias, factor = module._parameters["bias"], scale[0].to(weight.dtype)
    moved = shift[0] if bias is None else torch.addcmul(shift[0], bias.to(shift), scale[0])
    view = factor.view(-1, *[1] * (weight.ndim - 1))
    return {"weight": weight * view, "bias": moved.to(weight.dtype)}


def _undo(actives: Sequence[Active]) -> None:
    for active in actives:
        active.done = False


def _kind(inputs: Inputs) -> tuple[Any, ...]:
    # While fitting, layers have hooks of our own, and nothing may be overwritten.
    return *signature(inputs), torch.is_grad_enabled()


def _restricted(folding: Folding, plan: Plan) -> Folding:
    """The folding with what a plan forbids left out."""
    if not plan.channels_last:
        folding = replace(folding, channels_last=False)
    if not plan.trunk:
        folding = replace(folding, trunk=None, watched=False)
    return replace(folding, in_weights=bool(plan.weights))


def _check_examples(inputs: Inputs) -> None:
    first = first_tensor(inputs)
    if first.ndim == 0 or first.shape[0] == 0:
        raise ValueError(f"The input has shape {tuple(first.shape)}: there is no example in it.")


@contextmanager
def _evaluating(layers: Iterable[BayesNorm]) -> Iterator[None]:
    """Running statistics stay as they are; everything else of a backbone is in eval mode anyway."""
    before = [(layer, layer.training) for layer in layers]
    try:
        for layer, _ in before:
            layer.training = False
        yield
    finally:
        for layer, training in before:
            layer.training = training
