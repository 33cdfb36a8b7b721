"""Load a file of weights into a network: all of it, or none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from abnn.zoo.efficientnet_names import check_variant, timm_names

# What trainers put around the weights. An average of the weights is taken where it is alone.
WRAPPERS = (
    "state_dict", "model", "model_state_dict", "net", "network",
    "ema", "model_ema", "state_dict_ema", "ema_state_dict",
)  # fmt: skip
# What they put before the names: data parallelism, and modules that hold the network.
PREFIXES = ("module.", "model.", "net.", "network.")
COMPILED = "_orig_mod."  # torch.compile's, before a name or within it
# What a folder holds its network as: abnn.train's, and the hub's.
FILES = ("network.safetensors", "model.safetensors", "pytorch_model.bin")


def load_weights(net: nn.Module, path: str | Path) -> None:
    """Copy the weights in a file into the network.

    What trainers put around the weights ("state_dict", "model", "model_state_dict", "ema", ...)
    and before their names ("module.", "model.", "net.", "_orig_mod.") is taken off. Batch counters
    may be missing. Where a module holds the whole network under one of these names, as Lightning's
    do, what it holds beside it is left out: losses, metrics.

    Args:
        net: the network; unchanged if the file does not fit.
        path: a `.safetensors` file, one that `torch.save` wrote, or a folder that `abnn.train` or
            `save_pretrained` made. Nothing in it is executed.

    >>> import tempfile
    >>> trained, net = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "linear.pt")
    ...     torch.save({"state_dict": trained.state_dict()}, path)
    ...     load_weights(net, path)
    >>> torch.equal(net.weight, trained.weight)
    True
    """
    put_weights(net, read_weights(path), path)


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The weights in a file, without what trainers put around them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     torch.save({"ema": {"weight": torch.ones(1)}, "epoch": 3}, f"{folder}/w.pt")
    ...     read_weights(f"{folder}/w.pt")
    {'weight': tensor([1.])}
    """
    path = _file(Path(path))
    try:
        if path.suffix == ".safetensors":
            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can fail anywhere in the decoder
        raise ValueError(
            f"{path} cannot be read{_code_in(path)}: it must be a .safetensors file, or a "
            "state_dict that torch.save wrote, with nothing but tensors and plain values beside it."
        ) from error
    while isinstance(content, Mapping):
        inside = next((content[w] for w in WRAPPERS if isinstance(content.get(w), Mapping)), None)
        if inside is None:
            break
        content = inside
    if not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
    ):
        raise ValueError(f"{path} holds no weights: save the state_dict of a network in it.")
    return dict(content)


def put_weights(net: nn.Module, weights: Mapping[str, Tensor], path: str | Path) -> None:
    """Copy weights into a network, all or none.

    Args:
        net: the network; unchanged if they do not fit.
        weights: by their names in the file.
        path: the file, for what is said of it.

    >>> net = nn.Linear(2, 1)
    >>> put_weights(net, {"model.weight": torch.ones(1, 2), "model.bias": torch.ones(1)}, "w.pt")
    >>> net.bias.item()
    1.0
    """
    expected = net.state_dict()
    weights = _named_as(net, expected, weights, path)
    lacking = _needed(expected) - weights.keys()
    missing = [name for name in expected if name in lacking]
    unexpected = [name for name in weights if name not in expected]
    reshaped = [
        f"{name} {list(tensor.shape)} instead of {list(expected[name].shape)}"
        for name, tensor in weights.items()
        if name in expected and tensor.shape != expected[name].shape
    ]
    retyped = [
        f"{name} {_kind(tensor)}"
        for name, tensor in weights.items()
        if name in expected and not _can_be(tensor, expected[name])
    ]
    problems = {"missing": missing, "unexpected": unexpected, "of another shape": reshaped}
    problems |= {"of another kind": retyped}
    found = [f"{kind} {_some(names)}" for kind, names in problems.items() if names]
    if found:
        raise ValueError(
            f"The weights in {path} do not fit {type(net).__name__} ({'; '.join(found)}): "
            "build the network they were trained with."
        )
    broken = [name for name, tensor in weights.items() if not bool(tensor.isfinite().all())]
    if broken:
        raise ValueError(
            f"The weights in {path} are not finite ({_some(broken)}): take those of an earlier "
            "checkpoint."
        )
    net.load_state_dict(weights, strict=False)


def sizes_in(
    weights: Mapping[str, Tensor], net: nn.Module, path: str | Path
) -> tuple[int | None, int | None]:
    """For how many classes and channels weights are, where these are all that does not fit.

    Each is None where it fits, and both are where anything else does not.

    >>> trained = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(8, 7))
    >>> net = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Linear(8, 10))
    >>> sizes_in(trained.state_dict(), net, "w.pt")
    (7, 1)
    >>> sizes_in(nn.Linear(5, 7).state_dict(), nn.Linear(4, 10), "w.pt")
    (None, None)
    """
    expected = net.state_dict()
    weights = _named_as(net, expected, weights, path)
    shapes = [(weights[name].shape, expected[name].shape) for name in expected.keys() & weights]
    heads, stems = set(), []
    for found, ours in shapes:
        if found == ours:
            continue
        if len(found) == len(ours) > 0 and found[1:] == ours[1:]:
            heads.add((found[0], ours[0]))
        elif len(found) == len(ours) == 4 and found[2:] == ours[2:] and found[0] == ours[0]:
            stems.append(found[1])
        else:
            return None, None
    if len(heads) > 1 or len(stems) > 1:
        return None, None
    return (heads.pop()[0] if heads else None), (stems[0] if stems else None)


def _named_as(
    net: nn.Module,
    expected: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    path: str | Path,
) -> dict[str, Tensor]:
    """The weights under the names that the network has for them, as far as these can be found."""
    found: dict[str, Tensor] = {}
    prefixes: dict[str, str] = {}
    for name, tensor in weights.items():
        prefix, ours = _split(name, expected)
        if ours in found and ours in expected:
            raise ValueError(
                f"{path} has two tensors for {ours}, one of them as {name}: save the state_dict of "
                "one network in it."
            )
        found[ours], prefixes[ours] = tensor, prefix
    if not expected.keys() & found.keys():
        renamed = timm_names(found, expected)
        if renamed:
            check_variant(net, path)
        found = {renamed.get(name, name): tensor for name, tensor in found.items()}
    elif _needed(expected) <= found.keys():
        # The network is complete, so what lies beside it in a module that holds it is not its own.
        holders = {prefixes[name] for name in expected if name in found}
        if len(holders) == 1 and "" not in holders:
            found = {name: found[name] for name in found if prefixes[name] in holders}
    if "n_averaged" not in expected:
        found.pop("n_averaged", None)  # the counter of torch's AveragedModel
    return found


def _needed(expected: Iterable[str]) -> set[str]:
    # Networks trained before torch 0.4.1 have no counters, and nothing but training uses them.
    return {name for name in expected if not name.endswith("num_batches_tracked")}


def _split(name: str, expected: Mapping[str, Tensor]) -> tuple[str, str]:
    """What was put before a name, and the name."""
    if name in expected:  # a network may have a part named "module" of its own
        return "", name
    ours = name = name.replace(COMPILED, "")
    while ours not in expected:
        prefix = next((prefix for prefix in PREFIXES if ours.startswith(prefix)), None)
        if prefix is None:
            break
        ours = ours.removeprefix(prefix)
    return name.removesuffix(ours), ours


def _file(path: Path) -> Path:
    path = path.expanduser()
    if path.is_dir():
        found = next((path / name for name in FILES if (path / name).is_file()), None)
        if found is None:
            raise FileNotFoundError(
                f"There is no {', '.join(FILES[:-1])} or {FILES[-1]} in the folder {path}: give "
                "the path of a file of weights."
            )
        return found
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}: give the path of a file of weights.")
    return path


def _code_in(path: Path) -> str:
    """What of a file is neither a tensor nor a plain value, as it names itself; nothing is run."""
    try:
        found = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    except Exception:  # it is damaged, or no file of torch's
        return ""
    return f" without running code ({_some(sorted(found))})" if found else ""


def _can_be(tensor: Tensor, wanted: Tensor) -> bool:
    """Whether a value can be copied without a loss but of precision."""
    plain = tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_complex()
    return plain and (
        wanted.is_complex() or tensor.is_floating_point() == wanted.is_floating_point()
    )


def _kind(tensor: Tensor) -> str:
    plain = tensor.layout == torch.strided and not tensor.is_meta
    text = tensor.dtype if plain else "without values" if tensor.is_meta else tensor.layout
    return str(text).removeprefix("torch.")


def _some(names: Iterable[str]) -> str:
    names = list(names)
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
