"""Names of the EfficientNet of efficientnet-pytorch, as timm's EfficientNet has them.

Many public checkpoints, those of EfficientNet-Lite among them, have the names of the former. It
counts all blocks through, and norms from 0; timm counts the blocks of a stage, and norms from 1.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from torch import nn

_AROUND = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
_IN_BLOCK = {
    "_depthwise_conv": "conv_dw",
    "_se_reduce": "se.conv_reduce",
    "_se_expand": "se.conv_expand",
}
_WITHOUT_EXPANSION = _IN_BLOCK | {"_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
_WITH_EXPANSION = _IN_BLOCK | {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}


def timm_names(names: Collection[str], expected: Iterable[str]) -> dict[str, str]:
    """For every name that efficientnet-pytorch gives, the one that timm gives.

    Args:
        names: of the tensors in a file.
        expected: of the tensors of timm's network, which say how many blocks a stage has.

    >>> timm_names(["_fc.bias", "_blocks.0._bn1.bias"], ["blocks.0.0.bn1.bias"])
    {'_fc.bias': 'classifier.bias', '_blocks.0._bn1.bias': 'blocks.0.0.bn1.bias'}
    """
    places = (re.match(r"blocks\.(\d+)\.(\d+)\.", name) for name in expected)
    blocks = sorted({(int(place[1]), int(place[2])) for place in places if place})
    expanded = {name.split(".")[1] for name in names if "._expand_conv." in name}
    found = {}
    for name in names:
        block = re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(\w+)", name)
        part, _, rest = name.partition(".")
        if part in _AROUND:
            found[name] = f"{_AROUND[part]}.{rest}"
        elif block and int(block[1]) < len(blocks):
            parts = _WITH_EXPANSION if block[1] in expanded else _WITHOUT_EXPANSION
            stage, place = blocks[int(block[1])]
            if block[2] in parts:
                found[name] = f"blocks.{stage}.{place}.{parts[block[2]]}.{block[3]}"
    return found


def check_variant(net: nn.Module, path: str | Path) -> None:
    """Refuse timm's networks that do not compute as efficientnet-pytorch does.

    That one pads as TensorFlow does and has its eps of 1e-3, as those of timm that begin with tf_.
    Tensors are alike in both, and the wrong network is only somewhat worse.

    >>> check_variant(nn.BatchNorm2d(1, eps=1e-3), "b0.pth")
    """
    if any(isinstance(norm, nn.BatchNorm2d) and norm.eps != 1e-3 for norm in net.modules()):
        raise ValueError(
            f"The weights in {path} have the names of efficientnet-pytorch, which computes as "
            "TensorFlow does and this network does not: take the one whose name begins with tf_, "
            "as timm:tf_efficientnet_lite0."
        )
