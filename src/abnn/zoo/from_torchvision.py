"""Networks of torchvision, torchvision:NAME or torchvision:NAME@WEIGHTS."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from abnn.builders import nearest
from abnn.zoo.extras import fetching, package, shows_progress
from abnn.zoo.mismatch import other_classes
from abnn.zoo.model import Input, Model

# Their trained weights expect images normalised in another way than torchvision says, and change
# them themselves if they are built so.
_NORMALISE_THEMSELVES = ("googlenet", "inception_v3")


def names_weights(name: str) -> bool:
    """Whether weights are named behind an @; an unknown network and unknown weights are refused.

    >>> names_weights("resnet18@DEFAULT"), names_weights("resnet18")
    (True, False)
    """
    architecture, at, tag = name.partition("@")
    models = package("torchvision").models
    if architecture not in models.list_models():
        known = models.list_models()
        raise ValueError(
            f"torchvision has no model {architecture!r}; {nearest(architecture, known)}"
        )
    available = models.get_model_weights(architecture).__members__  # DEFAULT among them
    if at and tag not in available:
        raise ValueError(
            f"torchvision:{architecture} has no weights {tag!r}; it has "
            f"{' and '.join(available) or 'none'}."
        )
    return bool(at)


def open_named(name: str, classes: int | None, channels: int | None, trained: bool) -> Model:
    """A network of torchvision.

    Input and labels are those of the weights that are named, even where a file of weights takes
    their place; without a name, the input is that of the default weights.

    >>> model = open_named("resnet18@DEFAULT", None, None, trained=False)
    >>> model.input.size, model.input.resized, model.classes[0]
    ((224, 224), (256, 256), 'tench')
    """
    architecture, _, tag = name.partition("@")
    models = package("torchvision").models
    if channels not in (None, 3):
        raise ValueError(
            f"torchvision:{architecture} is for images of three channels, and the data has "
            f"{channels}; choose a network of timm or the zoo, or a builder of your own (module:)."
        )
    weights = models.get_model_weights(architecture).__members__.get(tag or "DEFAULT")
    labels = tuple(weights.meta.get("categories", ())) if tag else ()
    fits = not labels or classes in (None, len(labels))
    if trained and not fits:
        raise other_classes(f"torchvision:{name}", len(labels), classes)
    net = _built(models, architecture, weights if tag else None, trained, classes)
    expected = _input(weights.transforms()) if weights is not None else None
    return Model(net, f"torchvision:{name}", trained, expected, (labels if fits else ()) or None)


def _built(models: Any, architecture: str, weights: Any, trained: bool, classes: int | None) -> Any:
    builder = models.get_model_builder(architecture)
    # Without weights of its own, a detector would still fetch those of its backbone.
    own = {"weights", "weights_backbone"} & set(inspect.signature(builder).parameters)
    values: dict[str, Any] = dict.fromkeys(own)
    if classes is not None:
        values["num_classes"] = classes
    if weights is not None and architecture in _NORMALISE_THEMSELVES:
        values["transform_input"] = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about initial values, which do not matter here
        if not trained:
            return builder(**values)
        values |= {"weights": weights, "progress": shows_progress()}
        otherwise = f"download {weights.url} elsewhere and give it by --weights PATH"
        with fetching(f"torchvision:{architecture}@{weights.name}", otherwise):
            return builder(**values)


def _input(preset: Any) -> Input:
    """What a preset of torchvision's transforms does, from its attributes."""
    mean, std = getattr(preset, "mean", ()), getattr(preset, "std", ())
    mode = getattr(preset, "interpolation", None)
    interpolation = "bilinear" if mode is None else mode.value
    crops, resizes = getattr(preset, "crop_size", None), getattr(preset, "resize_size", None)
    if not crops or not resizes:  # of segmentation and detection, which take any size
        return Input(None, 3, mean, std, interpolation)
    height, width = crops[0], crops[-1]
    return Input((height, width), 3, mean, std, interpolation, height / resizes[0])
