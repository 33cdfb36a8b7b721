"""A data set over several processes: batches dealt out in turn, results in the loader's order."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from itertools import zip_longest
from typing import Any, TypeVar

from torch import Tensor, nn

from abnn.batches import length_of
from abnn.digests import tensor_bytes
from abnn.distributed import World
from abnn.order import randomness_of_first
from abnn.shares import Deal, is_share

B = TypeVar("B")
R = TypeVar("R")

# Results are sent when the first of them is this old: small batches would wait for the network.
HOLD_SECONDS = 0.1


def in_turns(
    team: World,
    predictor: object,
    loader: Iterable[Any],
    feed: Callable[[Iterable[Any]], Generator[B, None, None]],
    work: Callable[[int, B], R],
    take: Callable[[R], None],
    *,
    everywhere: bool = True,
) -> int:
    """Work on every batch of a loader, each on one process, and take the results in its order.

    In a turn every process works on one batch; batches stay whole, so what a network or its noise
    makes of a batch does not depend on the number of processes. An error on one process ends all.
    Returns the number of batches.

    Args:
        team: the processes; one alone works on all batches and communicates nothing.
        predictor: what works. One whose weights are spread over processes runs on all of them at
            once or on none, so all work on all batches.
        loader: the same on every process.
        feed: what prepares the batches.
        work: takes the number of a batch in the loader, from 1, and the batch.
        take: is given the results, while other processes work on their next batch.
        everywhere: let every process take all results, not only process 0.

    >>> shout = lambda number, batch: f"{number}. {batch}!"
    >>> in_turns(World(), None, ["a", "b"], lambda loader: (b for b in loader), shout, print)
    1. a!
    2. b!
    2
    """
    parted = in_parts(predictor)
    deal = Deal(loader, *((0, 1) if parted else (team.rank, team.size)))
    done, held, results = 0, list[R](), list[R]()
    sent = time.monotonic()
    # Closed whatever happens, or a thread that loads would wait for ever.
    with randomness_of_first(loader, team), closing(feed(deal)) as batches:
        while True:
            with team.meeting(4) as meeting:
                _empty(results, take)
                batch = next(batches, None)
                given = batch is not None
                if batch is not None and not parted:
                    held.append(work(done + deal.rank + 1, batch))
                due = team.size == 1 or time.monotonic() - sent > HOLD_SECONDS
                meeting.say(given, deal.turn() if given else deal.checksum, deal.seen, due)
            here = meeting.heard[:, 0]
            _check_turn(meeting.heard, done, parted)
            if parted:  # all have a batch or none has: else some would wait inside the network
                with team.meeting():
                    if batch is not None:
                        held.append(work(done + 1, batch))
            del batch
            done += int(here.any() if parted else here.sum())
            if meeting.heard[:, 3].any() or not here.any():
                if parted:
                    hands = [held] if everywhere or team.rank == 0 else []
                else:
                    hands = team.gather(held) if everywhere else team.gather_first(held)
                results = [one for turn in zip_longest(*hands) for one in turn if one is not None]
                held, sent = [], time.monotonic()
                del hands  # what was taken is not to be held
            if not here.any():
                with team.meeting():
                    _empty(results, take)
                return done


def _empty(results: list[R], take: Callable[[R], None]) -> None:
    while results:
        take(results.pop(0))


def agree(
    team: World, predictor: object, loaders: Iterable[Iterable[Any]], arguments: Mapping[str, Any]
) -> None:
    """See that all processes were given the same work."""
    if team.size == 1:
        return
    with team.meeting():
        if any(map(is_share, loaders)):
            raise ValueError(
                "The loader has a DistributedSampler, which gives some rows twice so that all "
                "shares are equal; take it away, and every process loads its own batches by "
                "itself; or pass alone=True for a result of every process."
            )
        own = {
            "weights": 0 if in_parts(predictor) else _checksum(predictor),
            "number of batches": [length_of(loader) for loader in loaders],
            **{name: value for name, value in arguments.items() if _is_plain(value)},
        }
    everyone = team.gather(own)
    for rank, other in enumerate(everyone):
        odd = [key for key in everyone[0] | other if other.get(key) != everyone[0].get(key)]
        if odd:
            raise ValueError(
                f"Process {rank} was given something else than process 0, see {', '.join(odd)}; "
                "give all processes the same network, arguments and data, or pass alone=True for a "
                "result of every process."
            )


def _check_turn(heard: Tensor, done: int, parted: bool) -> None:
    """Refuse batches that are not of one loader: they end early on the last processes only."""
    given, checksums, seen, _ = heard.T
    here = given.bool()
    same = checksums[here] if here.any() else checksums
    ends = bool((given.diff() <= 0).all()) and not (parted and 0 < here.sum() < len(here))
    # After a turn that was not full, there must be none.
    late = here.any() and not parted and done % len(here) != 0
    counted = here.any() or bool((seen == seen[0]).all())
    if ends and not late and counted and bool((same == same[:1]).all()):
        return
    raise ValueError(
        f"The processes do not have the same batches (after batch {done}), so they can't share "
        "them; give all of them the same data in the same order, or pass alone=True for a result "
        "of every process."
    )


def in_parts(predictor: object) -> bool:
    """Whether weights are spread over processes, by `abnn.distributed.shard` or otherwise."""
    return isinstance(predictor, nn.Module) and any(
        hasattr(parameter, "to_local") for parameter in predictor.parameters()
    )


def _checksum(predictor: object) -> int:
    checksum = 0
    if isinstance(predictor, nn.Module):
        for tensor in (*predictor.parameters(), *predictor.buffers()):
            checksum = zlib.crc32(tensor_bytes(tensor), checksum)
    return checksum


def _is_plain(value: Any) -> bool:
    """Whether equal values are equal on another process too; a function is not."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
