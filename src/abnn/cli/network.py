"""The network that a command line names."""

from __future__ import annotations

import importlib
import inspect as introspection
import warnings
from typing import Any

from torch import nn

from abnn import zoo
from abnn.builders import from_module, nearest
from abnn.cli import CommandError


def build(spec: str, classes: int | None = None, channels: int | None = None) -> nn.Module:
    """The network that a command line names, with random weights.

    Args:
        spec: where it is from, and its name.
        classes: number of logits; default: what the network has by itself.
        channels: of its input images, likewise. A builder of the user's own decides both itself.

    >>> build("module:torch.nn:Identity")
    Identity()
    >>> build("zoo:small_resnet", classes=5)[-1]
    Linear(in_features=64, out_features=5, bias=True)
    """
    source, _, name = spec.partition(":")
    builders = {"torchvision": _torchvision, "timm": _timm, "zoo": _zoo, "module": _module}
    if source not in builders or not name:
        raise CommandError(
            f"{spec!r} does not say where the network is from; write torchvision:NAME, timm:NAME, "
            "zoo:NAME or module:PACKAGE.MODULE:BUILDER."
        )
    return builders[source](name, classes, channels)


def _zoo(name: str, classes: int | None, channels: int | None) -> nn.Module:
    builder = zoo.NETWORKS.get(name)
    if builder is None:
        raise CommandError(f"The zoo has no network {name!r}; {nearest(name, zoo.NETWORKS)}")
    wanted = {"num_classes": classes, "in_channels": channels}
    return builder(**{key: value for key, value in wanted.items() if value is not None})


def _torchvision(name: str, classes: int | None, channels: int | None) -> nn.Module:
    if channels not in (None, 3):
        raise CommandError(
            f"torchvision:{name} is for images of three channels, and the data has {channels}; "
            "choose a network of timm or the zoo, or a builder of your own (module:)."
        )
    models = _package("torchvision").models
    if name not in models.list_models():
        raise CommandError(
            f"torchvision has no model {name!r}; {nearest(name, models.list_models())}"
        )
    builder = models.get_model_builder(name)
    # Without weights of its own, a detector would still fetch those of its backbone.
    own = {"weights", "weights_backbone"} & set(introspection.signature(builder).parameters)
    values: dict[str, Any] = dict.fromkeys(own)
    if classes is not None:
        values["num_classes"] = classes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about initial values, which do not matter here
        return _checked(builder(**values), name)


def _timm(name: str, classes: int | None, channels: int | None) -> nn.Module:
    timm = _package("timm")
    architecture = name.partition(".")[0]  # what follows the dot names weights
    if not timm.is_model(architecture):
        raise CommandError(
            f"timm has no model {name!r}; {nearest(architecture, timm.list_models())}"
        )
    wanted = {"num_classes": classes, "in_chans": channels}
    given = {key: value for key, value in wanted.items() if value is not None}
    return _checked(timm.create_model(architecture, pretrained=False, **given), name)


def _module(name: str, _classes: int | None, _channels: int | None) -> nn.Module:
    try:
        net = from_module(name)
    except ValueError as error:
        raise CommandError(str(error)) from error
    return _checked(net, f"module:{name}")


def _checked(net: Any, name: str) -> nn.Module:
    if not isinstance(net, nn.Module):
        raise CommandError(f"{name} is a {type(net).__name__}; name what builds a torch.nn.Module.")
    return net


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise CommandError(f"{name} is not installed: pip install {name}.") from error
