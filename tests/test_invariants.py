"""What must hold for every network: torchvision's, timm's, transformers' and plain ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import abnn
from abnn.outputs import call, logits_of
from networks import NETWORKS, Network, build

every_network = pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)

DRAWS = [abnn.Draw(seed=1, mode=m, index=i) for m in (0, 1) for i in (0, 1)]


@cache
def built(network: Network) -> nn.Module:
    """Built once a process: no test here may change it, which is a test in itself."""
    return build(network)


def convert(network: Network, **kwargs: Any) -> abnn.ABNN:
    return abnn.convert(built(network), class_dim=network.class_dim, **kwargs)


def original_logits(network: Network, x: Any) -> Tensor:
    return logits_of(call(built(network), x), class_dim=network.class_dim)


@contextmanager
def frozen(net: nn.Module) -> Iterator[None]:
    """As a backbone is: torch may pick another kernel, of other bits, for a weight that is not.

    It does so where no gradient is recorded, too.
    """
    before = [(parameter, parameter.requires_grad) for parameter in net.parameters()]
    net.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, wants in before:
            parameter.requires_grad_(wants)


def double(x: Any) -> Any:
    """The same inputs in double precision."""
    return pytree.tree_map(
        lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, x
    )


def batches(network: Network, count: int, size: int) -> list[Any]:
    """Inputs with random labels; mappings carry them under "labels", as transformers' do."""
    made: list[Any] = []
    for _ in range(count):
        x = network.inputs(size)
        with torch.no_grad():
            shape = original_logits(network, x).shape
        x, y = double(x), torch.randint(shape[1], (shape[0], *shape[2:]))
        if isinstance(x, dict):
            made.append({**x, "labels": y})
        else:
            made.append((*x, y) if isinstance(x, tuple) else (x, y))
    return made


@every_network
def test_without_noise_the_output_is_bit_equal_to_the_original(network: Network) -> None:
    bnn, x = convert(network, alpha=0, modes=2), network.inputs(2)
    with torch.no_grad():
        with frozen(built(network)):
            assert torch.equal(bnn.logits(x, DRAWS[:1])[0], original_logits(network, x))
        expected = original_logits(network, x)
        plain = logits_of(call(bnn.draw(mode=1), x), class_dim=network.class_dim)
        assert torch.equal(plain, expected)
        assert torch.equal(logits_of(call(bnn.restore(), x), class_dim=network.class_dim), expected)


@every_network
def test_folded_draws_equal_draws_one_by_one(network: Network) -> None:
    bnn, x = convert(network, alpha=0.1, modes=2), network.inputs(2)
    with torch.no_grad():
        looped = torch.cat([bnn.logits(x, [draw]) for draw in DRAWS])
        folded = bnn.logits(x, DRAWS)
    assert bnn.is_foldable(x)
    scale = looped.abs().max().item()
    torch.testing.assert_close(folded, looped, rtol=1e-3, atol=1e-4 * scale)
    assert (looped - looped.mean(0)).abs().max() > 1e-5 * scale


@every_network
def test_a_fit_moves_only_the_modes_and_modes_do_not_touch_each_other(network: Network) -> None:
    """In double precision: the statistics of three examples amplify every rounding error."""
    data = batches(network, count=2, size=3)
    net = copy.deepcopy(built(network)).double()
    before = copy.deepcopy(net.state_dict())
    recipe = abnn.Recipe(steps=2, lr=1e-3)
    together, apart = (abnn.convert(net, modes=2, class_dim=network.class_dim) for _ in range(2))
    abnn.fit(together, data, recipe)
    abnn.fit(apart, data, recipe, modes_at_once=1)

    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())
    restored = together.restore().state_dict()
    assert all(torch.equal(t, before[name]) for name, t in restored.items())
    layers = list(zip(together.bayes_layers.values(), apart.bayes_layers.values(), strict=True))
    for a, b in layers:
        for one, other in zip(
            a.bank.state_dict().values(), b.bank.state_dict().values(), strict=True
        ):
            size = one.abs().max().item() + 1e-6
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * size)
    assert (
        sum(not torch.equal(a.bank.gamma[0], a.bank.gamma[1]) for a, _ in layers) > len(layers) / 2
    )


@every_network
def test_a_saved_network_comes_back(network: Network, tmp_path: Path) -> None:
    bnn, x = convert(network, alpha=0.05, modes=2), network.inputs(2)
    for parameter in bnn.trainable_parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    bnn.save(tmp_path)
    loaded = abnn.load(tmp_path, built(network))
    assert torch.equal(loaded.predict(x, 1).probs, bnn.predict(x, 1).probs)


def test_there_are_at_least_forty_networks_of_three_libraries() -> None:
    libraries = {network.name.split("/")[0] for network in NETWORKS}
    assert len(NETWORKS) >= 40
    assert {"torchvision", "timm", "transformers"} <= libraries
