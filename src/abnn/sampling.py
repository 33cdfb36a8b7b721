"""Run the draws of a prediction or of a fit through a network, in passes as planned."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from abnn.draws import Draw, chunks, untraced
from abnn.folding import channels_last, clone, first_tensor, pieces, signature
from abnn.layout import ChannelsLast, keep_freed_memory
from abnn.norm import NotFoldable
from abnn.outputs import Inputs
from abnn.passes import Folding, Network
from abnn.plan import Plan, rows_of
from abnn.prediction import Prediction, PredictionStream
from abnn.proof import find_folding
from abnn.weights import Weights

# Draws are handed to the layers of a network, so two threads can't run one network at once.
_RUNNING = threading.RLock()

# Numbers of each kind that the weights of a prediction's draws may hold at once.
_KEPT_WEIGHTS = 2**20


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
    """The passes of a network.

    Args:
        net: the network, and how its noise and its logits are to be had.
        known: what was found out before.
    """

    net: Network
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
        keep_freed_memory()
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
            part = range(len(draws))
            (logits,) = self._passes([inputs], self.net.weights(draws), part, folding)
            return logits

    def at_once(self, inputs: Inputs, most: int, exchanges: bool = False) -> int:
        """Draws of which it is fastest to run so many together, with gradients.

        Args:
            most: how many there are; one alone need not know that it can't share a pass.
            exchanges: whether processes wait for each other within a pass. That costs as much for
                one draw as for all, and more than what draws one by one gain from the cache.
        """
        _check_examples(inputs)
        with _RUNNING:
            folding = self._folding(inputs) if most > 1 else self._find_folding(inputs)
            if folding is None:
                return 1
            x = first_tensor(inputs)
            rows = rows_of(folding.survey, x, cached=not exchanges)
            return max(1, min(most, rows // x.shape[0]))

    def training_logits(self, inputs: Inputs, draws: Sequence[Draw]) -> Tensor:
        """As `logits`, but a single draw too runs in the layout that is fastest."""
        _check_examples(inputs)
        keep_freed_memory()
        with _RUNNING, ExitStack() as stack:
            folding = self._find_folding(inputs)
            inputs = clone(inputs)  # a network that writes to them would change the next pass
            if len(draws) == 1 and folding is not None and folding.channels_last:
                inputs = channels_last(inputs)
                stack.enter_context(self.net.channels_last.weights(self.net.backbone))
            part = range(len(draws))
            (logits,) = self._passes([inputs], self.net.weights(draws), part, folding)
            return logits

    def _parts(self, draws: Sequence[Draw], most: int) -> Iterator[tuple[Weights, range]]:
        """The draws in parts of at most so many; weights serve several parts if they are small."""
        size = sum(layer.bank.form.shape.numel() for layer in self.net.layers.values())
        if len(draws) * size > _KEPT_WEIGHTS or torch.is_grad_enabled():
            for group in chunks(draws, most):
                yield self.net.weights(group), range(len(group))
            return
        kept = self.known.weights  # most predictions are made with the same seed
        layers = list(self.net.layers.values())
        if kept is None or not kept.are_still(layers, draws, self.net.alpha, self.net.noise):
            self.known.weights = kept = self.net.weights(draws)
        for start in range(0, len(draws), most):
            yield kept, range(start, min(start + most, len(draws)))

    def _passes(
        self, batches: Sequence[Inputs], weights: Weights, part: range, folding: Folding | None
    ) -> Generator[Tensor, None, None]:
        """Logits of part of the draws, `[S, B, K, ...]`, for one batch after the other."""
        if self.net.noise == "example" and not self.is_foldable(batches[0]):
            raise ValueError(
                "noise='example' needs norms that see the batch as their leading dimension, "
                "which this network's do not; use noise='channel'."
            )
        done = 0
        if len(part) > 1 and folding is not None:
            try:
                with closing(self.net.together(batches, weights, part, folding)) as passes:
                    for logits in passes:
                        yield logits
                        done += 1
            except NotFoldable:  # inputs of this kind were fine so far, these are not
                self.known.foldings[_kind(batches[done])] = None
        for batch in batches[done:]:
            yield self.net.one_by_one(batch, weights, part)

    def _completed(self, plan: Plan, inputs: Inputs, draws: int, folding: Folding | None) -> Plan:
        if not isinstance(plan, Plan):
            raise TypeError(f"plan={plan!r} is not an abnn.Plan; write plan=abnn.Plan(draws=4).")
        x = first_tensor(inputs)
        B = len(x)
        if folding is None:
            return Plan(1, B, False, False)
        # The noise of an example is a matter of its place in the batch, but for channel noise.
        apart = self.net.noise == "channel"
        if plan.examples is not None and plan.examples < B and not apart:
            raise ValueError(
                f"Plan(examples={plan.examples}) would split the batch, and with noise="
                f"{self.net.noise!r} an example's noise depends on its place in it; leave it out."
            )
        rows = rows_of(folding.survey, x)
        if plan.draws is None:
            share = rows // (plan.examples or (1 if apart else B))
            plan = replace(plan, draws=max(1, min(draws, share)))
        assert plan.draws is not None
        if plan.examples is None:
            plan = replace(plan, examples=min(B, max(1, rows // plan.draws)) if apart else B)
        alone = plan.draws == 1
        chosen = not alone and folding.channels_last and plan.channels_last is not False
        shared = not alone and folding.trunk is not None and plan.trunk is not False
        return replace(plan, channels_last=chosen, trunk=shared)

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
            found, certain = untraced(find_folding, self.net, inputs)
            if not certain:
                return None
            self.known.foldings[kind] = found
        return self.known.foldings[kind]


def _kind(inputs: Inputs) -> tuple[Any, ...]:
    # While fitting, layers have hooks of our own, and nothing may be overwritten.
    return *signature(inputs), torch.is_grad_enabled()


def _restricted(folding: Folding, plan: Plan) -> Folding:
    """The folding with what a plan forbids left out."""
    if not plan.channels_last:
        folding = replace(folding, channels_last=False)
    if not plan.trunk:
        folding = replace(folding, trunk=None, watched=False)
    return folding


def _check_examples(inputs: Inputs) -> None:
    first = first_tensor(inputs)
    if first.ndim == 0 or first.shape[0] == 0:
        raise ValueError(f"The input has shape {tuple(first.shape)}: there is no example in it.")
