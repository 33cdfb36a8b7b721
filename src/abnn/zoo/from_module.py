"""Networks of the user's own, module:PACKAGE.MODULE:BUILDER."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from abnn.builders import from_module
from abnn.zoo.mismatch import other_classes
from abnn.zoo.model import Input, Model


def names_weights(_name: str) -> bool:
    """Always: what a builder returns counts as trained."""
    return True


def open_named(name: str, classes: int | None, _channels: int | None, _trained: bool) -> Model:
    """What the builder returns: a Model, or a network, with its attributes `input` and `classes`.

    It decides about the number of classes and channels itself.

    >>> open_named("torch.nn:Identity", None, None, True).net
    Identity()
    """
    found = from_module(name)
    model = found if isinstance(found, Model) else Model(found)
    if not isinstance(model.net, nn.Module):
        raise ValueError(
            f"module:{name} is a {type(model.net).__name__}; name what builds a torch.nn.Module."
        )
    if model is not found:
        model = replace(model, input=_input(model.net), classes=_labels(model.net))
    if model.classes is not None and classes not in (None, len(model.classes)):
        raise other_classes(f"module:{name}", len(model.classes), classes)
    return replace(model, source=f"module:{name}")


def _input(net: nn.Module) -> Input | None:
    found = getattr(net, "input", None)
    return found if isinstance(found, Input) else None


def _labels(net: nn.Module) -> tuple[str, ...] | None:
    found: Any = getattr(net, "classes", None)
    texts = isinstance(found, (tuple, list)) and all(isinstance(name, str) for name in found)
    return tuple(found) if texts and found else None
