"""Networks of the zoo, zoo:NAME: always with random weights."""

from __future__ import annotations

import inspect

from abnn.builders import nearest
from abnn.zoo.model import Model
from abnn.zoo.networks import INPUTS, NETWORKS


def names_weights(name: str) -> bool:
    """Never; an unknown network is refused."""
    if name not in NETWORKS:
        raise ValueError(f"The zoo has no network {name!r}; {nearest(name, NETWORKS)}")
    return False


def open_named(name: str, classes: int | None, channels: int | None, _trained: bool) -> Model:
    """A network of the zoo.

    >>> open_named("resnet20", 100, None, False).input.size
    (32, 32)
    """
    builder = NETWORKS[name]
    takes = inspect.signature(builder).parameters
    wanted = {"num_classes": classes}
    if "in_channels" in takes:
        wanted["in_channels"] = channels
    elif channels not in (None, 3):
        raise ValueError(
            f"zoo:{name} is for images of three channels, and the data has {channels}; choose "
            "another network of the zoo, or convert the images."
        )
    net = builder(**{key: value for key, value in wanted.items() if value is not None})
    expected = INPUTS[name]
    if channels is not None and channels != expected.channels:
        expected = expected.with_(channels=channels, mean=(), std=())
    return Model(net, f"zoo:{name}", trained=False, input=expected)
