"""A directory of safetensors and JSON that knows what it belongs to: what all artefacts share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor, nn

from abnn.digests import tensor_bytes
from abnn.files import write
from abnn.norm import BayesNorm, original_class

CONFIG = "abnn.json"
VERSION = 1


class ArtifactError(ValueError):
    """Something saved can't be used: it is missing, damaged, foreign, or of another network."""


def write_artifact(
    folder: Path, kind: str, file: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> None:
    """Write tensors and plain values to a directory, with checksums of both.

    Args:
        folder: the directory; it is made if it does not exist.
        kind: what is saved, such as "abnn".
        file: the name of the file of tensors.
        tensors: by their names; contiguous, and each with memory of its own.
        config: plain values.
    """
    if folder.exists() and not folder.is_dir():
        raise ArtifactError(f"{folder} is a file; give a directory to save to.")
    data = safetensors.torch.save(dict(tensors))
    whole: dict[str, Any] = {"format": kind, "version": VERSION, **config}
    whole["tensors"] = hashlib.sha256(data).hexdigest()
    whole["checksum"] = _checksum(whole)
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / file, data)
    write(folder / CONFIG, (json.dumps(whole, indent=2) + "\n").encode())


def read_artifact(
    folder: Path, kind: str, file: str, what: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `write_artifact` wrote, or an error that says what is wrong with it.

    Args:
        folder, kind, file: as it was written.
        what: what is to be read and what writes it, as in "saved ABNN: bnn.save".
    """
    thing, writer = what.split(": ")
    for name in (CONFIG, file):
        if not (folder / name).is_file():
            raise ArtifactError(
                f"{folder} holds no {thing}: {name} is missing; give the directory that "
                f"{writer} wrote."
            )
    config = _read_config(folder, kind, thing)
    return config, _read_tensors(folder / file, config["tensors"])


def network_fingerprint(net: nn.Module, leave_out: Collection[str] = ()) -> dict[str, str]:
    """What identifies a network: a digest of its structure and one of its values.

    Args:
        net: the network.
        leave_out: beginnings of the names of what does not belong to it.

    >>> one, other = nn.Linear(2, 3), nn.Linear(2, 3)
    >>> a, b = network_fingerprint(one), network_fingerprint(other)
    >>> a["structure"] == b["structure"], a["values"] == b["values"]
    (True, False)
    """
    values = hashlib.sha256()
    for _, tensor in _tensors(net, leave_out):
        values.update(tensor_bytes(tensor))
    return {"structure": structure_of(net, leave_out), "values": values.hexdigest()}


def structure_of(net: nn.Module, leave_out: Collection[str] = ()) -> str:
    """A digest of a network's modules, and of the names, shapes and types of its tensors.

    >>> structure_of(nn.Linear(2, 3)) == structure_of(nn.Linear(2, 3, bias=False))
    False
    """
    structure = hashlib.sha256()
    for name, module in net.named_modules():
        if not any(f"{name}.".startswith(start) for start in leave_out):
            cls = original_class(module) if isinstance(module, BayesNorm) else type(module)
            structure.update(f"{name}:{cls.__name__}\n".encode())
    for name, tensor in _tensors(net, leave_out):
        structure.update(f"{name}:{tuple(tensor.shape)}:{tensor.dtype}\n".encode())
    return structure.hexdigest()


def _tensors(net: nn.Module, leave_out: Collection[str]) -> list[tuple[str, Tensor]]:
    return [
        (name, tensor)
        for name, tensor in net.state_dict().items()
        if isinstance(tensor, Tensor) and not any(name.startswith(start) for start in leave_out)
    ]


def _checksum(config: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in config.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _read_config(folder: Path, kind: str, thing: str) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except ValueError as error:
        raise ArtifactError(f"{folder / CONFIG} is not valid JSON: {error}.") from error
    if not isinstance(config, dict) or not str(config.get("format")).startswith("abnn"):
        raise ArtifactError(f"{folder / CONFIG} was not written by abnn.")
    if config["format"] != kind:
        raise ArtifactError(f"{folder} holds no {thing}, but what {config['format']!r} stands for.")
    if config.get("version") != VERSION:
        raise ArtifactError(
            f"{folder / CONFIG} has format version {config.get('version')!r}, and this abnn reads "
            f"version {VERSION}; use the abnn that wrote it, or save it again."
        )
    if config.get("checksum") != _checksum(config):
        raise ArtifactError(f"{folder / CONFIG} was changed after it was saved; save it again.")
    return config


def _read_tensors(file: Path, expected: str) -> dict[str, Tensor]:
    data = file.read_bytes()
    if hashlib.sha256(data).hexdigest() != expected:
        raise ArtifactError(
            f"{file} is damaged, or not the file that was saved with {CONFIG}; copy both again, or "
            "save again."
        )
    try:
        return safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise ArtifactError(f"{file} is not a safetensors file: {error}.") from error
