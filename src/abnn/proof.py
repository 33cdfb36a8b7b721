"""Whether, and how, draws of a network can share a pass: tried on the network itself.

Three draws with strong noise run one by one and in the other ways, on two examples. What gives the
same numbers is right; what does not, or what a network refuses, is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from abnn.draws import Draw
from abnn.folding import agree, any_half, clone, first_tensor, head, no_fused_encoder
from abnn.layout import has_images
from abnn.norm import BayesNorm, activated
from abnn.outputs import Inputs
from abnn.passes import Folding, Network
from abnn.survey import share_of_trunk, survey
from abnn.trunk import WatchedTrunk
from abnn.weights import Weights

# A trunk that must be watched is worth the watching when it is this much of the network.
_WORTH_WATCHING = 0.05

_NONE: frozenset[int] = frozenset()


def find_folding(net: Network, inputs: Inputs) -> tuple[Folding | None, bool]:
    """How draws can share a pass, None if they can't; and whether that is certain.

    It is not where outputs are not finite, which tells nothing.
    """
    # With strong noise a mistake is far larger than rounding.
    probe = replace(net, alpha=0.3, noise="channel")
    with torch.no_grad(), _evaluating(net.layers.values()):
        return _tried(probe, clone(inputs))


def _tried(net: Network, inputs: Inputs) -> tuple[Folding | None, bool]:
    """The first folding that is right; not certain where outputs are not finite."""
    if first_tensor(inputs).shape[0] > 2:
        try:
            return _right_folding(net, head(inputs, 2))
        except Exception:  # a network may not take fewer rows: all of them, then
            pass
    return _right_folding(net, inputs)


def _right_folding(net: Network, inputs: Inputs) -> tuple[Folding | None, bool]:
    modes = len(next(iter(net.layers.values())).bank.gamma)
    draws = [Draw(0, index % modes, index, "probe") for index in range(3)]
    weights, every = net.weights(draws), range(len(draws))
    one_by_one = net.one_by_one(inputs, weights, every)
    if not one_by_one.isfinite().all():
        return None, False
    with activated(list(net.layers.values()), weights.of(range(1), batch=1)):
        seen = survey(net.backbone, net.layers, clone(inputs))
    leaves = (*net.backbone.parameters(), *net.backbone.buffers(), first_tensor(inputs))
    half = any_half(leaves)

    def is_right(folding: Folding) -> bool:
        called: set[int] = set()
        try:
            (together,) = net.together([inputs], weights, every, folding, called)
        except Exception:  # whatever the network says to a batch three times as large
            return False
        return agree(together, one_by_one, half) and not _is_bypassed(net, inputs, draws, called)

    images = has_images(net.backbone, first_tensor(inputs))
    # The fastest first. A plan may leave out any part of what is right with all its parts, so
    # the trunk, in which nothing is overwritten, comes on top of what is right without it.
    ways = [Folding(seen, last, own) for last in (images, False) for own in (seen.owned, _NONE)]
    folding = next((way for way in dict.fromkeys(ways) if is_right(way)), None)
    if folding is None:
        return None, True
    trunk, watched = _trunk(net, inputs, weights)
    if trunk is not None and not seen.writes_input:
        shared = replace(folding, trunk=trunk, watched=watched)
        folding = shared if is_right(shared) else folding
    return folding, True


def _trunk(net: Network, inputs: Inputs, weights: Weights) -> tuple[frozenset[int] | None, bool]:
    """The layers at which the trunk ends, and whether it has to be watched."""
    B, layers = len(first_tensor(inputs)), list(net.layers.values())
    actives = weights.of(range(len(weights.draws)), B)
    try:
        with activated(layers, actives), no_fused_encoder():
            net.watched(clone(inputs), actives)
        trunk = actives[0].trunk
        assert isinstance(trunk, WatchedTrunk)
        if trunk.meetings == 0:
            return frozenset(trunk.found), False
        with activated(layers, weights.of(range(1), B)):
            share = share_of_trunk(net.backbone, net.layers, clone(inputs))
    except Exception:  # whatever a network does with tensors of two sizes
        return None, False
    return (frozenset(), True) if share >= _WORTH_WATCHING else (None, False)


def _is_bypassed(net: Network, inputs: Inputs, draws: Sequence[Draw], called: set[int]) -> bool:
    """Whether a norm that was not called changes the output all the same."""
    if len(called) == len(net.layers):
        return False
    eps = net.channel_noise(draws[:1]).clone()
    columns = eps.split([layer.bank.form.shape.numel() for layer in net.layers.values()], 1)
    for layer, column in zip(net.layers.values(), columns, strict=True):
        if layer.bank.index in called:
            column.zero_()
    noisy = net.weights(draws[:1], eps)
    plain = replace(net, alpha=0.0).weights(draws[:1], eps)
    moved, still = (net.one_by_one(inputs, each, range(1)) for each in (noisy, plain))
    return not torch.equal(moved, still)


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
