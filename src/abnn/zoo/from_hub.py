"""Networks of transformers, hf:ORG/NAME from the hub or hf:FOLDER from a disk."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from abnn.zoo.extras import fetching, package, shows_progress
from abnn.zoo.from_timm import input_of
from abnn.zoo.mismatch import other_channels, other_classes
from abnn.zoo.model import Input, Model

# What a network's class ends with, and the class that builds it.
_HEADS = {
    "ForImageClassification": "AutoModelForImageClassification",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
}
_SAFE = {"trust_remote_code": False}  # code from the hub is neither run nor asked for
# Pillow's numbers.
_INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")


def names_weights(name: str) -> bool:
    """Always; what can't be a name on the hub, and is no folder, is refused."""
    _place(name)
    return True


def open_named(name: str, classes: int | None, channels: int | None, trained: bool) -> Model:
    """A network of transformers for images or for text, by what its configuration says.

    Args:
        name: ORG/NAME on the hub, or a folder that `save_pretrained` made.
        classes, channels: that it is to have.
        trained: load its weights; else only its configuration is fetched.

    >>> import tempfile, transformers
    >>> config = transformers.ViTConfig(hidden_size=12, num_hidden_layers=1)
    >>> config.architectures = ["ViTForImageClassification"]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     config.save_pretrained(folder)
    ...     model = open_named(folder, 3, None, trained=False)
    >>> model.net.classifier.out_features, model.input.size
    (3, (224, 224))
    """
    transformers = package("transformers")
    source, place, otherwise = f"hf:{name}", _place(name), _otherwise(name)
    with fetching(source, otherwise):
        config = transformers.AutoConfig.from_pretrained(place, **_SAFE)
    kind = _kind(source, config)
    if classes not in (None, config.num_labels):
        if trained:
            raise other_classes(source, config.num_labels, classes)
        config.num_labels = classes
    expects = getattr(config, "num_channels", None)
    if channels is not None and expects is not None and channels != expects:
        if trained:
            raise other_channels(source, expects, channels)
        config.num_channels = channels
    auto = getattr(transformers, _HEADS[kind])
    if trained:
        with fetching(source, otherwise), _quiet(transformers):
            net, report = auto.from_pretrained(
                place, config=config, output_loading_info=True, **_SAFE
            )
        _check_complete(source, report)
    else:
        net = auto.from_config(config, **_SAFE)
    expected = None
    if kind == "ForImageClassification":
        expected = _input(transformers, place, config, trained)
    # Logits have to be of the type of the images, which is float32.
    return Model(net.float(), source, trained, expected, _labels(config))


def _place(name: str) -> str:
    folder = Path(name).expanduser()
    if folder.is_dir():
        return str(folder)
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise FileNotFoundError(
            f"There is no folder {name}, and it is no name on the hub either: write hf:ORG/NAME, "
            "or the folder that save_pretrained made."
        )
    return name


def _otherwise(name: str) -> str:
    if Path(name).expanduser().is_dir():
        return "give a folder that save_pretrained made, with its config.json and its weights"
    return (
        "check its name and your connection, or fetch it elsewhere (hf download "
        f"{name} --local-dir FOLDER) and write hf:FOLDER"
    )


def _kind(source: str, config: Any) -> str:
    if config.model_type == "timm_wrapper":
        return "ForImageClassification"
    names = config.architectures or []
    kind = next((kind for kind in _HEADS for name in names if name.endswith(kind)), None)
    if kind is None:
        what = names[0] if names else f"network of type {config.model_type}"
        raise ValueError(
            f"{source} is a {what}, which classifies neither images nor text; choose one whose "
            "class ends with ForImageClassification or ForSequenceClassification, or fine-tune it "
            "as one."
        )
    return kind


def _check_complete(source: str, report: dict[str, Any]) -> None:
    lacking = sorted(report["missing_keys"]) + [names[0] for names in report["mismatched_keys"]]
    if lacking:
        raise ValueError(
            f"{source} has no trained weights for {lacking[0]} ({len(lacking)} of its tensors "
            "would be random); choose one that was fine-tuned for classification."
        )


def _labels(config: Any) -> tuple[str, ...] | None:
    names = tuple(config.id2label[number] for number in sorted(config.id2label))
    # What transformers calls classes that nobody named.
    return None if names == tuple(f"LABEL_{number}" for number in range(len(names))) else names


def _input(transformers: Any, place: str, config: Any, trained: bool) -> Input:
    """What the network's image processor does, from its attributes."""
    channels, size = getattr(config, "num_channels", 3), getattr(config, "image_size", None)
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(place, **_SAFE)
    except (OSError, ValueError):  # there is none, for all else could be fetched
        if trained:
            warnings.warn(
                f"hf:{place} does not say how its images are normalised; they stay from 0 to 1 "
                "unless you give their mean and std.",
                stacklevel=2,
            )
        return Input(size, channels)
    if hasattr(processor, "data_config"):  # of a network of timm's in transformers' clothes
        return input_of(processor.data_config, channels)
    normalised = processor.do_normalize and len(processor.image_mean) == channels
    return Input(
        **_shape(processor, size),
        channels=channels,
        mean=processor.image_mean if normalised else (),
        std=processor.image_std if normalised else (),
        interpolation=_INTERPOLATIONS[int(processor.resample)],
    )


def _shape(processor: Any, size: Any) -> dict[str, Any]:
    """Size, crop and squash of an image processor, in the four ways that these are written."""
    resize = dict(processor.size) if processor.do_resize and processor.size else {}
    if getattr(processor, "do_center_crop", False) and processor.crop_size:
        crop = dict(processor.crop_size)
        height, width = crop["height"], crop["width"]
        side = resize.get("shortest_edge") or resize.get("height") or height
        return {"size": (height, width), "crop": height / side, "squash": "height" in resize}
    side = resize.get("shortest_edge")
    if side is None:
        squashed = (resize["height"], resize["width"]) if "height" in resize else size
        return {"size": squashed, "squash": "height" in resize}
    # ConvNeXt's: a side below 384 is cropped to, and others are squashed to.
    crop_pct = getattr(processor, "crop_pct", None)
    if crop_pct and side < 384:
        return {"size": side, "crop": crop_pct}
    return {"size": side, "squash": bool(crop_pct)}


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without the bars and tables of loading: what matters of them becomes an error."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if not shows_progress():
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
