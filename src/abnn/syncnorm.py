"""Batch statistics of a batch that is shared by several processes: those of all its rows.

torch's SyncBatchNorm runs on GPUs only and one network at a time. Here a norm first normalises its
input with the statistics of the whole batch, all its modes in one exchange; then the layer's own
forward runs in eval mode with a mean of 0 and a variance of 1, for its gamma, beta and whatever
else it does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from abnn.distributed import World
from abnn.draws import Draw
from abnn.families import probe_inputs
from abnn.model import ABNN
from abnn.norm import Active, BayesNorm, NotFoldable, original_class
from abnn.surgery import swapped

Sum = Callable[[Tensor], Tensor]  # adds up a tensor over all processes, in place


class Normalise(torch.autograd.Function):
    """`(x - mean) / sqrt(var + eps)` of `[S, rows, C, ...]`, over the rows of all processes.

    It returns that, the mean and the variance, `[S, C]`, and how many values each is of.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, eps: float, total: Sum
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One exchange of sums, sums of squares and counts."""
        dims = _reduced(x)
        wide = x if x.dtype == torch.float64 else x.float()
        # torch.var_mean does the same, but on a CPU takes ten times as long.
        own = wide.mean(dims)
        centred = wide - _like(own, wide)
        var, mean = centred.square().mean(dims).double(), own.double()
        count = torch.full_like(mean, x.numel() // mean.numel())
        # In double precision, so that the difference of two large sums keeps its digits.
        sums = total(torch.stack([count * mean, count * (var + mean.square()), count]))
        mean, square, n = sums[0] / sums[2], sums[1] / sums[2], sums[2, 0, 0]
        var = (square - mean.square()).clamp_min(0)
        scale = (var + eps).rsqrt()
        x_hat = centred.sub_(_like(mean - own, wide)).mul_(_like(scale, wide)).to(x.dtype)
        ctx.save_for_backward(x_hat, scale, n)
        ctx.total = total
        ctx.mark_non_differentiable(mean, var, n)
        return x_hat, mean, var, n

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """One exchange: every row of every process moves the mean and the variance."""
        x_hat, scale, n = ctx.saved_tensors
        wide = x_hat if x_hat.dtype == torch.float64 else x_hat.float()
        grad, dims = grads[0].to(wide.dtype), _reduced(x_hat)
        dx = grad * wide
        sums = torch.stack([grad.sum(dims), dx.sum(dims)]).double()
        mean, slope = ctx.total(sums) / n
        # scale * (grad - mean - x_hat * slope), in the memory of the product above
        torch.mul(wide, _like(-slope, wide), out=dx)
        dx.add_(grad).sub_(_like(mean, wide)).mul_(_like(scale, wide))
        return dx.to(x_hat.dtype), None, None


def _reduced(x: Tensor) -> tuple[int, ...]:
    return (1, *range(3, x.ndim))


def _like(values: Tensor, x: Tensor) -> Tensor:
    return values.to(x.dtype).reshape(len(values), 1, -1, *[1] * (x.ndim - 3))


class WholeBatch:
    """Lets batch norms use the statistics of a batch over all processes.

    Args:
        layers: the Bayesian norms; those that use batch statistics are chosen.
        total: adds up over the processes.
    """

    def __init__(self, layers: Iterable[BayesNorm], total: Sum) -> None:
        self.layers = [layer for layer in layers if _uses_batch(layer)]
        self.total = total
        self.running = False
        self._undo: dict[BayesNorm, ExitStack] = {}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Put hooks on the layers, which do nothing but inside `run`."""
        with ExitStack() as stack:
            for layer in self.layers:
                stack.callback(layer.register_forward_pre_hook(self._before).remove)
                after = layer.register_forward_hook(self._after, always_call=True)
                stack.callback(after.remove)
            yield

    def run(self, forward: Callable[[], Tensor]) -> Tensor:
        """A forward pass that all processes run at the same time, each on its own rows."""
        self.running = True
        try:
            return forward()
        finally:
            self.running = False

    def _before(self, layer: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not self.running or not (layer.training or layer.bank.form.coupled):
            return None
        x, active = args[0], layer.bank.active
        S = len(active.draws)
        if active.trunk is not None and active.trunk.ends_at(layer.bank.index, x):
            x = active.trunk.end_before(layer.bank.index, x, S)
        if x.shape[0] % S:
            raise NotFoldable
        samples = x.unflatten(0, (S, -1))
        x_hat, mean, var, n = Normalise.apply(samples, layer.eps, self.total)
        if layer.training:
            _follow(layer, mean, var * n / (n - 1).clamp_min(1))
        self._undo[layer] = _neutral(layer, x_hat)
        return x_hat.flatten(0, 1), *args[1:]

    def _after(self, layer: Any, _args: Any, _result: Any) -> None:
        undo = self._undo.pop(layer, None)
        if undo is not None:
            undo.close()


def whole_batch(bnn: ABNN, world: World) -> WholeBatch:
    """The batch norms of a network, made to use a batch over all processes; or why they can't."""
    for name, layer in bnn.bayes_layers.items():
        if _uses_batch(layer) and not _is_right_for(layer):
            raise ValueError(
                f"The batch statistics of {name!r} ({original_class(layer).__name__}) can't be "
                "shared by processes, because its forward is not that of a batch norm; use "
                "split='modes', or convert with stats='frozen'."
            )
    for name, module in bnn.backbone.named_modules():
        batch_norm = isinstance(module, _BatchNorm) and not isinstance(module, BayesNorm)
        if batch_norm and module.running_mean is None:
            raise ValueError(
                f"{name!r} normalises by the statistics of its batch and is not Bayesian, so "
                "processes can't share a batch; convert it too, or use split='modes'."
            )
    return WholeBatch(bnn.bayes_layers.values(), world.sum_)


def example_statistics(layers: Iterable[BayesNorm], group: range) -> list[Tensor]:
    """Running statistics that are a mean over examples, so that processes can average their own.

    Instance norms normalise every example alone, but their running statistics follow all.
    """
    return [
        statistic[group.start : group.stop]
        for layer in layers
        if not _uses_batch(layer)
        for statistic in (layer.bank.mean, layer.bank.var)
        if statistic is not None
    ]


def _uses_batch(layer: BayesNorm) -> bool:
    tracked = layer.bank.mean is not None and layer.bank.form.family == "batch"
    return tracked or layer.bank.form.coupled


def _follow(layer: Any, mean: Tensor, var: Tensor) -> None:
    """Move the running statistics of every active mode, as `nn.BatchNorm2d` does."""
    bank, modes = layer.bank, [draw.mode for draw in layer.bank.active.draws]
    alone = len(modes) == 1  # the layer itself holds them then, and the bank gets them afterwards
    held = (
        (layer.running_mean, layer.running_var, layer.num_batches_tracked)
        if alone
        else (bank.mean, bank.var, bank.batches)
    )
    rows = [None if t is None else t[None] if alone else t[modes] for t in held]
    running_mean, running_var, batches = rows
    assert running_mean is not None
    assert running_var is not None
    momentum: Any = layer.momentum
    if batches is not None:
        batches += 1
        if momentum is None:
            momentum = 1 / batches[:, None].to(mean)
    for running, now in ((running_mean, mean), (running_var, var)):
        running += (momentum * (now - running)).to(running.dtype)
    if not alone:
        for tensor, row in zip(held, rows, strict=True):
            if tensor is not None:
                tensor[modes] = row


def _neutral(layer: Any, x: Tensor) -> ExitStack:
    """Statistics with which the layer only scales and shifts; closing the stack takes them away."""
    bank, active = layer.bank, layer.bank.active
    own = (layer.running_mean, getattr(layer, bank.form.gamma))
    like = next((t for t in own if t is not None), x)
    zero = torch.zeros(bank.form.shape, dtype=like.dtype, device=like.device)
    # The layer adds eps to the variance.
    values = {"running_mean": zero, "running_var": zero + (1 - layer.eps), "training": False}
    undo = ExitStack()
    undo.enter_context(swapped(layer, values))
    undo.enter_context(swapped(bank, dict.fromkeys(("mean", "var", "batches"))))
    undo.callback(vars(active).update, mean=active.mean, var=active.var)
    active.mean = active.var = None
    return undo


def _is_right_for(layer: BayesNorm) -> bool:
    """Whether a layer does the same this way as by its own forward: tried on small inputs."""
    if original_class(layer).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        return True
    own, here = (copy.deepcopy(layer).to("cpu", torch.float32) for _ in range(2))
    for copied in (own, here):
        bank, draws = copied.bank, [Draw(0, 0, 0, "probe")]
        bank.active = Active(draws, bank.gamma[:1], 2, "channel", 0.0, bias=bank.beta)
        copied.training = bank.mean is not None
    whole = WholeBatch([here], World().sum_)
    with torch.random.fork_rng(devices=[]), torch.no_grad(), whole.attached():
        torch.manual_seed(0)
        for x in probe_inputs(layer.bank.form.shape):
            try:
                expected = own(x.clone())
            except Exception:  # any error only means that this is not the layer's input
                continue
            state = {k: t for k, t in own.state_dict().items() if not k.startswith("bank.")}
            found = {"y": whole.run(partial(here, x.clone())), **here.state_dict()}
            return all(
                torch.allclose(t.float(), found[k].float(), rtol=1e-3, atol=1e-4)
                for k, t in {"y": expected, **state}.items()
            )
    return False
