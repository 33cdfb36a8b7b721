"""Networks of timm, timm:NAME or timm:NAME.TAG, whose tag names trained weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from abnn.builders import nearest
from abnn.zoo.extras import fetching, package
from abnn.zoo.mismatch import other_channels, other_classes
from abnn.zoo.model import Input, Model


def names_weights(name: str) -> bool:
    """Whether weights are named by a tag; an unknown network and an unknown tag are refused.

    >>> names_weights("test_resnet.r160_in1k"), names_weights("test_resnet")
    (True, False)
    """
    timm = package("timm")
    architecture, dot, tag = name.partition(".")
    renamed = timm.models.get_deprecated_models().get(architecture)
    if renamed:
        raise ValueError(f"timm has another name for {architecture}; write timm:{renamed}.")
    known = timm.list_models()
    if architecture not in known:
        raise ValueError(f"timm has no model {architecture!r}; {nearest(architecture, known)}")
    tagged = timm.models.get_arch_pretrained_cfgs(architecture)
    tags = [name.partition(".")[2] for name, config in tagged.items() if config.has_weights]
    if dot and tag not in tags:
        raise ValueError(
            f"timm:{architecture} has no weights {tag!r}; it has {' and '.join(tags) or 'none'}."
        )
    return bool(dot)


def open_named(name: str, classes: int | None, channels: int | None, trained: bool) -> Model:
    """A network of timm.

    Input and labels are those of the tag, even where a file of weights takes the place of its own;
    without a tag, the input is that of timm's default tag.

    >>> model = open_named("test_resnet.r160_in1k", None, None, trained=False)
    >>> model.input.size, model.input.resized, model.classes[0]
    ((160, 160), (168, 168), 'tench, Tinca tinca')
    """
    timm = package("timm")
    source = f"timm:{name}"
    config = timm.get_pretrained_cfg(name)
    heads, expects = config.num_classes, config.input_size[0]
    if trained:
        if not heads:
            raise ValueError(
                f"{source} gives features and no classes; fine-tune it with a head on your data "
                "first, and give the result by --weights FILE."
            )
        if classes not in (None, heads):
            raise other_classes(source, heads, classes)
        if channels not in (None, expects):
            raise other_channels(source, expects, channels)
    wanted = {"num_classes": classes, "in_chans": channels}
    given = {key: value for key, value in wanted.items() if value is not None}
    if trained:
        file = f"https://huggingface.co/{config.hf_hub_id}" if config.hf_hub_id else config.url
        with fetching(source, f"download {file} elsewhere and give it by --weights PATH"):
            net = timm.create_model(name, pretrained=True, **given)
    else:
        net = timm.create_model(name, pretrained=False, **given)
    labels = _labels(timm, config) if "." in name and classes in (None, heads) else None
    # The size of training, where a tag has a larger one for tests too: a fit uses this one.
    data = timm.data.resolve_data_config({}, pretrained_cfg=config.to_dict())
    return Model(net, source, trained, input_of(data, channels or expects), labels)


def input_of(config: Mapping[str, Any], channels: int) -> Input:
    """The input that timm's data configuration describes, for images of so many channels.

    >>> config = {"input_size": (3, 96, 96), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    >>> config |= {"interpolation": "bicubic", "crop_pct": 1.0, "crop_mode": "squash"}
    >>> input_of(config, 3).squash, input_of(config, 1).mean
    (True, ())
    """
    normalised = len(config["mean"]) == channels
    return Input(
        tuple(config["input_size"][1:]),
        channels,
        config["mean"] if normalised else (),
        config["std"] if normalised else (),
        config["interpolation"],
        config["crop_pct"],
        squash=config["crop_mode"] == "squash",
    )


def _labels(timm: Any, config: Any) -> tuple[str, ...] | None:
    """ImageNet's, for a head of the size of one of its subsets."""
    subset = timm.data.infer_imagenet_subset(config.to_dict())
    return tuple(timm.data.ImageNetInfo(subset).label_descriptions()) if subset else None
