"""The batches of a data set, each loaded while the one before is computed."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from queue import Queue
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from abnn.batches import inputs_of, labels_of, to_device
from abnn.folding import first_tensor
from abnn.outputs import Inputs


@dataclass(frozen=True, eq=False)
class Batch:
    """Some consecutive examples of a data set.

    Args:
        start: how many examples come before, of those that the loader gives this process.
        rows: how many examples these are.
        inputs: what the network takes, on its device.
        labels: class indices, on the CPU, or `None` if the loader gives none.
    """

    start: int
    rows: int
    inputs: Inputs
    labels: Tensor | None


def batches(
    loader: Iterable[Any], device: torch.device | None = None
) -> Generator[Batch, None, None]:
    """Each batch of a loader with its place in the data set, one loaded ahead.

    A thread loads, and on CUDA copies, the next batch. What the loader raises is raised here.
    Closing the generator, or leaving it by an error, ends the thread: use `contextlib.closing`.

    >>> data = [(torch.zeros(4, 2), torch.arange(4)), (torch.ones(3, 2), torch.arange(3))]
    >>> [(batch.start, batch.rows) for batch in batches(data)]
    [(0, 4), (4, 3)]
    """
    queue: Queue[tuple[Batch, Any] | BaseException | None] = Queue(maxsize=1)
    stopped = threading.Event()
    side = torch.cuda.Stream(device) if device is not None and device.type == "cuda" else None

    def load() -> None:
        try:
            start = 0
            for raw in loader:
                inputs, labels = inputs_of(raw), labels_of(raw)
                rows = first_tensor(inputs).shape[:1].numel()
                moved, event = _move(inputs, device, side)
                queue.put((Batch(start, rows, moved, labels), event))
                if stopped.is_set():
                    return
                start += rows
            queue.put(None)
        except BaseException as error:  # the caller shall see it, whatever it is
            queue.put(error)

    thread = threading.Thread(target=load, name="abnn-prefetch", daemon=True)
    thread.start()
    try:
        while (item := queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            batch, event = item
            _await(batch.inputs, event, device)
            del item
            yield batch
    finally:
        stopped.set()
        if not queue.empty():  # the thread may wait for room, and puts once more at most
            queue.get()
        thread.join()


def _move(
    inputs: Inputs, device: torch.device | None, side: torch.cuda.Stream | None
) -> tuple[Inputs, Any]:
    """The inputs on the device, and on CUDA the event after which they are there."""
    if side is None:
        return to_device(inputs, device), None
    with torch.cuda.stream(side):
        # Only copies from pinned memory run beside the computation.
        pinned = pytree.tree_map(lambda t: t.pin_memory() if _on_cpu(t) else t, inputs)
        moved = to_device(pinned, device)
        return moved, side.record_event()


def _await(inputs: Inputs, event: Any, device: torch.device | None) -> None:
    if event is not None:
        current = torch.cuda.current_stream(device)
        current.wait_event(event)
        for leaf in pytree.tree_leaves(inputs):
            if isinstance(leaf, Tensor):
                leaf.record_stream(current)  # its memory is not to be reused before we are done


def _on_cpu(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "cpu"
