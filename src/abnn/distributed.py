"""Many processes under torchrun: who they are, what they tell each other, how all stop together."""

from __future__ import annotations

import atexit
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from abnn.norm import BayesNorm

if TYPE_CHECKING:
    from abnn.model import ABNN

T = TypeVar("T")

# Up to so many numbers of all processes, their way takes longer than what they weigh: an all-reduce
# of gloo goes round twice, an all-gather once.
_FEW = 2**14


class PeerError(RuntimeError):
    """Another process of this run stopped or was lost, so this one stopped as well."""


class Meeting:
    """What every process says at one point of their work: some numbers, or that it failed.

    Args:
        size: number of processes.
        width: how many numbers each says.
    """

    def __init__(self, size: int, width: int) -> None:
        self.said = [0.0] * width
        self.heard = torch.zeros(size, width, dtype=torch.float64)

    def say(self, *numbers: float) -> None:
        """Leave the numbers of this process; those of all are in `heard` when the block is over."""
        assert len(numbers) == len(self.said)
        self.said = [float(number) for number in numbers]


class World:
    """The processes that work together; a process alone is a world of one and never communicates.

    Args:
        rank: the number of this process.
        size: how many processes there are.
        group: over which they communicate; `joined` makes it.

    >>> World().rank, World().size
    (0, 1)
    """

    def __init__(
        self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None
    ) -> None:
        self.rank, self.size, self._group = rank, size, group

    @property
    def device(self) -> torch.device:
        """Where this process computes: its own GPU, or the CPU.

        >>> World().device.type in ("cpu", "cuda")
        True
        """
        if torch.cuda.is_available():
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        return torch.device("cpu")

    @contextmanager
    def joined(
        self, device: torch.device | None = None, timeout: timedelta | None = None
    ) -> Iterator[World]:
        """A group of its own for a while; leaving it by an error ends the wait of the others.

        Args:
            device: of the tensors that are to be reduced; the CPU's always can be.
            timeout: how long to wait for the others; default: torch's own.
        """
        if self.size == 1:
            yield self
            return
        backend = "cpu:gloo,cuda:nccl" if device is not None and device.type == "cuda" else "gloo"
        with _connected():
            team = World(self.rank, self.size, dist.new_group(backend=backend, timeout=timeout))  # type: ignore[arg-type]
        try:
            yield team
        finally:
            dist.destroy_process_group(team._group)
            # Gloo closes its sockets, which wakes the others, when nothing refers to the group.
            team._group = None

    def gather(self, value: T) -> list[T]:
        """What every process gives, by rank.

        >>> World().gather("here")
        ['here']
        """
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with _connected():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def gather_first(self, value: T) -> list[T]:
        """What every process gives, by rank, on process 0; the others get nothing.

        >>> World().gather_first("here")
        ['here']
        """
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with _connected():
            first = dist.get_global_rank(self._group, 0)  # type: ignore[arg-type]
            dist.gather_object(value, values, first, group=self._group)
        return values or []

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over all processes, in place; all get the same bits."""
        if self.size == 1:
            return tensor
        with _connected():
            if tensor.device.type == "cpu" and self.size * tensor.numel() <= _FEW:
                parts = [torch.empty_like(tensor) for _ in range(self.size)]
                dist.all_gather(parts, tensor, group=self._group)
                tensor.copy_(reduce(torch.add, parts))  # one by one, so in the same order
            else:
                dist.all_reduce(tensor, group=self._group)
        return tensor

    @contextmanager
    def meeting(self, width: int = 0) -> Iterator[Meeting]:
        """All processes come to the end of this block, or all stop with an error.

        >>> with World().meeting(2) as meeting:
        ...     meeting.say(3, 4)
        >>> meeting.heard
        tensor([[3., 4.]], dtype=torch.float64)
        """
        meeting, failed = Meeting(self.size, width), None
        try:
            yield meeting
        except Exception as error:
            if self.size == 1 or isinstance(error, PeerError):
                raise
            failed = error
        rows = torch.tensor([[failed is not None, *meeting.said]], dtype=torch.float64)
        if self.size > 1:
            rows = rows.repeat(self.size, 1)
            with _connected():
                dist.all_gather(
                    list(rows.split(1)), rows[self.rank : self.rank + 1].clone(), self._group
                )
        if rows[:, 0].any():
            reasons = self.gather(failed and f"{type(failed).__name__}: {failed}")
            if failed is not None:
                raise failed
            rank = next(i for i, reason in enumerate(reasons) if reason)
            raise PeerError(
                f"Process {rank} of {self.size} stopped, and so did this one: {reasons[rank]}"
            )
        meeting.heard = rows[:, 1:]

    def together(self, work: Callable[[], T]) -> list[T]:
        """What `work` gives on every process, by rank; if it fails on one, all stop."""
        with self.meeting():
            result = work()
        return self.gather(result)

    def furthest(self, place: tuple[int, ...], value: T) -> T:
        """The value of the process that is furthest, the first such one, on every process.

        >>> World().furthest((0, 3), "checkpoint")
        'checkpoint'
        """
        steps = self.gather(place)
        values = [value]
        if self.size > 1:
            with _connected():
                source = dist.get_global_rank(self._group, steps.index(max(steps)))  # type: ignore[arg-type]
                dist.broadcast_object_list(values, source, group=self._group)
        return values[0]


@contextmanager
def _connected() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerError(
            "Another process of this run stopped or can't be reached; its own output says why."
        ) from error


def shard(bnn: ABNN, device: torch.device | str | None = None) -> ABNN:
    """Spread the backbone over all processes, for one that does not fit the memory of a device.

    Every process keeps a part of every weight and borrows the rest block by block, by torch's
    `fully_shard`; the norms, their modes and buffers stay whole. `predict` and `fit` then must be
    called by all processes at the same time, which may have different inputs. The network
    shares its tensors no longer with the one it was converted from.

    Args:
        bnn: what `abnn.convert` made, of the same weights on every process.
        device: where to compute; default: `world().device`.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    >>> shard(abnn.convert(net))  # one process has nobody to share with
    ABNN(Sequential, modes=4, alpha=0.01, 1 Bayesian norm, 64 added parameters)
    """
    here = world()
    if here.size == 1 or bnn.sharded is not None:
        return bnn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from abnn.artifact import fingerprint  # which imports networks, and they predict over processes

    device = torch.device(device) if device is not None else here.device
    before = fingerprint(bnn)
    if len({values["values"] for values in here.gather(before)}) > 1:
        raise ValueError(
            "The processes have networks with different weights, so they can't share one; load "
            "the same weights on every process."
        )
    mesh = init_device_mesh(device.type, (here.size,))
    # One draw is loaded into the norms' own parameters, which therefore stay where they are.
    whole = {p for layer in bnn.bayes_layers.values() for p in layer.parameters()}
    for tensor in (*whole, *bnn.buffers()):
        tensor.data = tensor.data.to(device)
    for block in (*_blocks(bnn.backbone), bnn.backbone):
        if any(parameter not in whole for parameter in block.parameters()):
            block.register_forward_hook(_owned)
            fully_shard(block, mesh=mesh, ignored_params=whole)
    bnn.sharded = before
    return bnn


def _owned(_block: nn.Module, _inputs: Any, outputs: Any) -> Any:
    """Outputs that are no views: a change of a view in place would take away FSDP's hook on it."""

    def own(leaf: Any) -> Any:
        return leaf.clone() if isinstance(leaf, Tensor) and leaf._is_view() else leaf

    return pytree.tree_map(own, outputs)


def _blocks(net: nn.Module) -> Iterator[nn.Module]:
    """What a network has in lists and sequences: its layers, blocks or stages."""
    listing = isinstance(net, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    for child in net.children():
        if listing and not isinstance(child, nn.Sequential | nn.ModuleList | nn.ModuleDict):
            if not isinstance(child, BayesNorm):
                yield child
        else:
            yield from _blocks(child)


def world() -> World:
    """The processes of this run: those of torchrun, or of a process group that is initialised.

    The first call under torchrun initialises the process group, with gloo, and with NCCL on
    machines with GPUs; a group that exists already is used as it is.

    >>> world().size
    1
    """
    if not dist.is_available():
        return World()
    if not dist.is_initialized():
        if int(os.environ.get("WORLD_SIZE", 1)) == 1 or "RANK" not in os.environ:
            return World()
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(World().device)
            backend = "cpu:gloo,cuda:nccl"
        from torch.distributed.rendezvous import rendezvous

        store, rank, size = next(rendezvous("env://"))
        dist.init_process_group(
            backend, store=_fresh(store, rank, size), rank=rank, world_size=size
        )
        atexit.register(_leave)
    return World(dist.get_rank(), dist.get_world_size())


def _fresh(store: Any, rank: int, size: int) -> Any:
    """A part of torchrun's store that no earlier attempt has written to.

    torchrun keeps one store over all its restarts (pytorch issue 135712), in which a process that
    was started again finds the addresses of dead ones. So every process says its own, new name;
    process 0 answers each name with a new place to meet, until all have come there.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    name, deadline = uuid.uuid4().hex, time.monotonic() + store.timeout.total_seconds()
    if rank > 0:
        store.set(f"abnn/name/{rank}", name)
        place = store.get(f"abnn/answer/{name}").decode()
        store.set(f"{place}/came/{rank}", "")
        return PrefixStore(place, store)
    place, missing, answered = f"abnn/{name}", set(range(1, size)), set()
    while missing:
        for other in [r for r in missing if store.check([f"abnn/name/{r}"])]:
            theirs = store.get(f"abnn/name/{other}").decode()
            if theirs not in answered:
                store.set(f"abnn/answer/{theirs}", place)
                answered.add(theirs)
        missing = {r for r in missing if not store.check([f"{place}/came/{r}"])}
        if time.monotonic() > deadline:
            raise PeerError(f"Processes {sorted(missing)} did not come; see their output.")
        time.sleep(0.01)
    return PrefixStore(place, store)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
