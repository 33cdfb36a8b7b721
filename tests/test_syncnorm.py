"""Batch statistics over processes: their gradient, and the norms they are right for."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import abnn
from abnn.distributed import World
from abnn.syncnorm import Coupled, WholeBatchOfNetwork, batch_statistics, whole_batch
from nets import cnn


class Threads:
    """Adds up over two threads, as processes do."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=60)
        self.given: dict[int, Tensor] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        self.given[threading.get_ident()] = tensor.clone()
        self.barrier.wait()
        total = torch.stack(list(self.given.values())).sum(0)
        self.barrier.wait()
        return tensor.copy_(total)


def test_two_parts_have_the_output_and_the_gradient_of_the_whole() -> None:
    x = 50 + torch.randn(2, 7, 3, 4, dtype=torch.float64)
    upstream = torch.randn_like(x)
    whole = x.clone().requires_grad_()
    mean = whole.mean((1, 3), keepdim=True)
    var = whole.var((1, 3), correction=0, keepdim=True)
    expected = (whole - mean) / (var + 1e-5).sqrt()
    expected.backward(upstream)

    total, parts = Threads(), [x[:, :3].clone().requires_grad_(), x[:, 3:].clone().requires_grad_()]
    outputs: list[Any] = [None, None]

    def run(i: int) -> None:
        mean, var, n = batch_statistics(parts[i], total)
        x = Coupled.apply(parts[i], mean, var, n, 1e-5, total)
        outputs[i] = (x - mean[:, None, :, None]) / (var[:, None, :, None] + 1e-5).sqrt()
        outputs[i].backward(upstream[:, :3] if i == 0 else upstream[:, 3:])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(torch.cat(outputs, 1), expected.detach())
    torch.testing.assert_close(torch.cat([p.grad for p in parts], 1), whole.grad)  # type: ignore[misc]


def test_large_values_keep_their_variance() -> None:
    """A sum of squares in single precision would lose it."""
    x = 1e4 + torch.randn(1, 4096, 2)
    _, var, _ = batch_statistics(x, World().sum_)
    torch.testing.assert_close(
        var.float(), x.double().var(1, correction=0).float(), rtol=1e-3, atol=0
    )


class Doubling(nn.BatchNorm2d):
    """Not a batch norm, though of its class: what it does in training is something else."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x if self.training else x)


class Halfway(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x.mean(0, keepdim=True) if self.training else 0)


def with_norm(norm: nn.Module) -> nn.Module:
    net = cnn()
    net[4] = norm
    return net.eval()


@pytest.mark.parametrize("norm", [Doubling, Halfway])
def test_a_batch_norm_of_another_kind_is_refused(norm: Any) -> None:
    with pytest.raises(ValueError, match=f"'4' .{norm.__name__}.*split='modes'"):
        whole_batch(abnn.convert(with_norm(norm(8))), World())


def test_a_norm_of_timm_is_tried_and_found_right() -> None:
    norm_act = pytest.importorskip("timm.layers.norm_act")
    assert (
        len(whole_batch(abnn.convert(with_norm(norm_act.BatchNormAct2d(8))), World()).layers) == 2
    )


def test_batch_statistics_of_a_norm_that_is_not_bayesian_are_refused() -> None:
    net = with_norm(nn.BatchNorm2d(8, track_running_stats=False))
    with pytest.raises(ValueError, match="'4' normalises by the statistics of its batch"):
        whole_batch(abnn.convert(net, layers="1"), World())


@pytest.mark.parametrize("norm", [Doubling, Halfway])
def test_an_ordinary_network_keeps_a_batch_norm_of_another_kind_as_it_is(norm: Any) -> None:
    net = with_norm(norm(8))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    assert WholeBatchOfNetwork(net, World().sum_).layers == [net[1]]  # type: ignore[index]
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("track", [True, False])
def test_alone_an_ordinary_batch_norm_does_what_it_does_by_itself(
    momentum: Any, track: bool
) -> None:
    own, here = (
        nn.BatchNorm2d(3, momentum=momentum, track_running_stats=track).double() for _ in range(2)
    )
    whole = WholeBatchOfNetwork(here, World().sum_)
    for _ in range(3):
        x = 5 + torch.randn(4, 3, 2, 2, dtype=torch.float64)
        upstream, inputs = torch.randn_like(x), [x.clone().requires_grad_() for _ in range(2)]
        own(inputs[0]).backward(upstream)
        with whole.attached():
            whole.run(lambda inputs=inputs: here(inputs[1])).backward(upstream)  # type: ignore[misc]
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    torch.testing.assert_close(dict(here.state_dict()), dict(own.state_dict()))
    torch.testing.assert_close(here.weight.grad, own.weight.grad)
    assert not here._forward_hooks
