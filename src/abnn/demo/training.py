"""What the demo trains: networks and fits, each of them once, in two processes at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional as F

import abnn
from abnn.demo.data import Batches, Data, load_data
from abnn.digests import digest
from abnn.files import write
from abnn.progress import Progress
from abnn.zoo import load_weights
from abnn.zoo.cifar_resnet import Block

MEMBERS = 4  # modes of the ABNN, and networks of the ensemble


class Size(NamedTuple):
    """How much work it is: images to train and to test on, and a fit for every lr and alpha."""

    train: int
    images: int
    epochs: int
    fit_epochs: int
    lrs: tuple[float, ...]
    alphas: tuple[float, ...]


FULL = Size(700, 500, epochs=60, fit_epochs=15, lrs=(0.005, 0.02, 0.1), alphas=(0.01, 0.1))
QUICK = Size(150, 100, epochs=20, fit_epochs=1, lrs=(0.02,), alphas=(0.01,))


class Candidate(NamedTuple):
    """A fit that was tried, with its NLL on the validation data."""

    lr: float
    alpha: float
    nll: float
    seconds: float


def network() -> nn.Sequential:
    """The residual network of the demo, for 8 x 8 grey images, with random weights.

    >>> network()(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 8])
    """
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Block(16, 16, stride=1),
        Block(16, 32, stride=2),
        Block(32, 32, stride=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 8),
    )


def train_network(batches: Batches, epochs: int, seed: int, label: str = "train") -> nn.Sequential:
    """Train a network from scratch by SGD, with a learning rate that rises to 0.1 and falls to 0.

    >>> batches = Batches(torch.zeros(100, 1, 8, 8), torch.zeros(100).long())
    >>> train_network(batches, epochs=1, seed=0).training
    False
    """
    steps = epochs * len(batches)
    with torch.random.fork_rng(devices=[]), Progress(steps, label) as bar:
        torch.manual_seed(seed)
        net = network()
        sgd = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=5e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(sgd, 0.1, total_steps=steps)
        for step, (x, y) in enumerate((batch for _ in range(epochs) for batch in batches), start=1):
            loss = F.cross_entropy(net(x), y)
            sgd.zero_grad()
            loss.backward()
            sgd.step()
            schedule.step()
            bar.update(step, f"loss {loss.item():.4f}")
    return net.eval()


@dataclass(frozen=True)
class Work:
    """All trainings of a demo; what is done is read from its directory.

    Args:
        folder: that directory.
        data: of the demo, as many images as its size says.
        seed: of the networks and of the fits.
        size: how much work it is.
    """

    folder: Path
    data: Data
    seed: int
    size: Size

    @property
    def settings(self) -> list[tuple[float, float]]:
        """Learning rate and alpha of all fits."""
        return list(product(self.size.lrs, self.size.alphas))

    @property
    def batches(self) -> Batches:
        """The training data."""
        return Batches(*self.data.train)

    def network(self, member: int) -> tuple[nn.Sequential, float]:
        """A trained network, and the seconds that took."""
        file = self.folder / f"network-{member}.safetensors"
        if file.exists():
            net = network()
            load_weights(net, file)
            with safetensors.safe_open(file, "pt") as saved:
                return net.eval(), float(saved.metadata()["seconds"])
        started = time.perf_counter()
        seed, label = MEMBERS * self.seed + member, f"network {member + 1}"
        net = train_network(self.batches, self.size.epochs, seed, label)
        seconds = time.perf_counter() - started
        write(file, safetensors.torch.save(net.state_dict(), {"seconds": str(seconds)}))
        return net, seconds

    def fit(self, net: nn.Module, lr: float, alpha: float) -> tuple[abnn.ABNN, Candidate, Path]:
        """An ABNN of the network, how good it is on the validation data, and its run directory."""
        bnn = abnn.convert(net, modes=MEMBERS, alpha=alpha)
        # The name tells the network apart too: a fit goes on with its own one only.
        run = self.folder / f"fit-lr{lr:g}-alpha{alpha:g}-{digest(net.state_dict())[:8]}"
        result = abnn.fit(
            bnn,
            self.batches,
            validation=[self.data.validation],
            run=run,
            snapshots=10,
            progress=False,
            checkpoint_seconds=1,
            epochs=self.size.fit_epochs,
            lr=lr,
            schedule="polynomial",
            batch_size=50,
            seed=self.seed,
        )
        assert result.whole is not None  # there was validation data
        return bnn, Candidate(lr, alpha, result.whole.nll, result.seconds), run

    def best_fit(
        self, net: nn.Module, second: subprocess.Popen[bytes] | None
    ) -> tuple[abnn.ABNN, list[Candidate], Path]:
        """The ABNN of least validation NLL, all fits, and the run directory of the best."""
        done = []
        with Progress(len(self.settings), "fit") as bar:
            for lr, alpha in self.settings:
                if second is not None and (lr, alpha) in self.settings[_FIRST_FITS:]:
                    second.wait()
                done.append(self.fit(net, lr, alpha))
                nll = done[-1][1].nll
                bar.update(len(done), f"lr {lr:g}, alpha {alpha:g}: validation NLL {nll:.3f}")
        bnn, _, run = min(done, key=lambda fit: fit[1].nll)
        return bnn, [candidate for _, candidate, _ in done], run


@contextmanager
def second_process(work: Work) -> Iterator[subprocess.Popen[bytes]]:
    """Let another process do its share meanwhile; what is not done then is done afterwards."""
    code = "import sys; from abnn.demo.training import second; second(*sys.argv[1:])"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(work.folder), str(work.seed)],
        stdin=subprocess.PIPE,  # which tells it when the first is gone, even if that was killed
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the first
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


_FIRST_FITS = 4  # that the first process does: with its network, half of the work


def second(folder: str, seed: str) -> None:
    """Do a share of the work while the first process lives."""

    def end_with_first() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=end_with_first, daemon=True).start()
    do_share(folder, seed)


def do_share(folder: str, seed: str) -> None:
    """Train the networks of the ensemble but the first, then do the last fits."""
    data = load_data(int(seed)).first(FULL.train, FULL.images)
    work = Work(Path(folder), data, int(seed), FULL)
    with one_thread():
        for member in range(1, MEMBERS):
            work.network(member)
        net, _ = work.network(0)
        for lr, alpha in work.settings[_FIRST_FITS:]:
            work.fit(net, lr, alpha)


@contextmanager
def one_thread() -> Iterator[None]:
    """A network this small gains nothing from threads, and loses much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
