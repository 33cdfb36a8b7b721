"""Save and load: a small directory of safetensors and JSON that knows which network it fits."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from abnn.convert import convert
from abnn.model import ABNN
from abnn.norm import original_class
from abnn.outputs import Output
from abnn.store import CONFIG, ArtifactError, network_fingerprint, read_artifact, write_artifact

TENSORS = "modes.safetensors"


def save(bnn: ABNN, path: str | PathLike[str]) -> None:
    """Write the modes of an ABNN to a directory; see `ABNN.save`."""
    config: dict[str, Any] = {
        "modes": bnn.modes,
        "alpha": bnn.alpha,
        "noise": bnn.noise,
        "stats": bnn.stats,
        "class_dim": bnn.class_dim,
        "custom_output": bnn.output is not None,
        "layers": _layers(bnn),
        "backbone": fingerprint(bnn),
        "fit": bnn.fitted,
    }
    write_artifact(Path(path), "abnn", TENSORS, bank_tensors(bnn), config)


def load(path: str | PathLike[str], net: nn.Module, *, output: Output | None = None) -> ABNN:
    """Load a saved ABNN onto the network it was made from; the network is not changed.

    Args:
        path: the directory that `ABNN.save` wrote.
        net: the original network, with the weights it had then.
        output: the `output=` function of `convert`, if there was one; code is never saved.

    >>> import tempfile
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> bnn, x = convert(net, modes=2), torch.randn(1, 4)
    >>> with tempfile.TemporaryDirectory() as run:
    ...     bnn.save(run)
    ...     bool((load(run, net).predict(x).probs == bnn.predict(x).probs).all())
    True
    """
    folder = Path(path)
    config, tensors = read_artifact(folder, "abnn", TENSORS, "saved ABNN: bnn.save")
    if config["custom_output"] and output is None:
        raise ArtifactError(
            f"{folder} was converted with an output= function; pass it to load(..., output=) too."
        )
    names = [layer["name"] for layer in config["layers"]]
    missing = [name for name in names if name not in dict(net.named_modules())]
    if missing:
        raise ArtifactError(
            f"{folder} was made from another network: this {type(net).__name__} has no layer "
            f"{missing[0]!r}."
        )
    bnn = convert(
        net,
        modes=config["modes"],
        alpha=config["alpha"],
        noise=config["noise"],
        stats=config["stats"],
        layers=names,
        class_dim=config["class_dim"],
        output=output,
    )
    _check_backbone(folder, bnn, config)
    _check_tensors(folder, bnn, tensors)
    load_banks(bnn, tensors)
    bnn.fitted = config["fit"]
    return bnn


def bank_tensors(bnn: ABNN) -> dict[str, Tensor]:
    """Every tensor of the modes, by its name: `layer.gamma`, `layer.beta`, `layer.mean`, ..."""
    return {
        f"{name}.{key}".lstrip("."): value.detach().contiguous()
        for name, layer in bnn.bayes_layers.items()
        for key, value in layer.bank.state_dict().items()
    }


def load_banks(bnn: ABNN, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors of the modes into an ABNN, in place."""
    for name, value in bank_tensors(bnn).items():
        value.copy_(tensors[name])


def fingerprint(bnn: ABNN) -> dict[str, str]:
    """What identifies the backbone: a digest of its structure and one of its values.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> sorted(fingerprint(convert(net)))
    ['structure', 'values']
    """
    if bnn.sharded is not None:
        return bnn.sharded
    return network_fingerprint(
        bnn.backbone, {f"{name}.bank.".lstrip(".") for name in bnn.bayes_layers}
    )


def _layers(bnn: ABNN) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "class": original_class(layer).__name__,
            "shape": list(layer.bank.form.shape),
        }
        for name, layer in bnn.bayes_layers.items()
    ]


def _check_backbone(folder: Path, bnn: ABNN, config: Mapping[str, Any]) -> None:
    for saved, here in zip(config["layers"], _layers(bnn), strict=True):
        if saved != here:
            raise ArtifactError(
                f"{folder} was made from another network: layer {saved['name']!r} was a "
                f"{saved['class']} of shape {saved['shape']}, and here it is a {here['class']} of "
                f"shape {here['shape']}."
            )
    here = fingerprint(bnn)
    if here["structure"] != config["backbone"]["structure"]:
        raise ArtifactError(
            f"{folder} was made from another network: this one has other layers, shapes or dtypes."
        )
    if here["values"] != config["backbone"]["values"]:
        raise ArtifactError(
            f"{folder} was made from a network with other weights; load the checkpoint that it "
            "was converted from first."
        )


def _check_tensors(folder: Path, bnn: ABNN, tensors: Mapping[str, Tensor]) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    expected = {name: tuple(tensor.shape) for name, tensor in bank_tensors(bnn).items()}
    if shapes != expected:
        odd = sorted(set(shapes.items()) ^ set(expected.items()))[0]
        raise ArtifactError(f"{folder / TENSORS} does not fit its {CONFIG}: see {odd[0]!r}.")
