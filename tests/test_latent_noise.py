"""Noise on the norms of a network that was not fitted to it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import abnn
from abnn.baselines.latent_noise import LatentNoise
from nets import cnn, mlp


def members(method: LatentNoise, x: Tensor, samples: int, seed: int = 0) -> Tensor:
    with torch.no_grad():
        return torch.cat(list(method.member_logits(x, samples, seed)))


def test_the_variance_of_one_norm_is_that_of_its_output_times_the_noise() -> None:
    norm, x, std = nn.LayerNorm(5), 3 * torch.randn(4, 5) + 1, 0.1
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    nn.init.normal_(norm.bias)
    logits = members(LatentNoise(nn.Sequential(norm), std), x, samples=4000)
    scaled = (norm(x) - norm.bias).detach()  # x_hat * gamma
    torch.testing.assert_close(logits.var(0), (scaled * std).square(), rtol=0.1, atol=1e-6)
    eps = ((logits - norm(x).detach()) / (scaled * std))[:, 0]
    torch.testing.assert_close(logits, norm(x) + scaled * std * eps.unsqueeze(1))


@pytest.mark.parametrize("net, x", [(mlp(), torch.randn(3, 4)), (cnn(), torch.randn(3, 3, 8, 8))])
def test_without_noise_every_member_is_the_network(net: nn.Module, x: Tensor) -> None:
    logits = members(LatentNoise(net, std=0), x, samples=3)
    torch.testing.assert_close(logits, net(x).expand(3, -1, -1))


@pytest.mark.parametrize("std", [0.01, 0.1, 1.0])
def test_its_draws_are_those_of_an_abnn_of_one_mode(std: float) -> None:
    net, x = cnn(), torch.randn(3, 3, 8, 8)
    method, bnn = LatentNoise(net, std), abnn.convert(net, modes=1, alpha=std)
    mine = method.predict(x, keep_members=True, samples=5, seed=2)
    theirs = bnn.predict(x, samples=5, seed=2, keep_members=True)
    assert mine.members is not None
    assert theirs.members is not None
    assert torch.equal(mine.members, theirs.members)
    torch.testing.assert_close(members(method, x, 5, 2).softmax(2), mine.members)
    assert method.predict(x).samples_used == 16


def test_prediction_is_the_mean_over_the_members_in_any_batch() -> None:
    method, x = LatentNoise(cnn()), torch.randn(9, 3, 8, 8)
    mean = members(method, x, 7).softmax(2).mean(0)
    torch.testing.assert_close(method.predict(x, samples=7).probs, mean)
    parts = [method.predict(part, samples=7).probs for part in x.split(2)]
    torch.testing.assert_close(torch.cat(parts), mean)


def test_logits_are_found_where_they_are_said_to_be() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"scores": self.norm(x)}

    method = LatentNoise(Odd(), output=lambda result: result["scores"], class_dim=-1)
    x = torch.randn(2, 7, 3)
    assert method.predict(x).probs.shape == (2, 3, 7)
    assert members(method, x, 2).shape == (2, 2, 3, 7)


def test_nothing_is_added_trained_or_saved(tmp_path: Path) -> None:
    first = nn.Linear(4, 6)
    net = nn.Sequential(first, nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 3))
    before = copy.deepcopy(net.state_dict())
    method = LatentNoise(net, std=0.3)
    assert (method.num_added_parameters, method.num_added_bytes, method.fit_seconds) == (0, 0, 0)
    assert method.parameter_groups() == [{"params": []}]
    assert method.own_state() == {}
    assert method.arguments == {"std": 0.3, "class_dim": 1}
    method.train().predict(torch.randn(2, 4))
    assert net.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    shared = dict(method.named_parameters())["net.backbone.0.weight"]
    assert shared.data_ptr() == first.weight.data_ptr()
    method.save(tmp_path)
    assert (tmp_path / "method.safetensors").stat().st_size < 100
    again = LatentNoise.rebuild(net, None, method.arguments)
    assert again.network_state() == method.network_state()


def test_what_can_not_be_noisy_is_refused() -> None:
    with pytest.raises(ValueError, match="No normalisation layer was found"):
        LatentNoise(nn.Linear(4, 3))
    with pytest.raises(ValueError, match="samples=0 is not a whole number"):
        LatentNoise(mlp()).predict(torch.randn(2, 4), samples=0)
