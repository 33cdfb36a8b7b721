"""Whole networks of every common family, small and with random weights, for parametrised tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from abnn.zoo import cifar_resnet, small_resnet, wide_resnet
from abnn.zoo.extras import package

CLASSES = 10


@dataclass(frozen=True)
class Network:
    """How to build a network, and what to feed it.

    Args:
        name: library and architecture, such as "torchvision/resnet18".
        build: makes the network as its library initialises it; `build` below is what tests want.
        inputs: batch size -> a tensor, a tuple of arguments, or a dict of keyword arguments.
            Seeded: a smaller batch is the beginning of a larger one.
        class_dim: where the classes are in the logits.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    class_dim: int = 1


def build(network: Network) -> nn.Module:
    """The network in eval mode, with no norm, layer scale or head left at a trivial value."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        net = network.build().eval()
        for module in net.modules():
            if "norm" in type(module).__name__.lower():
                _randomise_parameters(module)
        for parameter in net.parameters():
            low, high = parameter.min(), parameter.max()
            if 0 < low == high <= 0.1 and parameter.numel() > 1:  # a layer scale hides its block
                parameter.uniform_(0.5, 1)
            elif low == high == 0 and parameter.ndim > 1:  # a zero head hides the whole network
                parameter.normal_(0, 0.1)
        _randomise_statistics(net, network.inputs(8))
    return net


def run(net: nn.Module, inputs: Any) -> Tensor:
    """The logits, however the network takes its inputs and returns its outputs."""
    if isinstance(inputs, dict):
        outputs = net(**inputs)
    elif isinstance(inputs, tuple):
        outputs = net(*inputs)
    else:
        outputs = net(inputs)
    if not isinstance(outputs, Tensor):
        outputs = outputs["out" if "out" in outputs else "logits"]
    assert isinstance(outputs, Tensor)
    return outputs


def _randomise_parameters(norm: nn.Module) -> None:
    # torch's norms multiply by the weight even where it starts at zero to silence a residual
    # branch; another class whose weight starts at zero, such as Gemma's, adds 1 to it.
    multiplies = isinstance(norm, _NormBase | nn.GroupNorm | nn.LayerNorm)
    for name, parameter in norm.named_parameters(recurse=False):
        if parameter.ndim == 1:
            around_one = name != "bias" and (multiplies or bool(parameter.mean() != 0))
            parameter.normal_(float(around_one), 0.2)


def _randomise_statistics(net: nn.Module, inputs: Any) -> None:
    """Set running statistics to the inputs' own, off by about a fifth (mean) and a half (variance).

    Around 0 and 1 instead, the signal would die out or explode in a deep network, and its first
    norms could do anything unnoticed.
    """

    def randomise(norm: nn.Module, args: tuple[Tensor]) -> None:
        assert isinstance(norm, _NormBase)
        channels = args[0].transpose(0, 1).flatten(1)
        # One variance for all channels: one that is silent now may speak for other inputs.
        var = channels.var(1).mean()
        if norm.running_mean is not None and norm.running_var is not None:
            norm.running_mean.normal_(0, 0.2).mul_(var.sqrt()).add_(channels.mean(1))
            norm.running_var.uniform_(0.5, 1.5).mul_(var)

    norms = [module for module in net.modules() if isinstance(module, _NormBase)]
    hooks = [norm.register_forward_pre_hook(randomise) for norm in norms]
    run(net, inputs)
    for hook in hooks:
        hook.remove()


# --- inputs ------------------------------------------------------------------------------------


def _random(*shape: int) -> Callable[[int], Tensor]:
    def inputs(batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.stack([torch.randn(shape, generator=generator) for _ in range(batch)])

    return inputs


def _images(size: int) -> Callable[[int], Tensor]:
    return _random(3, size, size)


def _named(name: str, inputs: Callable[[int], Tensor]) -> Callable[[int], dict[str, Tensor]]:
    return lambda batch: {name: inputs(batch)}


def _tokens(batch: int) -> dict[str, Tensor]:
    """Token ids 3..63 of 12 tokens, the last two of every other sequence padding (id 0)."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randint(3, 64, (12,), generator=generator) for _ in range(batch)])
    mask = torch.ones_like(ids)
    mask[1::2, -2:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def _tokens_with_end(batch: int) -> dict[str, Tensor]:
    """As `_tokens`, with the end-of-sequence id 1 at the same place in each."""
    inputs = _tokens(batch)
    inputs["input_ids"][:, 9] = 1
    return inputs


# --- torchvision -------------------------------------------------------------------------------


def _torchvision(name: str, size: int = 32, **kwargs: Any) -> Network:
    def make() -> Any:
        from torchvision import models

        return models.get_model(name, weights=None, num_classes=CLASSES, **kwargs)

    return Network(f"torchvision/{name}", make, _images(size))


def _resnet(bottleneck: bool, **kwargs: Any) -> Any:
    from torchvision.models import resnet

    block = resnet.Bottleneck if bottleneck else resnet.BasicBlock
    return resnet.ResNet(block, [1, 1, 1, 1], num_classes=CLASSES, **kwargs)


def _densenet() -> Any:
    from torchvision.models import DenseNet

    return DenseNet(
        growth_rate=8, block_config=(2, 2, 2, 2), num_init_features=16, num_classes=CLASSES
    )


def _efficientnet_v2() -> Any:
    from torchvision.models.efficientnet import EfficientNet, FusedMBConvConfig, MBConvConfig

    blocks = [
        FusedMBConvConfig(1, 3, 1, 16, 16, 1),
        FusedMBConvConfig(4, 3, 2, 16, 24, 2),
        MBConvConfig(4, 3, 2, 24, 32, 2),
    ]
    return EfficientNet(blocks, dropout=0.2, num_classes=CLASSES, last_channel=64)


def _convnext() -> Any:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    blocks = [CNBlockConfig(16, 32, 1), CNBlockConfig(32, 64, 1), CNBlockConfig(64, None, 2)]
    return ConvNeXt(blocks, num_classes=CLASSES)


def _swin(version: int) -> Any:
    from torchvision.models import swin_transformer as swin

    v2 = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    return swin.SwinTransformer(
        patch_size=[2, 2],
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[4, 4],
        num_classes=CLASSES,
        **(v2 if version == 2 else {}),
    )


def _vit() -> Any:
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=32,
        patch_size=8,
        num_layers=2,
        num_heads=2,
        hidden_dim=32,
        mlp_dim=64,
        num_classes=CLASSES,
    )


def _maxvit() -> Any:
    from torchvision.models import MaxVit

    return MaxVit(
        input_size=(32, 32),
        stem_channels=16,
        partition_size=4,
        block_channels=[16, 32],
        block_layers=[1, 1],
        head_dim=8,
        stochastic_depth_prob=0.0,
        num_classes=CLASSES,
    )


def _regnet() -> Any:
    from torchvision.models.regnet import BlockParams, RegNet

    blocks = BlockParams.from_init_params(
        depth=6, w_0=16, w_a=16.0, w_m=2.0, group_width=8, se_ratio=0.25
    )
    return RegNet(blocks, num_classes=CLASSES)


def _fcn() -> Any:
    from torchvision.models._utils import IntermediateLayerGetter
    from torchvision.models.segmentation import fcn

    backbone = _resnet(bottleneck=True, replace_stride_with_dilation=[False, True, True])
    layers = IntermediateLayerGetter(backbone, {"layer4": "out"})
    return fcn.FCN(layers, fcn.FCNHead(2048, CLASSES))


def _video_resnet() -> Any:
    from torchvision.models.video import resnet

    return resnet.VideoResNet(
        resnet.BasicBlock,
        [resnet.Conv3DSimple] * 4,
        [1, 1, 1, 1],
        resnet.BasicStem,
        num_classes=CLASSES,
    )


TORCHVISION = (
    Network(
        "torchvision/resnet_zero_init",
        partial(_resnet, False, zero_init_residual=True),
        _images(32),
    ),
    Network(
        "torchvision/resnext", partial(_resnet, True, groups=32, width_per_group=4), _images(32)
    ),
    Network("torchvision/wide_resnet", partial(_resnet, True, width_per_group=128), _images(32)),
    _torchvision("resnet18"),
    Network("torchvision/densenet", _densenet, _images(32)),
    _torchvision("mobilenet_v2", width_mult=0.25),
    _torchvision("mobilenet_v3_small", reduced_tail=True),
    _torchvision("efficientnet_b0"),
    Network("torchvision/efficientnet_v2", _efficientnet_v2, _images(32)),
    Network("torchvision/convnext", _convnext, _images(32)),
    Network("torchvision/swin", partial(_swin, 1), _images(32)),
    Network("torchvision/swin_v2", partial(_swin, 2), _images(32)),
    Network("torchvision/vit", _vit, _images(32)),
    Network("torchvision/maxvit", _maxvit, _images(32)),
    Network("torchvision/regnet_y", _regnet, _images(32)),
    _torchvision("mnasnet0_5"),
    _torchvision("shufflenet_v2_x0_5"),
    _torchvision("googlenet", aux_logits=False, init_weights=False),
    Network("torchvision/fcn_resnet", _fcn, _images(32)),
    _torchvision("deeplabv3_mobilenet_v3_large", weights_backbone=None),
    _torchvision("lraspp_mobilenet_v3_large", weights_backbone=None),
    Network("torchvision/r3d", _video_resnet, _random(3, 4, 32, 32)),
)


# --- timm --------------------------------------------------------------------------------------


def _timm(name: str, size: int = 32, **kwargs: Any) -> Network:
    def make() -> Any:
        import timm

        return timm.create_model(name, pretrained=False, num_classes=CLASSES, **kwargs)

    return Network(f"timm/{name}", make, _images(size))


def _timm_class(name: str, path: str, size: int = 32, **kwargs: Any) -> Network:
    """A class of timm.models, for architectures whose named variants fix their own width."""

    def make() -> Any:
        import timm.models

        module, cls = path.split(".")
        return getattr(getattr(timm.models, module), cls)(num_classes=CLASSES, **kwargs)

    return Network(f"timm/{name}", make, _images(size))


def _metaformer(name: str, mixers: str, norms: str) -> Network:
    def make() -> Any:
        from timm.models import metaformer

        return metaformer.MetaFormer(
            depths=(1, 1, 1, 1),
            dims=(32, 32, 64, 64),
            token_mixers=tuple(getattr(metaformer, part) for part in mixers.split()),
            norm_layers=tuple(getattr(metaformer, part) for part in norms.split()),
            downsample_norm=metaformer.LayerNorm2dNoBias,
            layer_scale_init_values=1e-5,
            num_classes=CLASSES,
        )

    return Network(f"timm/{name}", make, _images(64))


_TINY_VIT: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
}
_TINY_SWIN: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 2,
    "window_size": 4,
    "embed_dim": 16,
    "depths": (2, 2),
    "num_heads": (2, 4),
}

TIMM = (
    _timm("test_byobnet"),
    _timm("test_coatnet", 64, img_size=64),
    _timm("test_convnext"),
    _timm("test_efficientnet"),
    _timm("test_efficientnet_evos"),
    _timm("test_efficientnet_gn"),
    _timm("test_efficientnet_ln"),
    _timm("test_mambaout"),
    _timm("test_maxvit", 64, img_size=64),
    _timm("test_resnet"),
    _timm("test_vit", img_size=32, patch_size=8),
    _timm("test_vit4", img_size=32, patch_size=8),
    _timm("test_vit_relpos", img_size=32, patch_size=8),
    _timm("convnextv2_atto", depths=(1, 1, 1, 1), dims=(16, 16, 32, 32)),
    _timm("resnetv2_50", layers=(1, 1, 1, 1), channels=(32, 64, 64, 128), stem_chs=16),
    _timm("resnetv2_50d_gn", 64, layers=(1, 1, 1, 1), channels=(128, 128, 128, 128), stem_chs=64),
    _timm("regnetx_002"),
    _timm("ghostnet_050"),
    _timm("repvgg_a0"),
    _timm("mobilenetv4_conv_small"),
    _timm("edgenext_xx_small", 64),
    _timm("mobilevit_xxs", 64),
    _timm("mobilevitv2_050", 64),
    _timm("dla46x_c"),
    _timm("hrnet_w18_small"),
    _timm("ese_vovnet19b_slim"),
    _timm("inception_next_atto"),
    _timm("fastvit_t8", 64),
    _timm("repvit_m0_9"),
    _timm("efficientvit_b0", 64),
    _timm("levit_128s", 64, img_size=64),
    _timm("tiny_vit_5m_224", 64),
    _timm("gcvit_xxtiny", 64, img_size=64),
    _timm("pvt_v2_b0", depths=(1, 1, 1, 1), embed_dims=(16, 32, 64, 64), num_heads=(1, 2, 2, 2)),
    _timm("davit_tiny", depths=(1, 1, 1, 1), embed_dims=(32, 32, 64, 64), num_heads=(1, 1, 2, 2)),
    _timm("swin_tiny_patch4_window7_224", **_TINY_SWIN),
    _timm("swinv2_tiny_window8_256", **_TINY_SWIN),
    _timm("deit_tiny_distilled_patch16_224", **_TINY_VIT),
    _timm("beit_base_patch16_224", **_TINY_VIT, head_init_scale=1.0),
    _timm("eva02_tiny_patch14_224", **_TINY_VIT, head_init_scale=1.0),
    _timm("vit_small_patch16_dinov3", **_TINY_VIT, head_init_scale=1.0),
    _timm("cait_xxs24_224", **_TINY_VIT),
    _timm("xcit_nano_12_p16_224", img_size=32, embed_dim=32, depth=2, num_heads=2),
    _timm_class("convmixer", "convmixer.ConvMixer", dim=32, depth=2, patch_size=4),
    _timm_class(
        "mixer", "mlp_mixer.MlpMixer", img_size=32, patch_size=8, embed_dim=32, num_blocks=2
    ),
    _timm_class(
        "hiera",
        "hiera.Hiera",
        64,
        img_size=(64, 64),
        embed_dim=16,
        stages=(1, 1, 1, 1),
        head_init_scale=1.0,
    ),
    _timm_class("focalnet", "focalnet.FocalNet", depths=(1, 1, 1, 1), embed_dim=48),
    _metaformer("poolformer", "Pooling " * 4, "GroupNorm1 " * 4),
    _metaformer("poolformer_v2", "Pooling " * 4, "GroupNorm1NoBias " * 4),
    _metaformer(
        "caformer",
        "SepConv SepConv Attention Attention",
        "LayerNorm2dNoBias LayerNorm2dNoBias LayerNormNoBias LayerNormNoBias",
    ),
)


# --- transformers ------------------------------------------------------------------------------


def _transformers(
    model: str, inputs: Callable[[int], dict[str, Tensor]], class_dim: int = 1, **config: Any
) -> Network:
    """A model class of transformers, made from a small config of its own config class."""

    def make() -> Any:
        import transformers

        cls = getattr(transformers, model)
        return cls(cls.config_class(num_labels=CLASSES, **config))

    return Network(f"transformers/{model}", make, inputs, class_dim)


_PIXELS = _named("pixel_values", _images(32))
_ENCODER: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
_TEXT: dict[str, Any] = {"vocab_size": 64, "max_position_embeddings": 32, "pad_token_id": 0}
_DECODER: dict[str, Any] = {**_ENCODER, **_TEXT, "num_key_value_heads": 1, "head_dim": 16}

TRANSFORMERS = (
    _transformers("ViTForImageClassification", _PIXELS, image_size=32, patch_size=8, **_ENCODER),
    _transformers("BertForSequenceClassification", _tokens, **_ENCODER, **_TEXT),
    _transformers("RobertaForSequenceClassification", _tokens, **_ENCODER, **_TEXT),
    _transformers(
        "DistilBertForSequenceClassification",
        _tokens,
        dim=32,
        n_layers=2,
        n_heads=2,
        hidden_dim=64,
        **_TEXT,
    ),
    _transformers(
        "T5ForSequenceClassification",
        _tokens_with_end,
        vocab_size=64,
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    ),
    _transformers(
        "ConvNextForImageClassification", _PIXELS, hidden_sizes=[16, 16, 32, 32], depths=[1] * 4
    ),
    _transformers(
        "ConvNextV2ForImageClassification", _PIXELS, hidden_sizes=[16, 16, 32, 32], depths=[1] * 4
    ),
    _transformers(
        "SwinForImageClassification",
        _PIXELS,
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
    ),
    _transformers(
        "SegformerForSemanticSegmentation",
        _PIXELS,
        depths=[1] * 4,
        hidden_sizes=[16, 32, 32, 32],
        num_attention_heads=[1, 2, 2, 2],
        decoder_hidden_size=32,
    ),
    _transformers(
        "Wav2Vec2ForSequenceClassification",
        _named("input_values", _random(800)),
        conv_dim=(16, 16, 16),
        conv_kernel=(8, 4, 4),
        conv_stride=(4, 4, 4),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=16,
        **_ENCODER,
    ),
    _transformers("LlamaForCausalLM", _tokens, 2, **_DECODER),
    _transformers("LlamaForSequenceClassification", _tokens, **_DECODER),
    _transformers("MistralForCausalLM", _tokens, 2, **_DECODER),
    _transformers("GemmaForCausalLM", _tokens, 2, **_DECODER),
    _transformers("Gemma3ForCausalLM", _tokens, 2, **_DECODER),
    _transformers("Qwen2ForCausalLM", _tokens, 2, **_ENCODER, **_TEXT, num_key_value_heads=1),
    _transformers("Qwen3ForCausalLM", _tokens, 2, **_DECODER),
)


# --- plain torch -------------------------------------------------------------------------------


class _TransformerClassifier(nn.Module):
    """An `nn.TransformerEncoder` over [B, T, D], or [T, B, D], and the mean over time."""

    def __init__(self, batch_first: bool, norm_first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            16, 2, 32, batch_first=batch_first, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(
            layer, 2, norm=nn.LayerNorm(16), enable_nested_tensor=False
        )
        self.head = nn.Linear(16, CLASSES)
        self.time = 1 if batch_first else 0

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(x).mean(self.time))
        return logits


class _TwoInputs(nn.Module):
    """An image and a row of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.row = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.ReLU())
        self.head = nn.Linear(16, CLASSES)

    def forward(self, image: Tensor, row: Tensor) -> Tensor:
        pooled = self.image(image).mean((2, 3))
        logits: Tensor = self.head(torch.cat([pooled, self.row(row)], 1))
        return logits


def _cnn(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        norm(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        norm(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


def _mlp(norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 32),
        norm(32),
        nn.GELU(),
        nn.Linear(32, 32),
        norm(32),
        nn.GELU(),
        nn.Linear(32, CLASSES),
    )


def _instance_norm(**kwargs: bool) -> Callable[[int], nn.Module]:
    return partial(nn.InstanceNorm2d, **kwargs)


def _two_inputs(batch: int) -> tuple[Tensor, Tensor]:
    return _images(16)(batch), _random(5)(batch)


TORCH = (
    Network("torch/transformer_encoder", lambda: _TransformerClassifier(True), _random(6, 16)),
    Network(
        "torch/transformer_encoder_norm_first",
        lambda: _TransformerClassifier(True, norm_first=True),
        _random(6, 16),
    ),
    Network("torch/batch_norm_1d_mlp", lambda: _mlp(nn.BatchNorm1d), _random(12)),
    Network("torch/rms_norm_mlp", lambda: _mlp(nn.RMSNorm), _random(12)),
    Network("torch/group_norm_cnn", lambda: _cnn(partial(nn.GroupNorm, 4)), _images(32)),
    Network("torch/instance_norm_cnn", lambda: _cnn(_instance_norm()), _images(32)),
    Network(
        "torch/instance_norm_affine_cnn", lambda: _cnn(_instance_norm(affine=True)), _images(32)
    ),
    Network(
        "torch/instance_norm_tracked_cnn",
        lambda: _cnn(_instance_norm(affine=True, track_running_stats=True)),
        _images(32),
    ),
    Network("torch/two_inputs", _TwoInputs, _two_inputs),
)


# --- the zoo -----------------------------------------------------------------------------------


def _deeplabv3plus() -> Any:
    smp = package("segmentation_models_pytorch")
    return smp.DeepLabV3Plus("resnet18", encoder_weights=None, classes=CLASSES, decoder_channels=32)


ZOO = (
    Network("zoo/cifar_resnet", partial(cifar_resnet, 8, CLASSES), _images(32)),
    Network("zoo/small_resnet", partial(small_resnet, CLASSES, 3), _images(32)),
    Network("zoo/wide_resnet", partial(wide_resnet, 10, 1, CLASSES), _images(32)),
    Network("zoo/deeplabv3plus", _deeplabv3plus, _images(32)),
)

NETWORKS: tuple[Network, ...] = TORCH + TORCHVISION + TIMM + TRANSFORMERS + ZOO

# The batch of these is not the leading dimension.
ODD_NETWORKS: tuple[Network, ...] = (
    Network(
        "torch/transformer_encoder_time_first",
        lambda: _TransformerClassifier(False),
        lambda batch: _random(6, 16)(batch).transpose(0, 1).contiguous(),
    ),
)
