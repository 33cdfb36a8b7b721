"""A draw is data."""

import numpy as np
import pytest
import torch

from abnn.draws import STREAMS, Draw, all_draws, channel_noise, generator, local_noise


def test_noise_is_standard_normal() -> None:
    noise = torch.cat([channel_noise(Draw(0, 0, i), [1000])[0] for i in range(100)])
    assert noise.mean().abs() < 0.01
    assert (noise.std() - 1).abs() < 0.01
    assert (noise.pow(4).mean() - 3).abs() < 0.1


def test_every_seed_mode_draw_and_stream_has_noise_of_its_own() -> None:
    draws = [
        Draw(seed, mode, index, stream)
        for seed in (0, 1, 2**32, 2**32 + 1)
        for mode in (0, 1)
        for index in (0, 1)
        for stream in ("predict", "fit")
    ]
    noise = torch.stack([channel_noise(draw, [200])[0] for draw in draws])
    correlation = torch.corrcoef(noise) - torch.eye(len(draws))
    assert correlation.abs().max() < 0.35  # five standard deviations of 200 numbers


def test_noise_does_not_depend_on_what_was_drawn_before() -> None:
    alone = channel_noise(Draw(3, 1, 7), [5, 6])
    for draw in all_draws(range(4), 3, seed=3):
        channel_noise(draw, [5, 6])
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    assert all(
        torch.equal(a, b) for a, b in zip(alone, channel_noise(Draw(3, 1, 7), [5, 6]), strict=True)
    )


def test_the_numbers_stay_what_they_are() -> None:
    """Philox by its definition: a change here would change every published prediction."""
    bits = generator("predict", 0, 0, 0).bit_generator.random_raw(2).tolist()
    same = np.random.Philox(np.random.SeedSequence(0, spawn_key=(0, 0, 0))).random_raw(2).tolist()
    assert bits == same
    # New streams come last: a stream is its place in this list.
    assert STREAMS[:5] == ("predict", "fit", "probe", "prior", "data")


def test_layers_have_local_noise_of_their_own() -> None:
    a, b = (local_noise(Draw(0, 0, 0), layer, (50,)) for layer in (0, 1))
    assert torch.corrcoef(torch.stack([a, b]))[0, 1].abs() < 0.7
    assert not torch.equal(a, b)


def test_an_unknown_stream_is_an_error() -> None:
    with pytest.raises(ValueError, match="not in"):
        generator("weather", 0)
