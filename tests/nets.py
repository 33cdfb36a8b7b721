"""Small networks of every odd kind a user might have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def mlp(norm: type[nn.Module] = nn.BatchNorm1d, width: int = 8, classes: int = 3) -> nn.Sequential:
    """Four features in, three classes out, one norm, with statistics that are not trivial."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, width), norm(width), nn.ReLU(), nn.Linear(width, classes))
    if isinstance(net[1], nn.BatchNorm1d):
        net(3 * torch.randn(64, 4) + 1)
    return net.eval()


def cnn() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.BatchNorm2d(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    ).eval()


class Shared(nn.Module):
    """One norm with two parents, called twice."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.LayerNorm(4)
        self.first = nn.Sequential(nn.Linear(4, 4), norm)
        self.second = nn.Sequential(nn.Linear(4, 4), norm)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).relu())
        return y


class Containers(nn.Module):
    """Norms in a ModuleList, in a ModuleDict, and called from a plain Python list."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ModuleList([nn.LayerNorm(4), nn.LayerNorm(4)])
        self.named = nn.ModuleDict({"norm": nn.BatchNorm1d(4)})
        self.plain = [self.listed[1]]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.plain[0](self.listed[0](x) * torch.arange(1.0, 5.0))
        return self.named["norm"](y.tanh())  # type: ignore[no-any-return]


class TimeFirst(nn.Module):
    """Examples are the second dimension of what the norm sees."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.transpose(0, 1) + 1)  # [B, T, D] -> [T, B, D]
        z: Tensor = self.head(y.mean(0))
        return z


class Bypassing(nn.Module):
    """Uses the weight of a norm without calling the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.bypassed = nn.LayerNorm(4), nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.called(x).relu()
        x = nn.functional.layer_norm(x, (4,), self.bypassed.weight, self.bypassed.bias)
        y: Tensor = self.head(x)
        return y


class Answers(nn.Module):
    """Wraps the logits in whatever a network may return."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind = mlp(), kind

    def forward(self, x: Tensor) -> Any:
        logits = self.net(x)
        if self.kind == "model_output":
            from transformers.modeling_outputs import SequenceClassifierOutput

            return SequenceClassifierOutput(logits=logits)
        return {
            "tensor": logits,
            "tuple": (logits, x),
            "nested": ([logits], x),
            "out": {"out": logits, "aux": x},
            "logits": {"logits": logits, "loss": x.mean()},
            "odd": {"prediction": logits},
        }[self.kind]
