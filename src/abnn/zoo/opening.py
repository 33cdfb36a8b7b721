"""A network by the name that a command line gives: where it is from, and its name there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from abnn.builders import nearest
from abnn.zoo import from_hub, from_module, from_timm, from_torchvision, from_zoo
from abnn.zoo.mismatch import other_channels, other_classes
from abnn.zoo.model import Model
from abnn.zoo.weights import put_weights, read_weights, sizes_in

RANDOM = "random"


class Source(NamedTuple):
    """Where networks are from: how one is opened, and whether its name says which weights."""

    open_named: Callable[[str, int | None, int | None, bool], Model]
    names_weights: Callable[[str], bool]
    form: str
    hint: str = ""


SOURCES = {
    "zoo": Source(from_zoo.open_named, from_zoo.names_weights, "zoo:NAME"),
    "torchvision": Source(
        from_torchvision.open_named,
        from_torchvision.names_weights,
        "torchvision:NAME[@WEIGHTS]",
        "name them (torchvision:{name}@DEFAULT), ",
    ),
    "timm": Source(
        from_timm.open_named,
        from_timm.names_weights,
        "timm:NAME[.TAG]",
        "name them (timm:{name}.TAG), ",
    ),
    "hf": Source(from_hub.open_named, from_hub.names_weights, "hf:ORG/NAME"),
    "module": Source(
        from_module.open_named, from_module.names_weights, "module:PACKAGE.MODULE:BUILDER"
    ),
}


def open_model(
    spec: str,
    *,
    weights: str | Path | None = None,
    classes: int | None = None,
    channels: int | None = None,
    trained: bool = True,
    seed: int | None = None,
) -> Model:
    """The network that a command line names, in eval mode, with what comes with it.

    Args:
        spec: zoo:NAME, torchvision:NAME[@WEIGHTS], timm:NAME[.TAG], hf:ORG/NAME (or hf:FOLDER), or
            module:PACKAGE.MODULE:BUILDER.
        weights: a file of weights, or the folder of a run of `abnn.train`; "random" for random
            ones. Default: those that `spec` names.
        classes: that the data has. A network with random weights gets so many; a trained one must
            have them. Default: what the network, or the file of weights, has.
        channels: of the images, likewise.
        trained: refuse random weights that nobody asked for.
        seed: of random weights; default: torch's own generator goes on.

    >>> model = open_model("zoo:resnet20", weights="random", classes=100)
    >>> model.net.linear.out_features, model.input.size, model.trained
    (100, (32, 32), False)
    """
    source, name = _parts(spec)
    file = None if weights is None or str(weights) == RANDOM else Path(weights)
    own = source.names_weights(name) and weights is None
    if trained and weights is None and not own:
        raise ValueError(
            f"{spec} has random weights; give its trained ones by --weights FILE, "
            f"{source.hint.format(name=name)}or say --weights {RANDOM} if that is what you want."
        )
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        if file is None:
            model = source.open_named(name, classes, channels, own)
        else:
            model = _filled(source, name, file, classes, channels)
    model.net.eval()
    if weights is not None:
        model = replace(model, trained=file is not None)
    return replace(model, source=spec)


def build(spec: str, classes: int | None = None, channels: int | None = None) -> nn.Module:
    """The network that a command line names, with random weights; nothing of them is downloaded.

    Args:
        spec: where it is from, and its name.
        classes: number of logits; default: what the network has by itself.
        channels: of its input images, likewise. A builder of the user's own decides both itself.

    >>> build("module:torch.nn:Identity")
    Identity()
    >>> build("zoo:small_resnet", classes=5)[-1]
    Linear(in_features=64, out_features=5, bias=True)
    """
    source, name = _parts(spec)
    source.names_weights(name)  # refuses what there is not
    return source.open_named(name, classes, channels, False).net


def _filled(
    source: Source, name: str, file: Path, classes: int | None, channels: int | None
) -> Model:
    """A network with the weights of a file, and as many classes and channels as these have."""
    weights = read_weights(file)
    model = source.open_named(name, classes, channels, False)
    heads, stem = sizes_in(weights, model.net, file)
    if heads is not None and classes is not None:
        raise other_classes(f"The network in {file}", heads, classes)
    if stem is not None and channels is not None:
        raise other_channels(f"The network in {file}", stem, channels)
    if (heads is not None or stem is not None) and source is not SOURCES["module"]:
        model = source.open_named(name, heads or classes, stem or channels, False)
    put_weights(model.net, weights, file)
    return model


def _parts(spec: str) -> tuple[Source, str]:
    kind, colon, name = spec.partition(":")
    if kind in SOURCES and name:
        return SOURCES[kind], name
    forms = [source.form for source in SOURCES.values()]
    wrong = colon and kind not in SOURCES and nearest(kind, SOURCES)
    raise ValueError(
        f"{spec!r} does not say where the network is from; write {', '.join(forms[:-1])} or "
        f"{forms[-1]}" + (f": {wrong}" if wrong else ".")
    )
