"""Batch statistics of a batch that is shared by several processes: those of all its rows.

torch's SyncBatchNorm runs on GPUs only and one network at a time. Here the statistics of all
processes' rows are put where a norm keeps its running ones, and its own forward runs in eval mode.
To autograd they are constants then; that they depend on the rows is made up for in the backward
pass. All modes that run together share an exchange.
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


def batch_statistics(x: Tensor, total: Sum) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of `[S, rows, C, ...]` over the rows of all processes, and their number.

    One exchange, of counts, sums and sums of squares.

    >>> mean, var, n = batch_statistics(torch.tensor([[[1.0], [3.0]]]), total=lambda sums: sums)
    >>> mean.item(), var.item(), n.item()
    (2.0, 1.0, 2.0)
    """
    wide = _wide(x.detach())
    own = [torch.batch_norm_update_stats(sample, None, None, 0.0) for sample in wide]
    mean, var = (torch.stack(each).double() for each in zip(*own, strict=True))
    count = torch.full_like(mean, x.numel() // mean.numel())
    # In double precision, so that the difference of two large sums keeps its digits.
    sums = total(torch.stack([count * mean, count * (var + mean.square()), count]))
    mean, square = sums[0] / sums[2], sums[1] / sums[2]
    return mean, (square - mean.square()).clamp_min(0), sums[2, 0, 0]


class Coupled(torch.autograd.Function):
    """x itself, `[S, rows, C, ...]`, on its way to a norm that takes its statistics for constants.

    Every row of every process moves the mean and the variance. With `g` the gradient of a norm
    whose statistics do not move, and means over the rows of all processes, that of one whose do is

        g - mean(g) - x_hat * mean(g * x_hat)
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, var: Tensor, n: Tensor, eps: float, total: Sum
    ) -> Tensor:
        """Nothing but to remember."""
        ctx.save_for_backward(x, mean, var, n)
        ctx.eps, ctx.total = eps, total
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """One exchange, of two sums."""
        x, mean, var, n = ctx.saved_tensors
        wide, grad = _wide(x), _wide(grads[0])
        mean, var, one = mean.to(wide), var.to(wide), torch.ones_like(mean[0]).to(wide)
        own = [
            torch.ops.aten.native_batch_norm_backward(
                *(grad[s], wide[s], one, mean[s], var[s], None, None, False, ctx.eps),
                [False, True, True],
            )[1:]
            for s in range(len(x))
        ]
        sums = torch.stack([torch.stack(each) for each in zip(*own, strict=True)]).double()
        slope, shift = (-ctx.total(sums) / n).to(wide)
        # torch's own batch norm is the fastest map of channels there is, also for this.
        rest = [
            torch.batch_norm(
                *(wide[s], slope[s], shift[s], mean[s], var[s]), False, 0.0, ctx.eps, False
            )
            for s in range(len(x))
        ]
        dx = torch.stack([own.add_(g) for own, g in zip(rest, grad, strict=True)])
        return dx.to(x.dtype), None, None, None, None, None


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


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
        mean, var, n = batch_statistics(samples, self.total)
        if layer.training:
            _follow(layer, mean, var * n / (n - 1).clamp_min(1))
        self._undo[layer] = _holding(layer, mean, var, x)
        x = Coupled.apply(samples, mean, var, n, layer.eps, self.total).flatten(0, 1)
        return x, *args[1:]

    def _after(self, layer: Any, _args: Any, _result: Any) -> None:
        undo = self._undo.pop(layer, None)
        if undo is not None:
            undo.close()


class WholeBatchOfNetwork(WholeBatch):
    """The same for the batch norms of an ordinary network, where these are in training mode.

    Args:
        net: the network; of its batch norms those are left out whose forward is another.
        total: adds up over the processes.
    """

    def __init__(self, net: nn.Module, total: Sum) -> None:
        super().__init__([], total)
        norms = (part for part in net.modules() if isinstance(part, _BatchNorm))
        self.layers: list[Any] = [norm for norm in norms if _is_batch_norm(norm)]

    def _before(self, layer: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        x = args[0]
        # Inside vmap, tensors can't be sent: each process then normalises by its own rows.
        if not (self.running and layer.training) or torch._C._functorch.is_batchedtensor(x):
            return None
        mean, var, n = batch_statistics(x[None], self.total)
        if layer.running_mean is not None:
            _move(layer, mean[0], (var * n / (n - 1).clamp_min(1))[0])
        like = next((t for t in (layer.running_mean, layer.weight) if t is not None), x)
        values = {"running_mean": mean[0].to(like), "running_var": var[0].to(like)}
        undo = self._undo[layer] = ExitStack()
        undo.enter_context(swapped(layer, {"training": False} | values))
        return Coupled.apply(x[None], mean, var, n, layer.eps, self.total)[0], *args[1:]


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


def _move(layer: Any, mean: Tensor, var: Tensor) -> None:
    """Move the running statistics of a batch norm, as its own forward does."""
    momentum: Any = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked += 1
        if momentum is None:
            momentum = 1 / layer.num_batches_tracked.to(mean)
    for running, now in ((layer.running_mean, mean), (layer.running_var, var)):
        running += (momentum * (now - running)).to(running.dtype)


def _holding(layer: Any, mean: Tensor, var: Tensor, x: Tensor) -> ExitStack:
    """Hold statistics of every active draw as running ones; closing the stack takes them away."""
    bank, draws = layer.bank, layer.bank.active.draws
    own = (layer.running_mean, getattr(layer, bank.form.gamma))
    like = next((t for t in own if t is not None), x)
    mean, var = (statistic.to(like.device, like.dtype) for statistic in (mean, var))
    undo = ExitStack()
    undo.enter_context(swapped(layer, {"training": False}))
    if len(draws) == 1:  # the layer itself holds what it runs with then
        values = {"running_mean": mean[0], "running_var": var[0]}
        undo.enter_context(swapped(layer, values))
        return undo
    modes, rows = [draw.mode for draw in draws], {}
    for name, statistic in (("mean", mean), ("var", var)):
        rows[name] = statistic.new_zeros(len(bank.gamma), *statistic.shape[1:])
        rows[name][modes] = statistic
    undo.enter_context(swapped(bank, rows))
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
            return _agree({"y": expected, **state}, found)
    return False


def _is_batch_norm(layer: Any) -> bool:
    """The same of a batch norm that is not Bayesian."""
    if type(layer).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        return True
    own, here = (copy.deepcopy(layer).to("cpu", torch.float32).train() for _ in range(2))
    whole = WholeBatchOfNetwork(nn.Identity(), World().sum_)
    whole.layers = [here]
    with torch.random.fork_rng(devices=[]), torch.no_grad(), whole.attached():
        torch.manual_seed(0)
        for x in probe_inputs(torch.Size([layer.num_features])):
            try:
                expected = own(x.clone())
            except Exception:  # any error only means that this is not the layer's input
                continue
            found = {"y": whole.run(partial(here, x.clone())), **here.state_dict()}
            return _agree({"y": expected, **own.state_dict()}, found)
    return False


def _agree(expected: dict[str, Tensor], found: dict[str, Tensor]) -> bool:
    return all(
        torch.allclose(t.float(), found[k].float(), rtol=1e-3, atol=1e-4)
        for k, t in expected.items()
    )
