"""How each norm family takes its gamma and beta: where they are held, and what they multiply."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import is_parametrized

from abnn.surgery import swapped

GAMMA_NAMES = ("weight", "scale", "gamma")
BETA_NAMES = ("bias", "shift", "beta")

# What a fused norm does after its affine map; timm's norm-and-activation layers use these names.
TAIL_NAMES = ("drop", "act")


@dataclass(frozen=True)
class Form:
    """How one norm layer scales what it has normalised: `y = tail(x_hat * (offset + w) + b)`.

    Args:
        family: batch, layer, instance, group, rms, or general.
        gamma: name of the layer's attribute that holds `w`.
        beta: name of the attribute that holds `b`; None for a norm that has no shift, as RMS norm.
        shape: shape of gamma.
        offset: 1 for norms that scale by `1 + weight`, else 0.
        axis: "channel" if gamma runs along dimension 1, "trailing" if it broadcasts against the
            last dimensions; None if the output is not linear in gamma, so that draws can't share
            one normalisation.
        statistics: whether it keeps running statistics that follow the training data.
        coupled: whether its output for one example depends on the others of the batch.
        tail: names of the children that run after the affine map.
        affine: whether, with its running statistics, it is `tail(x * scale + shift)`, nothing more.
    """

    family: str
    gamma: str
    beta: str | None
    shape: torch.Size
    offset: float = 0.0
    axis: Literal["channel", "trailing"] | None = "channel"
    statistics: bool = False
    coupled: bool = False
    tail: tuple[str, ...] = ()
    affine: bool = False

    def view(self, bank: Tensor, ndim: int) -> Tensor:
        """Shape `[G, *shape]` so that it broadcasts against G groups of `ndim`-dimensional input.

        >>> form = Form("batch", "weight", "bias", torch.Size([8]))
        >>> form.view(torch.ones(4, 8), ndim=4).shape
        torch.Size([4, 1, 8, 1, 1])
        """
        if self.axis == "channel":
            return bank.reshape(len(bank), 1, -1, *[1] * (ndim - 2))
        return bank.reshape(len(bank), *[1] * (ndim - len(self.shape)), *self.shape)


@dataclass(frozen=True)
class LeftAlone:
    """Why a norm is not converted."""

    reason: str


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm by its class, or by its class's name.

    >>> is_norm(nn.BatchNorm2d(3)), is_norm(nn.Linear(3, 3))
    (True, False)
    """
    known = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
    if isinstance(module, known):
        return True
    # A block such as PreNorm or ConvNormAct has "norm" in its name but holds the norm as a child.
    cls = type(module)
    named = "norm" in cls.__name__.lower()
    # Spectral and weight norm are norms of weights, not of what passes through a network.
    of_weights = cls.__module__.startswith("torch.nn.utils")
    return (
        named
        and not of_weights
        and (registered_name(module, GAMMA_NAMES) is not None or not any(module.children()))
    )


def form_of(layer: nn.Module) -> Form | LeftAlone:
    """How a layer takes gamma and beta, or the reason why it can't be made Bayesian.

    >>> form_of(nn.RMSNorm(8)).family
    'rms'
    >>> form_of(nn.LocalResponseNorm(2)).reason
    'it has no weight to sample'
    """
    if is_parametrized(layer):
        return LeftAlone(
            "its weight is computed by a parametrization; make that permanent first, by "
            "torch.nn.utils.parametrize.remove_parametrizations"
        )
    shape = _affine_shape(layer)
    gamma, beta = registered_name(layer, GAMMA_NAMES), registered_name(layer, BETA_NAMES)
    if gamma is None or shape is None:
        return LeftAlone("it has no weight to sample")
    tracked = isinstance(layer, _NormBase) and layer.running_mean is not None
    form = Form(
        family=_family(layer),
        gamma=gamma,
        beta=beta,
        shape=shape,
        axis="trailing" if isinstance(layer, (nn.LayerNorm, nn.RMSNorm)) else "channel",
        statistics=tracked,
        coupled=isinstance(layer, _BatchNorm) and not tracked,
        tail=tuple(n for n in TAIL_NAMES if isinstance(layer._modules.get(n), nn.Module)),
    )
    if type(layer).forward in _TORCH_FORWARDS:
        return replace(form, affine=tracked)
    return _probe(layer, form)


_TORCH_FORWARDS = (
    _BatchNorm.forward,
    nn.SyncBatchNorm.forward,
    _InstanceNorm.forward,
    nn.LayerNorm.forward,
    nn.GroupNorm.forward,
    nn.RMSNorm.forward,
)


def _family(layer: nn.Module) -> str:
    families = {
        _BatchNorm: "batch",
        _InstanceNorm: "instance",
        nn.LayerNorm: "layer",
        nn.GroupNorm: "group",
        nn.RMSNorm: "rms",
    }
    return next((name for cls, name in families.items() if isinstance(layer, cls)), "general")


def registered_name(layer: nn.Module, names: tuple[str, ...]) -> str | None:
    """The first name under which a layer keeps a tensor, or could keep one.

    >>> registered_name(nn.LayerNorm(2, elementwise_affine=False), GAMMA_NAMES)
    'weight'
    """
    registered = {**layer._parameters, **layer._buffers}
    return next((name for name in names if name in registered), None)


def _affine_shape(layer: nn.Module) -> torch.Size | None:
    """Shape of gamma; a norm without one tells it by what it normalises."""
    name = registered_name(layer, GAMMA_NAMES)
    weight = getattr(layer, name) if name else None
    if isinstance(weight, Tensor):
        return weight.shape if weight.ndim else None
    if isinstance(layer, _NormBase):
        return torch.Size([layer.num_features])
    if isinstance(layer, (nn.LayerNorm, nn.RMSNorm)):
        return torch.Size(layer.normalized_shape)
    if isinstance(layer, nn.GroupNorm):
        return torch.Size([layer.num_channels])
    return None


def _probe(layer: nn.Module, form: Form) -> Form | LeftAlone:
    """Learn from small inputs what an unknown forward does with its weight and bias.

    The layer is linear in its weight if `y(w, b) = x_hat * (offset + w) + b`. With b = 0, `y(0)`
    and `y(1)` tell the offset; a random (w, b) tells along which axis gamma runs.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        layer = copy.deepcopy(layer).to(device="cpu", dtype=torch.float32).eval()
        tail_off = {name: nn.Identity() for name in form.tail}
        found: Form | LeftAlone | None = None
        for x in probe_inputs(form.shape):
            try:
                with swapped(layer, tail_off):
                    candidate = _probe_with(layer, form, x)
            except Exception:  # any error only means that this is not the layer's input
                continue
            if isinstance(candidate, Form) and candidate.axis is not None:
                return candidate
            found = found or candidate
    return found or LeftAlone("it could not be run on a small input of any usual shape")


def _probe_with(layer: nn.Module, form: Form, x: Tensor) -> Form | LeftAlone | None:
    def run(weight: Tensor, bias: Tensor) -> Tensor:
        values = {form.gamma: weight} | ({form.beta: bias} if form.beta else {})
        with swapped(layer, values):
            y = layer(x.clone())
        if not isinstance(y, Tensor) or y.shape != x.shape or not y.isfinite().all():
            raise ValueError("not a norm of this input")
        return y

    zero, one = torch.zeros(form.shape), torch.ones(form.shape)
    y0, y1 = run(zero, zero), run(one, zero)
    size = y1.abs().max()
    if size == 0:
        return LeftAlone("its weight does not reach its output")
    if y0.abs().max() <= 1e-5 * size:
        offset, x_hat = 0.0, y1
    elif (y1 - 2 * y0).abs().max() <= 1e-5 * size:
        offset, x_hat = 1.0, y0
    else:
        return LeftAlone("its output is not a normalised input times its weight")
    weight, bias = torch.randn(form.shape), torch.randn(form.shape)
    bias = bias if form.beta else zero
    y = run(weight, bias)
    for axis in _axes(form.shape):
        fitted = replace(form, offset=offset, axis=axis)
        w, b = fitted.view(weight[None], x.ndim), fitted.view(bias[None], x.ndim)
        try:
            expected = (x_hat * (offset + w) + b)[0]
        except RuntimeError:  # the shapes do not broadcast: not this axis
            continue
        if expected.shape == y.shape and torch.allclose(expected, y, rtol=1e-4, atol=1e-4):
            return replace(fitted, affine=form.statistics and _is_affine(layer, x, x_hat))
    if not is_norm(layer):
        return LeftAlone("its output is not a normalised input times its weight")
    # It does scale by its weight, but what follows is not linear: a draw at a time still works.
    return replace(form, offset=offset, axis=None)


def _is_affine(layer: nn.Module, x: Tensor, x_hat: Tensor) -> bool:
    """Whether the layer normalises by its running statistics, as torch's own batch norm does."""
    assert isinstance(layer, _NormBase)
    assert layer.running_mean is not None
    assert layer.running_var is not None
    if x.ndim < 2 or x.shape[1] != len(layer.running_mean):
        return False
    shape = (1, -1, *[1] * (x.ndim - 2))
    mean, var = layer.running_mean.reshape(shape), layer.running_var.reshape(shape)
    return torch.allclose((x - mean) * (var + layer.eps).rsqrt(), x_hat, rtol=1e-4, atol=1e-4)


def _axes(shape: torch.Size) -> tuple[Literal["channel", "trailing"], ...]:
    return ("trailing", "channel") if len(shape) == 1 else ("trailing",)


def probe_inputs(shape: torch.Size) -> Iterator[Tensor]:
    """Inputs of the usual layouts for a gamma of this shape; no other dimension has its size."""
    C = shape.numel()
    other = 5 if C == 3 else 3
    if len(shape) > 1:
        # [1, C, 1, 1] and [C, 1, 1] stand for a channel of an image, [C, H, W] for all of it.
        spread = [other if size == 1 else size for size in shape]
        yield torch.randn(2, *spread[1:] if shape[0] == 1 else spread)
        yield torch.randn(2, other, *spread)
        return
    for layout in (
        (2, other, C),
        (2, C, other, other),
        (2, other, other, C),
        (2, C, other),
        (2, C),
        (2, C, other, other, other),
    ):
        yield torch.randn(layout)
