"""A fit whose batches are shared by two processes, over that of one; each process has one core.

    python benchmarks/data_parallel.py [--rounds 5] [--steps 4] [--batch 128]

All processes are started by torchrun, stay up and take turns, so that no start is timed. "apart"
are two processes at the same time that fit half a batch each and never talk: the best that the
machine gives. "half" is one of these while the other rests. A column is the throughput in whole
batches over that of one process, so "half" is about 1, and "apart" falls behind twice of that as
far as the cores slow each other. "two, CPU" is the same as "two" by the processes' CPU time: what
it would be if nobody waited, neither for the other nor for a core that somebody else has.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.utils.data import DataLoader, TensorDataset

import abnn
from abnn.model import Stats
from harness import Timings, interleaved, milliseconds, ratio, say, table, versions
from plain_forms import network

MODES = 4
STATS: tuple[Stats, ...] = ("per_mode", "frozen")
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
    print(table(("ResNet-20", "one ms a step", "two", "two, CPU", "apart", "half", "A/A"), rows))


def measure(one: Team, other: Team, two: Team, stats: Stats, args: argparse.Namespace) -> list[str]:
    """One row: throughput over that of one process."""
    whole, half = args.batch, args.batch // 2
    teams = {
        "one": (one, whole),
        "two": (two, whole),
        "apart": ([*one, *other], half),
        "half": (one, half),
        "A/A": (one, whole),
    }
    say(f"{stats}: {args.rounds} rounds")
    cpu: Timings = {name: [] for name in teams}
    turns = {
        name: turn(team, cpu[name], stats, batch, args.steps)
        for name, (team, batch) in teams.items()
    }
    seconds = interleaved(turns, args.rounds, warm_up=1)
    step = float(milliseconds(seconds, "one")) / args.steps
    speeds = (
        ratio(seconds, "one", "two"),
        ratio(cpu, "one", "two"),
        ratio(seconds, "one", "apart"),
        ratio(seconds, "one", "half") / 2,
        ratio(seconds, "one", "A/A"),
    )
    return [stats, f"{step:.0f}", *(f"{speed:.2f}" for speed in speeds)]


def turn(team: Team, cpu: list[float], *work: object) -> Callable[[], None]:
    """A fit by all processes of a team; the CPU time of the one that took most is kept."""

    def run() -> None:
        for process in team:
            process.send(work)
        cpu.append(max(process.recv() for process in team))

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
            before = time.process_time()
            abnn.fit(bnns[stats], loader, epochs=1, lr=1e-3, split="data", progress=False)
            parent.send(time.process_time() - before)


def cores() -> list[int]:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


if __name__ == "__main__":
    main()
