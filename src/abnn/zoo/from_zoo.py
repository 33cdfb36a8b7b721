"""Networks of the zoo, zoo:NAME: always with random weights."""

from __future__ import annotations

import inspect

from abnn.builders import nearest
from abnn.zoo.model import Model
from abnn.zoo.networks import INPUTS, NETWORKS


def names_weights(_name: str) -> bool:
    """A name of the zoo never says which trained weights it has."""
    return False


def open_named(name: str, classes: int | None, channels: int | None, _trained: bool) -> Model:
    """A network of the zoo.

    >>> open_named("resnet20", 100, None, False).input.size
    (32, 32)
    """
    builder = NETWORKS.get(name)
    if builder is None:
        raise ValueError(f"The zoo has no network {name!r}; {nearest(name, NETWORKS)}")
    takes = inspect.signature(builder).parameters
    wanted = {"num_classes": classes, "in_channels": channels}
    if channels == 3 and "in_channels" not in takes:
        del wanted["in_channels"]
    if channels is not None and "in_channels" in wanted and "in_channels" not in takes:
        raise ValueError(
            f"zoo:{name} is for images of three channels, and the data has {channels}; choose "
            "another network of the zoo, or make the images RGB."
        )
    net = builder(**{key: value for key, value in wanted.items() if value is not None})
    expected = INPUTS[name]
    if channels is not None and channels != expected.channels:
        expected = expected.with_(channels=channels, mean=(), std=())
    return Model(net, f"zoo:{name}", trained=False, input=expected)
