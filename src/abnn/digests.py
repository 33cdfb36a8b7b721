"""What identifies tensors: their bytes, and digests of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def digest(tensors: Mapping[str, Tensor]) -> str:
    """One digest of several named tensors."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + tensor_bytes(tensors[name]))
    return total.hexdigest()


def tensor_bytes(tensor: Tensor) -> bytes | memoryview:
    """The values of a tensor, whatever its device and memory format."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
