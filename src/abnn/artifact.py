"""Save and load: a small directory of safetensors and JSON that knows which network it fits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor, nn

from abnn.convert import convert
from abnn.digests import tensor_bytes
from abnn.files import write
from abnn.model import ABNN
from abnn.norm import BayesNorm, original_class
from abnn.outputs import Output

TENSORS, CONFIG = "modes.safetensors", "abnn.json"
VERSION = 1


class ArtifactError(ValueError):
    """A saved ABNN can't be used: it is missing, damaged, foreign, or of another network."""


def save(bnn: ABNN, path: str | PathLike[str]) -> None:
    """Write the modes of an ABNN to a directory; see `ABNN.save`."""
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise ArtifactError(f"{folder} is a file; give a directory to save to.")
    tensors = safetensors.torch.save(bank_tensors(bnn))
    config: dict[str, Any] = {
        "format": "abnn",
        "version": VERSION,
        "modes": bnn.modes,
        "alpha": bnn.alpha,
        "noise": bnn.noise,
        "stats": bnn.stats,
        "class_dim": bnn.class_dim,
        "custom_output": bnn.output is not None,
        "layers": _layers(bnn),
        "backbone": fingerprint(bnn),
        "fit": bnn.fitted,
        "tensors": hashlib.sha256(tensors).hexdigest(),
    }
    config["checksum"] = _checksum(config)
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / TENSORS, tensors)
    write(folder / CONFIG, (json.dumps(config, indent=2) + "\n").encode())


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
    config = _read_config(folder)
    if config["custom_output"] and output is None:
        raise ArtifactError(
            f"{folder} was converted with an output= function; pass it to load(..., output=) too."
        )
    tensors = _read_tensors(folder, config["tensors"])
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
    banks = {f"{name}.bank.".lstrip(".") for name in bnn.bayes_layers}
    structure, values = hashlib.sha256(), hashlib.sha256()
    for name, module in bnn.backbone.named_modules():
        if not any(f"{name}.".startswith(bank) for bank in banks):
            cls = original_class(module) if isinstance(module, BayesNorm) else type(module)
            structure.update(f"{name}:{cls.__name__}\n".encode())
    for name, tensor in bnn.backbone.state_dict().items():
        if not any(name.startswith(bank) for bank in banks):
            structure.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}\n".encode())
            values.update(tensor_bytes(tensor))
    return {"structure": structure.hexdigest(), "values": values.hexdigest()}


def _layers(bnn: ABNN) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "class": original_class(layer).__name__,
            "shape": list(layer.bank.form.shape),
        }
        for name, layer in bnn.bayes_layers.items()
    ]


def _checksum(config: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in config.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _read_config(folder: Path) -> dict[str, Any]:
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            raise ArtifactError(
                f"{folder} holds no saved ABNN: {name} is missing; give the directory that "
                "bnn.save wrote."
            )
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except ValueError as error:
        raise ArtifactError(f"{folder / CONFIG} is not valid JSON: {error}.") from error
    if not isinstance(config, dict) or config.get("format") != "abnn":
        raise ArtifactError(f"{folder / CONFIG} was not written by abnn.")
    if config.get("version") != VERSION:
        raise ArtifactError(
            f"{folder / CONFIG} has format version {config.get('version')!r}, and this abnn reads "
            f"version {VERSION}; use the abnn that wrote it, or save it again."
        )
    if config.get("checksum") != _checksum(config):
        raise ArtifactError(f"{folder / CONFIG} was changed after it was saved; save it again.")
    return config


def _read_tensors(folder: Path, expected: str) -> dict[str, Tensor]:
    data = (folder / TENSORS).read_bytes()
    if hashlib.sha256(data).hexdigest() != expected:
        raise ArtifactError(
            f"{folder / TENSORS} is damaged, or not the file that was saved with {CONFIG}; copy "
            "both again, or save again."
        )
    try:
        return safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise ArtifactError(f"{folder / TENSORS} is not a safetensors file: {error}.") from error


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
