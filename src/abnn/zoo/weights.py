"""Load a file of weights into a network: all of it, or none."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn


def load_weights(net: nn.Module, path: str | Path) -> None:
    """Copy the weights in a file into the network.

    A dict around the weights ("state_dict" or "model") and the "module." that
    `nn.DataParallel` puts before every name are taken off. Batch counters may be missing.

    Args:
        net: the network; unchanged if the file does not fit.
        path: a `.safetensors` file, or one that `torch.save` wrote. Nothing in it is executed.

    >>> import tempfile
    >>> trained, net = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "linear.pt")
    ...     torch.save({"state_dict": trained.state_dict()}, path)
    ...     load_weights(net, path)
    >>> torch.equal(net.weight, trained.weight)
    True
    """
    expected = net.state_dict()
    weights = {
        # A network may have a part named "module" of its own.
        name if name in expected else name.removeprefix("module."): tensor
        for name, tensor in _read(Path(path)).items()
    }
    missing = [
        name
        for name in expected
        # Networks trained before torch 0.4.1 have none, and nothing but training uses it.
        if name not in weights and not name.endswith("num_batches_tracked")
    ]
    unexpected = [name for name in weights if name not in expected]
    reshaped = [
        f"{name} {list(tensor.shape)} instead of {list(expected[name].shape)}"
        for name, tensor in weights.items()
        if name in expected and tensor.shape != expected[name].shape
    ]
    problems = {"missing": missing, "unexpected": unexpected, "of another shape": reshaped}
    found = [f"{kind} {_some(names)}" for kind, names in problems.items() if names]
    if found:
        raise ValueError(
            f"The weights in {path} do not fit {type(net).__name__} ({'; '.join(found)}): "
            "build the network they were trained with."
        )
    net.load_state_dict(weights, strict=False)


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}: give the path of a file of weights.")
    try:
        if path.suffix == ".safetensors":
            content: object = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can fail anywhere in the decoder
        raise ValueError(
            f"{path} cannot be read: it must be a .safetensors file, "
            "or a state_dict that torch.save wrote."
        ) from error
    for wrapper in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
    ):
        raise ValueError(f"{path} holds no weights: save the state_dict of a network in it.")
    return dict(content)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
