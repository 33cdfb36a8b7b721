"""Memory on a CPU: channels last, as convolutions are fastest; freed memory that is kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


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
