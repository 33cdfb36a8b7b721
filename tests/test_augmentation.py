"""Test-time augmentation: what the noise does, and that mirrored members are mirrored back."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from abnn.baselines.augmentation import TestTimeAugmentation
from nets import cnn, mlp


def members(method: TestTimeAugmentation, x: object, samples: int, seed: int = 0) -> Tensor:
    with torch.no_grad():
        return torch.cat(list(method.member_logits(x, samples, seed)))


def images(B: int = 3, C: int = 3, size: int = 8) -> Tensor:
    return torch.randn(B, C, size, size, generator=torch.Generator().manual_seed(0))


def pixelwise() -> nn.Module:
    """Logits of pixels that see more of what is to their left than to their right."""
    net = nn.Conv2d(3, 4, 3, padding=1)
    assert not torch.equal(net.weight, net.weight.flip(-1))
    return net


@pytest.mark.parametrize("std", [0.08, 0.5])
def test_the_variance_of_a_linear_network_is_that_of_its_weights(std: float) -> None:
    net, x = nn.Linear(20, 3), torch.randn(2, 20)
    logits = members(TestTimeAugmentation(net, std), x, samples=4000)
    expected = (std**2 * net.weight.detach().square().sum(1)).expand(2, 3)
    torch.testing.assert_close(logits.var(0), expected, rtol=0.1, atol=0)
    standard_error = expected.sqrt() / 4000**0.5
    assert ((logits.mean(0) - net(x)).abs() < 4 * standard_error).all()


def test_without_noise_and_flip_every_member_is_the_network() -> None:
    net, x = cnn(), images()
    logits = members(TestTimeAugmentation(net, std=0, flip=False), x, samples=3)
    torch.testing.assert_close(logits, net(x).expand(3, -1, -1))


def test_every_second_image_is_mirrored() -> None:
    net, x = cnn(), images()
    logits = members(TestTimeAugmentation(net, std=0), x, samples=4)
    torch.testing.assert_close(logits[::2], net(x).expand(2, -1, -1))
    torch.testing.assert_close(logits[1::2], net(x.flip(-1)).expand(2, -1, -1))
    assert not torch.allclose(logits[0], logits[1])


def test_a_network_that_is_blind_to_flips_has_equal_members() -> None:
    net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4))
    logits = members(TestTimeAugmentation(net, std=0), images(), samples=2)
    torch.testing.assert_close(logits[0], logits[1])


def test_features_are_never_mirrored() -> None:
    net, x = mlp(), torch.randn(2, 4)
    flipped, plain = (members(TestTimeAugmentation(net, flip=f), x, 4) for f in (True, False))
    assert torch.equal(flipped, plain)


def test_logits_of_pixels_are_mirrored_back() -> None:
    where = nn.Conv2d(3, 3, 1)  # looks at nothing but the pixel itself
    logits = members(TestTimeAugmentation(where, std=0), images(), samples=2)
    torch.testing.assert_close(logits[0], logits[1])
    net, x = pixelwise(), images()
    logits = members(TestTimeAugmentation(net, std=0), x, samples=2)
    torch.testing.assert_close(logits[1], net(x.flip(-1)).flip(-1))


def test_classes_may_be_the_last_dimension_of_pixels() -> None:
    class ClassesLast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = pixelwise()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).movedim(1, -1)  # type: ignore[no-any-return]

    net, x = ClassesLast(), images()
    logits = members(TestTimeAugmentation(net, std=0, class_dim=-1), x, samples=2)
    torch.testing.assert_close(logits[1], net.net(x.flip(-1)).flip(-1))


def test_an_example_gets_the_same_noise_in_any_batch_and_any_chunk() -> None:
    method, x = TestTimeAugmentation(cnn()), images(B=40)
    alone = torch.cat([members(method, row, samples=5, seed=3) for row in x.split(1)], 1)
    torch.testing.assert_close(members(method, x, samples=5, seed=3), alone)
    torch.testing.assert_close(members(method, x, samples=2, seed=3), alone[:2])
    assert not torch.allclose(members(method, x, samples=5, seed=4), alone)


def test_members_differ_and_predicting_leaves_the_global_generator_alone() -> None:
    method, x = TestTimeAugmentation(cnn()), images()
    state = torch.get_rng_state()
    found = method.predict(x, samples=6, keep_members=True).members
    assert found is not None
    assert len(found.flatten(1).unique(dim=0)) == 6
    assert torch.equal(torch.get_rng_state(), state)


class MixesRows(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class TimeLeads(nn.Linear):
    """Takes `[T, B, D]`."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mean(0))


@pytest.mark.parametrize(
    "net, shape", [(MixesRows(4, 3), (5, 4)), (TimeLeads(4, 3), (5, 2, 4))], ids=["rows", "time"]
)
def test_what_can_not_share_a_pass_runs_one_after_another(
    net: nn.Module, shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape)
    method = TestTimeAugmentation(net)
    with pytest.warns(UserWarning, match="run one after another"):
        together = members(method, x, samples=4)
    with warnings.catch_warnings():  # said once
        warnings.simplefilter("error")
        assert torch.equal(members(method, x, samples=4), together)
    assert torch.equal(members(method, x, samples=1), together[:1])


def test_a_network_that_writes_to_its_input_changes_nothing() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(2)

    x = torch.randn(2, 3)
    before = x.clone()
    logits = members(TestTimeAugmentation(Writes(), std=0), x, samples=3)
    assert torch.equal(x, before)
    assert torch.equal(logits, 2 * x.expand(3, -1, -1))


def test_of_several_inputs_the_first_gets_the_noise() -> None:
    class Two(nn.Module):
        def forward(self, image: Tensor, shift: Tensor) -> Tensor:
            return image.flatten(1)[:, :2] + shift.unsqueeze(1)

    x, shift = images(), torch.tensor([10, 20, 30])
    method = TestTimeAugmentation(Two(), flip=False)
    logits = members(method, {"image": x, "shift": shift}, samples=3)
    torch.testing.assert_close(logits, members(method, (x, shift), samples=3))
    assert ((logits - x.flatten(1)[:, :2] - shift.unsqueeze(1)).abs() < 0.5).all()


def test_what_can_not_be_augmented_is_refused() -> None:
    with pytest.raises(ValueError, match="flip='left' must be True or False"):
        TestTimeAugmentation(cnn(), flip="left")  # type: ignore[arg-type]
    tokens = nn.Embedding(5, 3)
    with pytest.raises(ValueError, match="input is of int64, to which no noise can be added"):
        TestTimeAugmentation(tokens).predict(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="samples=0 is not a whole number of at least 1"):
        TestTimeAugmentation(cnn()).predict(images(), samples=0)


def test_what_can_not_be_mirrored_is_refused() -> None:
    patches = nn.Sequential(pixelwise(), nn.Flatten(2))  # [B, K, T]
    with pytest.raises(ValueError, match=r"shape \[4, 64\].*use flip=False"):
        TestTimeAugmentation(patches).predict(images())
    assert TestTimeAugmentation(patches, flip=False).predict(images()).probs.shape == (3, 4, 64)
    pair = (images(), images())
    with pytest.raises(ValueError, match="Only the first input is mirrored"):
        TestTimeAugmentation(cnn()).predict(pair)
