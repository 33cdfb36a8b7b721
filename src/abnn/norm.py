"""The Bayesian norm: the original norm with a sampled gamma, and a bank of modes.

    BNL(h) = (h - mu) / sigma * gamma * (1 + alpha * eps) + beta,    eps ~ N(0, I)

A Bayesian norm is the user's own layer, of a subclass of its own class, so that its settings, its
fused activation and every `isinstance` check survive. It holds gamma, beta and the running
statistics of all modes, stacked, beside the original ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from abnn.draws import Draw, local_noise
from abnn.families import Form
from abnn.surgery import slot, swapped
from abnn.trunk import Trunk

Noise = Literal["channel", "example", "element"]


def sample_gamma(gamma: Tensor, eps: Tensor, alpha: float, offset: float | Tensor = 0.0) -> Tensor:
    """The sampled gamma, `gamma * (1 + alpha * eps)`, in the layer's own terms.

    A layer that scales by `offset + weight` has the effective gamma `offset + weight`; noise
    multiplies that, and the weight that yields it is returned.

    >>> sample_gamma(torch.tensor([2.0]), eps=torch.tensor([3.0]), alpha=0.1)
    tensor([2.6000])
    """
    return gamma + alpha * eps * (offset + gamma)


def scale_and_shift(
    weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Batch norm by running statistics as one map: `(x - mu) / sigma * w + b = x * scale + shift`.

    >>> one, two = torch.tensor(1.0), torch.tensor(2.0)
    >>> scale_and_shift(weight=two, bias=one, mean=one, var=torch.tensor(4.0), eps=0.0)
    (tensor(1.), tensor(0.))
    """
    scale = weight * (var + eps).rsqrt()
    return scale, torch.addcmul(bias, mean, scale, value=-1)


class NotFoldable(Exception):  # noqa: N818  (not an error: the network runs a draw at a time)
    """The input of a norm can't be split into the samples that were folded into the batch."""


@dataclass
class Active:
    """The draws a Bayesian norm is to run with.

    Args:
        draws: the S draws folded into the leading dimension, sample-major.
        weight: sampled gamma of every draw, `[S, *shape]`.
        batch: number of examples of one sample.
        noise: what shares a noise value; only "channel" noise is part of `weight`.
        alpha: scale of the noise.
        bias: beta of every draw, or None.
        mean, var: running statistics of every draw's mode, or None where modes have none.
        scale, shift: the whole layer as one map, for a layer that is one with these draws.
        overwrite: whether the layer's input is of no use to anybody else.
        trunk: what is the same for all samples, if that runs once.
        called: where a layer that runs leaves its index, if somebody wants to know.
    """

    draws: Sequence[Draw]
    weight: Tensor
    batch: int
    noise: Noise
    alpha: float
    bias: Tensor | None = None
    mean: Tensor | None = None
    var: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    overwrite: bool = False
    trunk: Trunk | None = None
    called: set[int] | None = None
    _views: dict[int, tuple[Tensor, Tensor | None]] = field(default_factory=dict)

    def viewed(self, form: Form, ndim: int) -> tuple[Tensor, Tensor | None]:
        """Scale and shift of every draw, shaped for an input of so many dimensions."""
        if ndim not in self._views:
            scale, shift = self.scale, self.shift
            if scale is None:
                scale, shift = self.weight, self.bias
                scale = form.offset + scale if form.offset else scale
            shift = None if shift is None else form.view(shift, ndim)
            self._views[ndim] = form.view(scale, ndim), shift
        return self._views[ndim]


class Bank(nn.Module):
    """Gamma, beta and running statistics of all modes, stacked `[M, ...]`.

    It is the one attribute that making a layer Bayesian adds to it. `gamma` is in the layer's own
    terms: the effective gamma is `form.offset + gamma`.

    Args:
        layer: the layer whose values every mode starts from.
        form: how the layer takes gamma and beta.
        modes: number of modes, M.
        stats: whether every mode keeps running statistics of its own.
        index: position of the layer in its network, which tells its noise from the others'.
        like: a tensor with the dtype and device of the network, for a layer without tensors.
    """

    gamma: nn.Parameter
    beta: nn.Parameter | None
    mean: Tensor | None
    var: Tensor | None
    batches: Tensor | None

    def __init__(
        self,
        layer: nn.Module,
        form: Form,
        modes: int,
        stats: bool,
        index: int,
        like: Tensor,
    ) -> None:
        super().__init__()
        self.form = form
        self.index = index
        self.active: Active | None = None
        # The names of gamma and beta, where the layer itself has none.
        names = [name for name in (form.gamma, form.beta) if name is not None]
        self.bare = tuple(n for n in names if not isinstance(getattr(layer, n), Tensor))

        def stack(name: str | None, default: float) -> nn.Parameter | None:
            if name is None:
                return None
            if name in self.bare:
                value = torch.full(form.shape, default, dtype=like.dtype, device=like.device)
            else:
                value = getattr(layer, name).detach()
            # An update of a few thousandths is lost in half precision, so the bank is not in it.
            wide = value.to(torch.promote_types(value.dtype, torch.float32))
            return nn.Parameter(wide.repeat(modes, *[1] * wide.ndim))

        self.register_parameter("gamma", stack(form.gamma, 1.0))
        self.register_parameter("beta", stack(form.beta, 0.0))
        for name, source in _STATISTICS.items():
            value = getattr(layer, source, None) if stats and form.statistics else None
            stacked = None if value is None else value.repeat(modes, *[1] * value.ndim)
            self.register_buffer(name, stacked)


_STATISTICS = {"mean": "running_mean", "var": "running_var", "batches": "num_batches_tracked"}


class BayesNorm(nn.Module):
    """What every Bayesian norm has; mixed into the class of the layer it came from.

    Without an active draw it is the original layer.
    """

    bank: Bank

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the original layer with the weights of the active draws."""
        bank: Bank = self._modules["bank"]  # type: ignore[assignment]  # faster than self.bank
        active = bank.active
        if active is None:
            return super().forward(x, *args, **kwargs)
        if active.called is not None:
            active.called.add(bank.index)
        if active.noise == "channel":
            return self._run(x, *args, **kwargs)
        with swapped(self, {name: nn.Identity() for name in self.bank.form.tail}):
            y = self._run(x, *args, **kwargs)
        return self._tail(self._perturb(y))

    def _run(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """All samples of x, each with its own weights."""
        bank: Bank = self._modules["bank"]  # type: ignore[assignment]
        active, form = bank.active, bank.form
        assert active is not None
        S = len(active.draws)
        if S == 1:  # the network that runs this draw has loaded it into the layer
            return self._original(x, *args, **kwargs)
        trunk = active.trunk
        shared = trunk is not None and trunk.ends_at(bank.index, x)
        if args or kwargs or x.ndim < 2 or (x.shape[0] % S and not shared):
            raise NotFoldable
        if active.scale is not None:
            scale, shift = active.viewed(form, x.ndim)
            y = _affine(x, scale, shift, shared, active.overwrite)
            y = self._tail(y) if form.tail else y
        elif bank.mean is not None or form.coupled or form.axis is None:
            groups = []
            for s, group in enumerate([x] * S if shared else x.chunk(S)):
                with self.loaded(s):
                    groups.append(self._original(group))
            y = torch.cat(groups)
        else:
            # Samples differ only after normalisation, so all are normalised in one call.
            unit = torch.full_like(active.weight[0], 1 - form.offset)
            values = self._weights(unit, None if active.bias is None else torch.zeros_like(unit))
            with swapped(self, values | {name: nn.Identity() for name in form.tail}):
                x_hat = self._original(x)
            scale, shift = active.viewed(form, x.ndim)
            y = self._tail(_affine(x_hat, scale, shift, shared, x_hat is not x))
        if trunk is not None:
            trunk.branch(y)
        return y

    def _original(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's own forward, on whatever gamma and beta it holds now."""
        values = {}
        for name in self.bank.bare:
            held = getattr(self, name)
            if held is not None:  # a gamma and beta it did not have before take the input's dtype
                own = getattr(self, self.bank.form.gamma)
                like = x if self.bank.form.gamma in self.bank.bare else own
                values[name] = held.to(like.dtype)
        with swapped(self, values):
            y: Tensor = super().forward(x, *args, **kwargs)
        return y

    def _perturb(self, y: Tensor) -> Tensor:
        """Noise per example or per activation: `beta + (y - beta) * (1 + alpha * eps)`."""
        active = self.bank.active
        assert active is not None
        S, B = len(active.weight), active.batch
        if y.shape[0] % S:
            raise NotFoldable
        samples: Tensor = y.unflatten(0, (S, -1))
        if active.noise == "element":
            noise = [local_noise(d, self.bank.index, samples.shape[1:]) for d in active.draws]
            eps = torch.stack(noise).to(y)
        else:
            if y.shape[0] % (S * B):
                raise NotFoldable
            samples = y.unflatten(0, (S * B, -1))
            noise = [
                local_noise(d, self.bank.index, (B, *self.bank.form.shape)) for d in active.draws
            ]
            eps = self.bank.form.view(torch.cat(noise).to(y), y.ndim)
        centred = samples
        if active.bias is not None:
            beta = active.bias.repeat_interleave(len(samples) // S, 0)
            centred = samples - self.bank.form.view(beta.to(y), y.ndim)
        noisy: Tensor = samples + active.alpha * eps * centred
        return noisy.flatten(0, 1)

    def _tail(self, y: Tensor) -> Tensor:
        for name in self.bank.form.tail:
            y = getattr(self, name)(y)
        return y

    def _weights(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
        """Values for the layer's own slots, in the layer's own dtype."""
        values: dict[str, Tensor] = {}
        for name, value in ((self.bank.form.gamma, weight), (self.bank.form.beta, bias)):
            if name is not None and value is not None:
                own = getattr(self, name)
                values[name] = value.to(own.dtype) if isinstance(own, Tensor) else value
        return values

    def _is_trivial(self, values: dict[str, Tensor]) -> bool:
        """Whether a layer that has no gamma and beta would get them at one and zero."""
        defaults = {self.bank.form.gamma: 1, self.bank.form.beta: 0}
        return all(
            getattr(self, name) is None and bool((value == defaults[name]).all())
            for name, value in values.items()
        )

    @contextmanager
    def loaded(self, s: int) -> Iterator[None]:
        """Hold the weights and statistics of one active draw as the layer's own.

        The whole network runs this draw then, even where it reads `norm.weight` by itself.
        """
        active, bank = self.bank.active, self.bank
        assert active is not None
        bias = None if active.bias is None else active.bias[s]
        values = self._weights(active.weight[s], bias)
        if not torch.is_grad_enabled() and self._is_trivial(values):
            values = {}  # multiplying by one would round differently from not multiplying
        mode = active.draws[s].mode
        rows = {source: getattr(bank, name) for name, source in _STATISTICS.items()}
        rows = {source: bank_[mode] for source, bank_ in rows.items() if bank_ is not None}
        if self.training:  # the layer updates them in place, which autograd must not see
            rows = {source: row.clone() for source, row in rows.items()}
        with swapped(self, values | rows):
            yield
            if self.training:
                for name, source in _STATISTICS.items():
                    if source in rows:
                        getattr(bank, name)[mode].copy_(getattr(self, source))

    def extra_repr(self) -> str:
        """The layer's own settings, and the number of modes."""
        own = super().extra_repr()
        return f"{own}, modes={len(self.bank.gamma)}" if own else f"modes={len(self.bank.gamma)}"

    def __reduce__(self) -> Any:
        """Copy and pickle by the original class, from which this one is made again."""
        return _rebuild, (original_class(self),), self.__dict__.copy()


def _affine(
    x: Tensor, scale: Tensor, shift: Tensor | None, shared: bool, overwrite: bool
) -> Tensor:
    """`x * scale + shift` for every one of the samples folded into x.

    Args:
        shared: whether x is the same for all samples, and holds it once.
        overwrite: whether the result may take the place of x.
    """
    B, *rest = x.shape
    S = scale.shape[0]
    samples = x[None] if shared else x.view(S, B // S, *rest)
    if samples.dtype != scale.dtype or (shift is not None and shift.dtype != scale.dtype):
        y = samples * scale if shift is None else samples * scale + shift
        return y.flatten(0, 1).to(x.dtype)
    if overwrite and not shared and not torch.is_grad_enabled():
        if shift is None:
            samples.mul_(scale)
        else:
            torch.addcmul(shift, samples, scale, out=samples)
        return x
    y = samples * scale if shift is None else torch.addcmul(shift, samples, scale)
    return y.flatten(0, 1)


_BAYES_CLASSES: dict[type[nn.Module], type[BayesNorm]] = {}


def _bayes_class(cls: type[nn.Module]) -> type[BayesNorm]:
    """The Bayesian subclass of a norm's class: one, however many layers have it."""
    if cls not in _BAYES_CLASSES:
        members = {"__module__": cls.__module__}
        _BAYES_CLASSES[cls] = type(f"Bayes{cls.__name__}", (BayesNorm, cls), members)
    return _BAYES_CLASSES[cls]


def _rebuild(cls: type[nn.Module]) -> nn.Module:
    return _bayes_class(cls).__new__(_bayes_class(cls))


def original_class(layer: BayesNorm) -> type[nn.Module]:
    """The class of the layer before it was made Bayesian."""
    cls: type[nn.Module] = type(layer).__bases__[1]
    return cls


def make_bayes(
    layer: nn.Module, form: Form, modes: int, stats: bool, index: int, like: Tensor
) -> None:
    """Turn a layer into a Bayesian norm, in place; the arguments are those of `Bank`."""
    bank = Bank(layer, form, modes, stats, index, like)
    layer.__class__ = _bayes_class(type(layer))
    layer.bank = bank


def make_plain(layer: BayesNorm, draw: bool) -> None:
    """Turn a Bayesian norm back into its original class, in place.

    Args:
        draw: whether it keeps the weights of its active draw, or gets its original ones back.
    """
    values: dict[str, Any] = {}
    gamma = layer.bank.form.gamma
    if draw:
        with layer.loaded(0):
            names = (layer.bank.form.gamma, layer.bank.form.beta, *_STATISTICS.values())
            values = {n: getattr(layer, n) for n in names if n and hasattr(layer, n)}
    del layer.bank
    plain: nn.Module = layer
    plain.__class__ = original_class(layer)
    for name, value in values.items():
        holder = slot(layer, name)
        assert holder is not None
        if isinstance(value, Tensor):
            value = value.detach().clone()
        is_parameter = holder is layer._parameters and value is not None
        holder[name] = nn.Parameter(value) if is_parameter else value
    for flag in ("affine", "elementwise_affine"):
        if values.get(gamma) is not None and hasattr(layer, flag):
            setattr(layer, flag, True)


@contextmanager
def activated(layers: Sequence[BayesNorm], actives: Sequence[Active]) -> Iterator[None]:
    """Let every layer run with its active draws; a single draw is loaded into the layers."""
    with ExitStack() as stack:
        stack.callback(_deactivate, layers)
        for layer, active in zip(layers, actives, strict=True):
            _set_active(layer, active)
            if len(active.draws) == 1:
                stack.enter_context(layer.loaded(0))
        yield


def _deactivate(layers: Sequence[BayesNorm]) -> None:
    for layer in layers:
        _set_active(layer, None)


def _set_active(layer: BayesNorm, active: Active | None) -> None:
    # Modules look at what is set on them, which takes longer than all else here.
    object.__setattr__(layer.bank, "active", active)
