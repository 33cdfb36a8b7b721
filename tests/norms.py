"""Every kind of norm layer the library supports, each with an input it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Norm:
    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of one example
    family: str


def norm(item: Norm) -> nn.Module:
    """The layer with weights, biases and statistics that are not the trivial ones."""
    torch.manual_seed(1)
    layer = item.build()
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        if tensor.is_floating_point():
            spread = torch.rand_like(tensor)
            tensor.data = 0.5 + spread if "var" in name or "weight" in name else spread - 0.5
    return layer.eval()


def example(item: Norm, batch: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(2)
    return (2 * torch.randn(batch, *item.shape) + 0.5).to(dtype)


class OffsetLayerNorm(nn.LayerNorm):
    """A norm that scales by 1 + weight under the name of one that does not, as Nemotron's."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(
            x, self.normalized_shape, self.weight + 1, self.bias, self.eps
        )


class ImageRMSNorm(nn.Module):
    """A norm of a user's own: weight of shape [C, 1, 1], no bias."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt() * self.weight


class SiLUNorm(nn.LayerNorm):
    """A fused activation that the library can't take apart."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(super().forward(x))


class ScaledNorm(nn.Module):
    """A norm whose gamma and beta go by other names."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:]) * self.scale + self.shift


def _timm(name: str, *args: object, **kwargs: object) -> nn.Module:
    import timm.layers

    layer: nn.Module = getattr(timm.layers, name)(*args, **kwargs)
    return layer


def _torchvision(name: str) -> nn.Module:
    from torchvision.models.convnext import LayerNorm2d
    from torchvision.ops import FrozenBatchNorm2d

    layers = {"FrozenBatchNorm2d": FrozenBatchNorm2d, "LayerNorm2d": LayerNorm2d}
    layer: nn.Module = layers[name](6)
    return layer


def _transformers(name: str, *args: object, **kwargs: object) -> nn.Module:
    from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    layers = {
        cls.__name__: cls
        for cls in (
            ConvNextLayerNorm,
            GemmaRMSNorm,
            Gemma2RMSNorm,
            Gemma3RMSNorm,
            LlamaRMSNorm,
            NemotronLayerNorm1P,
            Qwen2RMSNorm,
            T5LayerNorm,
        )
    }
    layer: nn.Module = layers[name](*args, **kwargs)
    return layer


C = 6
IMAGE = (C, 5, 4)
TOKENS = (7, C)

NORMS = (
    Norm("BatchNorm1d", lambda: nn.BatchNorm1d(C), (C,), "batch"),
    Norm("BatchNorm1d-sequence", lambda: nn.BatchNorm1d(C), (C, 7), "batch"),
    Norm("BatchNorm2d", lambda: nn.BatchNorm2d(C, eps=1e-3), IMAGE, "batch"),
    Norm("BatchNorm2d-no-affine", lambda: nn.BatchNorm2d(C, affine=False), IMAGE, "batch"),
    Norm(
        "BatchNorm2d-untracked",
        lambda: nn.BatchNorm2d(C, track_running_stats=False),
        IMAGE,
        "batch",
    ),
    Norm("BatchNorm2d-cumulative", lambda: nn.BatchNorm2d(C, momentum=None), IMAGE, "batch"),
    Norm("BatchNorm3d", lambda: nn.BatchNorm3d(C), (C, 3, 4, 5), "batch"),
    Norm("SyncBatchNorm", lambda: nn.SyncBatchNorm(C), IMAGE, "batch"),
    Norm("LayerNorm", lambda: nn.LayerNorm(C), TOKENS, "layer"),
    Norm("LayerNorm-no-affine", lambda: nn.LayerNorm(C, elementwise_affine=False), TOKENS, "layer"),
    Norm("LayerNorm-no-bias", lambda: nn.LayerNorm(C, bias=False), TOKENS, "layer"),
    Norm("LayerNorm-image", lambda: nn.LayerNorm(IMAGE), IMAGE, "layer"),
    Norm("InstanceNorm1d", lambda: nn.InstanceNorm1d(C), (C, 7), "instance"),
    Norm("InstanceNorm1d-affine", lambda: nn.InstanceNorm1d(C, affine=True), (C, 7), "instance"),
    Norm("InstanceNorm2d", lambda: nn.InstanceNorm2d(C), IMAGE, "instance"),
    Norm("InstanceNorm2d-affine", lambda: nn.InstanceNorm2d(C, affine=True), IMAGE, "instance"),
    Norm(
        "InstanceNorm2d-tracked",
        lambda: nn.InstanceNorm2d(C, track_running_stats=True),
        IMAGE,
        "instance",
    ),
    Norm(
        "InstanceNorm2d-affine-tracked",
        lambda: nn.InstanceNorm2d(C, affine=True, track_running_stats=True),
        IMAGE,
        "instance",
    ),
    Norm(
        "InstanceNorm3d-affine", lambda: nn.InstanceNorm3d(C, affine=True), (C, 3, 4, 5), "instance"
    ),
    Norm("GroupNorm", lambda: nn.GroupNorm(3, C), IMAGE, "group"),
    Norm("GroupNorm-no-affine", lambda: nn.GroupNorm(3, C, affine=False), IMAGE, "group"),
    Norm("RMSNorm", lambda: nn.RMSNorm(C, eps=1e-6), TOKENS, "rms"),
    Norm("RMSNorm-no-affine", lambda: nn.RMSNorm(C, elementwise_affine=False), TOKENS, "rms"),
    Norm("own/OffsetLayerNorm", lambda: OffsetLayerNorm(C), TOKENS, "layer"),
    Norm("own/ImageRMSNorm", lambda: ImageRMSNorm(C), IMAGE, "general"),
    Norm("own/SiLUNorm", lambda: SiLUNorm(C), TOKENS, "layer"),
    Norm("own/ScaledNorm", lambda: ScaledNorm(C), TOKENS, "general"),
    Norm(
        "torchvision/FrozenBatchNorm2d", lambda: _torchvision("FrozenBatchNorm2d"), IMAGE, "general"
    ),
    Norm("torchvision/LayerNorm2d", lambda: _torchvision("LayerNorm2d"), IMAGE, "layer"),
    Norm("timm/BatchNormAct2d", lambda: _timm("BatchNormAct2d", C), IMAGE, "batch"),
    Norm(
        "timm/BatchNormAct2d-silu",
        lambda: _timm("BatchNormAct2d", C, act_layer=nn.SiLU),
        IMAGE,
        "batch",
    ),
    Norm(
        "timm/BatchNormAct2d-sigmoid",
        lambda: _timm("BatchNormAct2d", C, act_layer=nn.Sigmoid),
        IMAGE,
        "batch",
    ),
    Norm("timm/FrozenBatchNormAct2d", lambda: _timm("FrozenBatchNormAct2d", C), IMAGE, "general"),
    Norm("timm/GroupNorm", lambda: _timm("GroupNorm", C, num_groups=3), IMAGE, "group"),
    Norm("timm/GroupNorm1", lambda: _timm("GroupNorm1", C), IMAGE, "group"),
    Norm("timm/GroupNormAct", lambda: _timm("GroupNormAct", C, num_groups=3), IMAGE, "group"),
    Norm("timm/LayerNorm", lambda: _timm("LayerNorm", C), TOKENS, "layer"),
    Norm("timm/LayerNorm2d", lambda: _timm("LayerNorm2d", C), IMAGE, "layer"),
    Norm("timm/LayerNormAct", lambda: _timm("LayerNormAct", C, act_layer=nn.GELU), TOKENS, "layer"),
    Norm("timm/LayerNormAct2d", lambda: _timm("LayerNormAct2d", C), IMAGE, "layer"),
    Norm("timm/RmsNorm", lambda: _timm("RmsNorm", C), TOKENS, "general"),
    Norm("timm/RmsNorm2d", lambda: _timm("RmsNorm2d", C), IMAGE, "general"),
    Norm("timm/SimpleNorm", lambda: _timm("SimpleNorm", C), TOKENS, "general"),
    Norm("timm/EvoNorm2dS0", lambda: _timm("EvoNorm2dS0", C, groups=3), IMAGE, "general"),
    Norm(
        "transformers/ConvNextLayerNorm",
        lambda: _transformers("ConvNextLayerNorm", C, data_format="channels_first"),
        IMAGE,
        "layer",
    ),
    Norm("transformers/LlamaRMSNorm", lambda: _transformers("LlamaRMSNorm", C), TOKENS, "general"),
    Norm("transformers/Qwen2RMSNorm", lambda: _transformers("Qwen2RMSNorm", C), TOKENS, "general"),
    Norm("transformers/T5LayerNorm", lambda: _transformers("T5LayerNorm", C), TOKENS, "general"),
    Norm(
        "transformers/NemotronLayerNorm1P",
        lambda: _transformers("NemotronLayerNorm1P", C),
        TOKENS,
        "layer",
    ),
    Norm("transformers/GemmaRMSNorm", lambda: _transformers("GemmaRMSNorm", C), TOKENS, "general"),
    Norm(
        "transformers/Gemma2RMSNorm", lambda: _transformers("Gemma2RMSNorm", C), TOKENS, "general"
    ),
    Norm(
        "transformers/Gemma3RMSNorm", lambda: _transformers("Gemma3RMSNorm", C), TOKENS, "general"
    ),
)

OFFSET = (
    "own/OffsetLayerNorm",
    "transformers/NemotronLayerNorm1P",
    "transformers/GemmaRMSNorm",
    "transformers/Gemma2RMSNorm",
    "transformers/Gemma3RMSNorm",
)
