"""The network that a command line names."""

from __future__ import annotations

import importlib
import inspect as introspection
import warnings
from typing import Any

from torch import nn

from abnn.builders import from_module, nearest
from abnn.cli import CommandError


def build(spec: str) -> nn.Module:
    """The network that a command line names, with random weights.

    >>> build("module:torch.nn:Identity")
    Identity()
    """
    source, _, name = spec.partition(":")
    builders = {"torchvision": _torchvision, "timm": _timm, "module": _module}
    if source not in builders or not name:
        raise CommandError(
            f"{spec!r} does not say where the network is from; write torchvision:NAME, timm:NAME "
            "or module:PACKAGE.MODULE:BUILDER."
        )
    return builders[source](name)


def _torchvision(name: str) -> nn.Module:
    models = _package("torchvision").models
    if name not in models.list_models():
        raise CommandError(
            f"torchvision has no model {name!r}; {nearest(name, models.list_models())}"
        )
    builder = models.get_model_builder(name)
    # Without weights of its own, a detector would still fetch those of its backbone.
    own = {"weights", "weights_backbone"} & set(introspection.signature(builder).parameters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about initial values, which do not matter here
        return _checked(builder(**dict.fromkeys(own)), name)


def _timm(name: str) -> nn.Module:
    timm = _package("timm")
    architecture = name.partition(".")[0]  # what follows the dot names weights
    if not timm.is_model(architecture):
        raise CommandError(
            f"timm has no model {name!r}; {nearest(architecture, timm.list_models())}"
        )
    return _checked(timm.create_model(architecture, pretrained=False), name)


def _module(name: str) -> nn.Module:
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
