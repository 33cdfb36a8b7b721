"""Memory on a CPU: channels last, as convolutions are fastest; freed memory that is kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from abnn.folding import channels_last, clone, first_tensor
from abnn.inference import inference
from abnn.order import random_states, set_random_states
from abnn.outputs import Inputs


def has_images(net: nn.Module, x: Tensor) -> bool:
    """Whether a network on the CPU gets images and has convolutions for them.

    >>> has_images(nn.Conv2d(3, 8, 3), torch.zeros(1, 3, 8, 8))
    True
    """
    return x.ndim == 4 and x.device.type == "cpu" and any(True for _ in _convolutions(net))


def _convolutions(net: nn.Module) -> Iterator[nn.Module]:
    for module in net.modules():
        # A weight of another type, such as one that is spread over processes, is not to be copied.
        plain = type(module._parameters.get("weight")) is nn.Parameter
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)) and plain:
            yield module


def learns_channels_last(
    net: nn.Module, forward: Callable[[Inputs], Tensor], inputs: Inputs
) -> bool:
    """Whether a network that is trained on a CPU can be given its images channels last.

    A trial in evaluation mode, which changes nothing, has to give the same result, and a gradient.
    Networks that flatten by memory order, as `x.view` does, can't.

    >>> images = torch.randn(2, 3, 8, 8)
    >>> net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
    >>> learns_channels_last(net, lambda x: net(*x), images)
    True
    >>> learns_channels_last(net, lambda x: net[0](*x).view(2, -1), images)
    False
    """
    if not has_images(net, first_tensor(inputs)):
        return False
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    results, states = [], random_states()
    try:
        with inference(net), torch.enable_grad():
            for images in (inputs, channels_last(inputs)):
                set_random_states(states)
                result = forward(clone(images))
                torch.autograd.grad(result.sum(), parameters, allow_unused=True)
                results.append(result.detach().double())
    except Exception:  # whatever is wrong shows when it is trained as it came
        return False
    finally:
        set_random_states(states)
    one, other = results
    # What is wrong is off by far more than rounding, which the layers may have multiplied.
    return torch.allclose(one, other, rtol=0, atol=1e-2 * float(one.abs().max()), equal_nan=True)


class ChannelsLast:
    """Copies of the weights of convolutions, made once and again only when weights have changed."""

    def __init__(self) -> None:
        self._net: nn.Module | None = None
        self._found: list[nn.Module] = []
        self._copies: dict[nn.Module, tuple[Any, Tensor]] = {}

    @contextmanager
    def weights(self, net: nn.Module) -> Iterator[None]:
        """Let the convolutions of a network hold their copies for a while."""
        held = []
        try:
            for module in self._convolutions(net):
                held.append((module._parameters, module._parameters["weight"]))
                module._parameters["weight"] = self._copy(module)  # type: ignore[assignment]
            yield
        finally:
            for parameters, weight in held:
                parameters["weight"] = weight

    def _convolutions(self, net: nn.Module) -> list[nn.Module]:
        if self._net is not net:
            self._net, self._found = net, list(_convolutions(net))
        return self._found

    def _copy(self, module: nn.Module) -> Tensor:
        weight: Tensor = module._parameters["weight"]  # type: ignore[assignment]
        # What is written in place, through whichever network shares it, has another version.
        version = 0 if weight.is_inference() else weight._version
        state = (weight.data_ptr(), version, weight.dtype, weight.device)
        kept = self._copies.get(module)
        if kept is None or kept[0] != state:
            kept = (state, weight.detach().contiguous(memory_format=torch.channels_last))
            self._copies[module] = kept
        return kept[1]


_KEPT = False


def keep_freed_memory() -> None:
    """Let the C library keep the memory of tensors of up to 31 MiB for the next ones; done once.

    glibc hands freed memory back to the system from a size on, and takes it anew, page by page, for
    the next tensor, which costs more than a small network's arithmetic. It raises that size to the
    largest block it has seen freed, so one that is never touched will do.

    >>> keep_freed_memory()
    """
    global _KEPT
    if not _KEPT:
        _KEPT = True
        torch.empty(31 * 2**20, dtype=torch.uint8)
