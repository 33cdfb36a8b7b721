"""Networks that run with other weights than their own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from abnn.baselines import Single
from abnn.baselines.sampled import logits_with, noise_like
from abnn.draws import Draw, channel_noise
from nets import Answers, cnn, mlp


class Tied(nn.Module):
    """Tokens are embedded by the weight that also classifies them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        y: Tensor = self.head(self.embed(tokens).mean(1))
        return y


class InPlace(nn.Linear):
    """Writes to its input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3)).eval()


@pytest.mark.parametrize("net, x", [(mlp(), torch.ones(2, 4)), (encoder(), torch.ones(2, 3, 4))])
def test_other_weights_give_what_the_network_gives_that_holds_them(
    net: nn.Module, x: Tensor
) -> None:
    other = copy.deepcopy(net)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.copy_(tensor + torch.rand(tensor.shape).to(tensor.dtype))
    before = copy.deepcopy(net.state_dict())
    with torch.no_grad():
        assert torch.allclose(logits_with(Single(net), x, other.state_dict()), other(x), atol=1e-5)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())


def test_tied_weights_are_replaced_together() -> None:
    net, tokens, weight = Tied(), torch.tensor([[0, 1], [2, 3]]), torch.randn(5, 4)
    logits = logits_with(Single(net), tokens, {"embed.weight": weight})
    expected = nn.functional.linear(weight[tokens].mean(1), weight, net.head.bias)
    assert torch.equal(logits, expected)


def test_the_logits_are_found_in_what_the_network_returns() -> None:
    single = Single(Answers("nested"))
    assert torch.equal(logits_with(single, torch.ones(2, 4), {}), mlp()(torch.ones(2, 4)))


def test_the_statistics_of_norms_are_updated_in_the_tensors_that_are_given() -> None:
    net = cnn().train()
    given = {name: buffer.clone() for name, buffer in net.named_buffers()}
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    twin, x = copy.deepcopy(net), torch.randn(2, 3, 8, 8)
    logits_with(Single(net), x, given)
    twin(x)
    for name, buffer in twin.named_buffers():
        assert torch.equal(given[name], buffer)
        assert torch.equal(dict(net.named_buffers())[name], before[name])


def test_a_network_that_writes_to_its_input_has_one_of_its_own() -> None:
    x = torch.ones(2, 3)
    logits_with(Single(InPlace(3, 2)), x, {})
    assert torch.equal(x, torch.ones(2, 3))


def test_noise_is_that_of_the_draw_in_the_order_of_the_tensors() -> None:
    like = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.float64)}
    state = torch.get_rng_state()
    noise = noise_like(like, seed=1, member=2, draw=3)
    a, b = channel_noise(Draw(1, 2, 3), [6, 4])
    assert torch.equal(noise["a"], a.view(2, 3))
    assert torch.equal(noise["b"], b.double())
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_differs_for_every_seed_member_and_draw() -> None:
    like, keys = {"a": torch.zeros(8)}, [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    noise = torch.stack([noise_like(like, *key)["a"] for key in keys])
    assert len(torch.unique(noise)) == noise.numel()
