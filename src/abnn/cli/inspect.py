"""`abnn inspect`: what conversion would do to a network, without its weights."""

from __future__ import annotations

import difflib
import importlib
import inspect as introspection
import json
import os
import sys
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any

import typer
from torch import nn

import abnn
from abnn.cli import CommandError


def command(
    network: Annotated[
        str,
        typer.Argument(
            metavar="NETWORK", help="torchvision:NAME, timm:NAME or module:PACKAGE.MODULE:BUILDER."
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the norms of a network, and what abnn.convert does with each.

    The network is built with random weights; nothing is downloaded.

    Example: abnn inspect torchvision:resnet18
    """
    inspection = abnn.inspect(build(network))
    if as_json:
        parameters = {"parameters_per_mode": inspection.parameters_per_mode}
        typer.echo(json.dumps({"network": network} | parameters | asdict(inspection), indent=2))
    else:
        typer.echo(str(inspection))


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
            f"torchvision has no model {name!r}; {_nearest(name, models.list_models())}"
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
            f"timm has no model {name!r}; {_nearest(architecture, timm.list_models())}"
        )
    return _checked(timm.create_model(architecture, pretrained=False), name)


def _module(name: str) -> nn.Module:
    path, _, attribute = name.partition(":")
    if not attribute:
        raise CommandError(f"module:{name} names no builder; write module:{name}:BUILDER.")
    # A module of the current directory is found, as with `python -m`.
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(path)
        if not hasattr(module, attribute):
            raise CommandError(f"{path} has no {attribute!r}; {_nearest(attribute, vars(module))}")
        found = getattr(module, attribute)
        net = found if isinstance(found, nn.Module) or not callable(found) else found()
    except CommandError:
        raise
    except Exception as error:  # whatever the user's code does
        raise CommandError(
            f"module:{name} can't be built ({type(error).__name__}: {error}); name an importable "
            "module and a function of it that needs no arguments."
        ) from error
    finally:
        sys.path.remove(os.getcwd())
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


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0)
    return f"the nearest is {close[0]!r}." if close else "it has nothing at all."
