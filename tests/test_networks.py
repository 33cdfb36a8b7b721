from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from networks import NETWORKS, ODD_NETWORKS, TIMM, TORCHVISION, TRANSFORMERS, Network, build, run

every_network = pytest.mark.parametrize(
    "network", NETWORKS + ODD_NETWORKS, ids=lambda network: network.name
)


def test_the_catalogue_is_broad() -> None:
    names = {network.name for network in NETWORKS + ODD_NETWORKS}
    assert len(names) == len(NETWORKS + ODD_NETWORKS)
    assert len(NETWORKS) >= 55
    assert len(TORCHVISION) >= 14
    assert len(TRANSFORMERS) >= 12


def test_timm_networks_are_of_many_families() -> None:
    assert len({type(network.build()).__module__ for network in TIMM}) >= 15


@every_network
def test_logits_are_finite_repeatable_and_depend_on_the_input(network: Network) -> None:
    net, inputs = build(network), network.inputs(3)
    with torch.no_grad():
        first, second = run(net, inputs), run(net, inputs)
    assert first.isfinite().all()
    assert torch.equal(first, second)
    assert first.shape[network.class_dim] in (10, 64)  # classes, or tokens of a language model
    assert 1e-3 < first.std(0).mean() < 100  # the signal neither died out nor exploded


def test_building_twice_gives_the_same_network_and_leaves_the_seed_alone() -> None:
    state = torch.get_rng_state()
    one, two = (build(NETWORKS[0]).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_smaller_batch_is_the_beginning_of_a_larger_one() -> None:
    for network in NETWORKS:
        small, large = (_tensors(network.inputs(batch)) for batch in (2, 3))
        assert all(torch.equal(x, y[:2]) for x, y in zip(small, large, strict=True))


def _tensors(inputs: Any) -> list[Tensor]:
    if isinstance(inputs, dict):
        inputs = tuple(inputs.values())
    return list(inputs) if isinstance(inputs, tuple) else [inputs]
