"""A fit whose batches are shared by two processes, over that of one; each process has one core.

    python benchmarks/data_parallel.py [--rounds 5] [--steps 4] [--batch 128]

All processes are started by torchrun, stay up and take turns, so that no start is timed. "apart"
are two processes at the same time that fit half a batch each and never talk: the best that the
machine gives. "half" is one of these while the other rests. A column is the throughput in whole
batches over that of one process, so "half" is about 1, and "apart" falls behind twice of that as
far as the cores slow each other.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.utils.data import DataLoader, TensorDataset

import abnn
from harness import interleaved, milliseconds, ratio, say, table, versions
from plain_forms import network

MODES = 4
STATS = ("per_mode", "frozen")
Team = Sequence[Connection]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of every fit")
    parser.add_argument("--batch", type=int, default=128, help="of all processes together")
    parser.add_argument("--serve", nargs=2, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve[0], int(args.serve[1]))
        return
    if len(cores()) < 2:
        sys.exit("Two processes need a core each, and this machine has one.")
    with started(processes=1) as one, started(1, core=1) as other, started(2) as two:
        rows = [measure(one, other, two, stats, args) for stats in STATS]
    print(f"Two processes, batch {args.batch}: {versions()}\n")
    print(table(("ResNet-20", "one ms a step", "two", "apart", "half", "A/A"), rows))


def measure(one: Team, other: Team, two: Team, stats: str, args: argparse.Namespace) -> list[str]:
    """One row: throughput over that of one process."""
    whole, half = args.batch, args.batch // 2
    say(f"{stats}: {args.rounds} rounds")
    seconds = interleaved(
        {
            "one": turn(one, stats, whole, args.steps),
            "two": turn(two, stats, whole, args.steps),
            "apart": turn([*one, *other], stats, half, args.steps),
            "half": turn(one, stats, half, args.steps),
            "A/A": turn(one, stats, whole, args.steps),
        },
        args.rounds,
        warm_up=1,
    )
    speeds = {name: ratio(seconds, "one", name) for name in ("two", "apart", "half", "A/A")}
    speeds["half"] /= 2
    step = float(milliseconds(seconds, "one")) / args.steps
    return [stats, f"{step:.0f}", *(f"{speed:.2f}" for speed in speeds.values())]


def turn(team: Team, *work: object) -> Callable[[], None]:
    """A fit by all processes of a team."""

    def run() -> None:
        for process in team:
            process.send(work)
        for process in team:
            process.recv()

    return run


# The processes


@contextmanager
def started(processes: int, core: int = 0) -> Iterator[Team]:
    """So many processes of one torchrun, on as many cores; they end with the block."""
    with TemporaryDirectory() as folder, Listener(str(Path(folder) / "socket")) as listener:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(processes), __file__, "--serve"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        torchrun = subprocess.Popen([*command, str(listener.address), str(core)], env=environment)
        team: list[Connection] = []
        try:
            team += [listener.accept() for _ in range(processes)]
            yield team
        finally:
            for process in team:
                process.close()
            torchrun.wait()


def serve(address: str, first: int) -> None:
    """A process: fit whenever told to, until there is nobody who tells."""
    core = cores()[first + int(os.environ["LOCAL_RANK"])]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    net, pixels = network("ResNet-20, 32 px")
    bnns = {stats: abnn.convert(net, modes=MODES, stats=stats) for stats in STATS}
    with Client(address) as parent:
        while True:
            try:
                stats, batch, steps = parent.recv()
            except EOFError:
                return
            torch.manual_seed(0)
            rows = steps * batch
            data = TensorDataset(torch.randn(rows, 3, pixels, pixels), torch.randint(10, (rows,)))
            loader = DataLoader(data, batch)
            abnn.fit(bnns[stats], loader, epochs=1, lr=1e-3, split="data", progress=False)
            parent.send("done")


def cores() -> list[int]:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


if __name__ == "__main__":
    main()
