"""A tour on real data: train, convert, fit, save, and compare with what else there is.

The digits 0 to 7 of scikit-learn are what a network learns; the digits 8 and 9, which it never
sees, and pieces of photographs are what it should be unsure of. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import abnn
from abnn import demo_text
from abnn.baselines import DeepEnsemble, Single, TemperatureScaling
from abnn.digests import digest
from abnn.files import write
from abnn.progress import Progress
from abnn.report import write_report
from abnn.rundir import LOSSES
from abnn.zoo import load_weights
from abnn.zoo.cifar_resnet import Block

Labelled = tuple[Tensor, Tensor]
Method = Single | TemperatureScaling | abnn.ABNN | DeepEnsemble

SEED = 10  # seeds 0 to 4 were looked at while this was made, and would flatter it
TITLES = {
    "single": "Network alone",
    "temperature": "Temperature scaling",
    "ensemble": "Deep ensemble",
}
MEMBERS = 4  # modes of the ABNN, and networks of the ensemble
LOW, HIGH = -1.5, 2.5  # between which all pixels lie, with their noise
MEAN, STD = -LOW / (HIGH - LOW), 1 / (HIGH - LOW)
CORRUPTIONS, SEVERITIES = ("gaussian_noise", "contrast", "defocus_blur"), (1, 3, 5)
NOISE = 0.25  # without it the digits are too easy for a method to be better than another
MOVES = tuple(product(range(3), repeat=2))  # an image padded by a pixel has nine places


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


class Data(NamedTuple):
    """Images `[N, 1, 8, 8]`, from 0 to 1 and noise on top; where known, the digits they show."""

    train: Labelled
    validation: Labelled
    test: Labelled
    unseen: Tensor
    photos: Tensor

    def first(self, size: Size) -> Data:
        """As many images as are asked for, to train and to test on."""
        (x, y), (test_x, test_y), n = self.train, self.test, size.images
        return Data(
            train=(x[: size.train], y[: size.train]),
            validation=self.validation,
            test=(test_x[:n], test_y[:n]),
            unseen=self.unseen[:n],
            photos=self.photos[:n],
        )


class Row(NamedTuple):
    """What a method achieved, and what it costs beyond the one network."""

    evaluation: abnn.Evaluation
    parameters: int
    seconds: float
    milliseconds: float


class Candidate(NamedTuple):
    """A fit that was tried, with its NLL on the validation data."""

    lr: float
    alpha: float
    nll: float
    seconds: float


@dataclass(frozen=True)
class Demo:
    """The outcome: a row for every method, all fits that were tried, and the report."""

    rows: dict[str, Row]
    candidates: list[Candidate]
    text: str


def run_demo(
    out: str | PathLike[str],
    seed: int = SEED,
    quick: bool = False,
    *,
    say: Callable[[str], object] = print,
) -> Demo:
    """Compare a network, temperature scaling, its ABNN and an ensemble on handwritten digits.

    After an interruption the same call goes on where it was.

    Args:
        out: a directory for `report.html`, `table.txt`, `results.json`, `network.safetensors` and
            `abnn/`.
        seed: of the split and the noise of the data, of the networks, and of the fits.
        quick: only a few seconds of work, whose numbers mean little.
        say: told what is being done.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as out:
    ...     demo = run_demo(out, quick=True, say=lambda line: None)
    >>> list(demo.rows)
    ['single', 'temperature', 'ABNN', 'ensemble']
    """
    folder, size = Path(out), QUICK if quick else FULL
    data = load_data(seed).first(size)
    run = _claim(folder, data, seed, size)
    batches = Batches(*data.train)
    if any(run.iterdir()):
        say(f"Going on from {run}.")
    with ExitStack() as stack:
        stack.enter_context(_one_thread())
        second = None if quick else stack.enter_context(_second_process(run, seed))
        say(f"1/5  Train a residual network on {size.train} noisy digits, 0 to 7.")
        net, _ = _trained(run, batches, size.epochs, seed, member=0)
        fits = len(size.lrs) * len(size.alphas)
        say(f"2/5  Convert it to an ABNN of {MEMBERS} modes and fit them; settings to try: {fits}.")
        bnn, candidates, fit = _best_fit(run, net, batches, data.validation, seed, size)
        say(f"3/5  Train {MEMBERS - 1} more networks, for an ensemble to compare with.")
        if second is not None:  # it began with the first line
            second.wait()
        others = [_trained(run, batches, size.epochs, seed, k) for k in range(1, MEMBERS)]
        say("4/5  Evaluate on test digits, corrupted ones, unseen digits and photographs.")
        started = time.perf_counter()
        scaled = TemperatureScaling(net).fit([data.validation])
        scaling = time.perf_counter() - started
        methods: dict[str, tuple[Method, float]] = {
            "single": (Single(net), 0.0),
            "temperature": (scaled, scaling),
            "ABNN": (bnn, sum(candidate.seconds for candidate in candidates)),
            "ensemble": (
                DeepEnsemble(
                    [net, *(other for other, _ in others)],
                    fit_seconds=sum(seconds for _, seconds in others),
                ),
                sum(seconds for _, seconds in others),
            ),
        }
        bnn.save(folder / "abnn")
        write(folder / "abnn" / LOSSES, (fit / LOSSES).read_bytes())
        rows = _evaluated(methods, data, folder / "abnn" / "evaluation")
        seen = abnn.Recorded(folder / "abnn/evaluation/ABNN")
        seen.add(bnn.samples_curve([data.validation], max_samples=16, progress=False))
        seen.add(abnn.trajectory(bnn, fit, data.validation, progress=False))
        say("5/5  Write the report.")
        write_report(folder / "abnn", folder / "report.html", title="Handwritten digits")
        parameters = sum(parameter.numel() for parameter in net.parameters())
        temperature = scaled.temperature.item()
        parts = (
            *(["A quick run: the numbers mean little."] if quick else []),
            demo_text.table(rows, data),
            demo_text.pictures(Single(net), bnn, data),
            demo_text.findings(rows, candidates, parameters, temperature),
            demo_text.whereabouts(folder, seed),
        )
    demo = Demo(rows, candidates, "\n\n".join(parts))
    write(folder / "network.safetensors", safetensors.torch.save(net.state_dict()))
    write(folder / "results.json", _json(demo, seed, quick).encode())
    write(folder / "table.txt", f"{demo.text}\n".encode())
    return demo


def load_data(seed: int = 0) -> Data:
    """The digits, split by a seeded permutation, and what the network should be unsure of.

    >>> data = load_data()
    >>> [len(labels) for _, labels in (data.train, data.validation, data.test)]
    [700, 243, 500]
    >>> len(data.unseen), data.photos.shape
    (354, torch.Size([500, 1, 8, 8]))
    """
    try:
        import PIL  # noqa: F401  (what scikit-learn reads photographs with)
        from sklearn.datasets import load_digits, load_sample_images
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'The demo needs scikit-learn and pillow for its images: pip install "abnn[demo]".'
        ) from error
    rng = np.random.default_rng(seed)

    def noisy(clean: Tensor) -> Tensor:
        return (clean + NOISE * torch.from_numpy(rng.standard_normal(clean.shape))).float()

    pixels, labels = load_digits(return_X_y=True)
    x = noisy(torch.from_numpy(pixels / 16).reshape(-1, 1, 8, 8))
    y = torch.from_numpy(labels).long()
    order = torch.from_numpy(rng.permutation(np.flatnonzero(labels < 8)))
    train, validation, test = ((x[rows], y[rows]) for rows in order.split([700, 243, 500]))
    grey = np.stack([photo.mean(2) / 255 for photo in load_sample_images().images])
    patches = torch.from_numpy(grey).unfold(1, 8, 8).unfold(2, 8, 8).reshape(-1, 1, 8, 8)
    photos = noisy(patches[torch.from_numpy(rng.permutation(len(patches))[:500])])
    return Data(train, validation, test, unseen=x[y >= 8], photos=photos)


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


class Batches:
    """Batches of 50 images in random order, every image moved by up to a pixel.

    >>> batches = Batches(torch.zeros(100, 1, 8, 8), torch.zeros(100).long())
    >>> [x.shape for x, _ in batches]
    [torch.Size([50, 1, 8, 8]), torch.Size([50, 1, 8, 8])]
    """

    def __init__(self, x: Tensor, y: Tensor) -> None:
        """Take images and labels whose number is a multiple of 50."""
        self.x, self.y = x, y

    def __len__(self) -> int:
        """Number of batches."""
        return len(self.x) // 50

    def __iter__(self) -> Iterator[Labelled]:
        """Go through the images once; the order is that of torch's global generator."""
        for rows in torch.randperm(len(self.x)).split(50):
            wide = F.pad(self.x[rows], (1, 1, 1, 1))
            moved = torch.stack([wide[..., i : i + 8, j : j + 8] for i, j in MOVES], dim=1)
            yield moved[torch.arange(50), torch.randint(len(MOVES), (50,))], self.y[rows]


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


def _trained(
    run: Path, batches: Batches, epochs: int, seed: int, member: int
) -> tuple[nn.Sequential, float]:
    """A trained network and the seconds that took; from an earlier run, if it got so far."""
    file = run / f"network-{member}.safetensors"
    if file.exists():
        net = network()
        load_weights(net, file)
        with safetensors.safe_open(file, "pt") as saved:
            return net.eval(), float(saved.metadata()["seconds"])
    started = time.perf_counter()
    net = train_network(batches, epochs, MEMBERS * seed + member, f"network {member + 1}")
    seconds = time.perf_counter() - started
    write(file, safetensors.torch.save(net.state_dict(), {"seconds": str(seconds)}))
    return net, seconds


@contextmanager
def _second_process(run: Path, seed: int) -> Iterator[subprocess.Popen[bytes]]:
    """Train the networks of the ensemble meanwhile; what is not done by then is done afterwards."""
    code = "import sys; from abnn.demo import train_others; train_others(*sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(run), str(seed)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the first
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def train_others(run: str, seed: str) -> None:
    """Train the networks of the ensemble but the first, and leave them in the run directory."""
    with _one_thread():
        batches = Batches(*load_data(int(seed)).first(FULL).train)
        for member in range(1, MEMBERS):
            _trained(Path(run), batches, FULL.epochs, int(seed), member)


def _best_fit(
    run: Path, net: nn.Module, batches: Batches, validation: Labelled, seed: int, size: Size
) -> tuple[abnn.ABNN, list[Candidate], Path]:
    """Fit with every learning rate and alpha: the ABNN of least validation NLL, all fits, and
    the run directory of the best.
    """
    settings = list(product(size.lrs, size.alphas))
    fitted: list[tuple[abnn.ABNN, Path]] = []
    candidates: list[Candidate] = []
    with Progress(len(settings), "fit") as bar:
        for lr, alpha in settings:
            bnn = abnn.convert(net, modes=MEMBERS, alpha=alpha)
            # The name tells the network apart too: a fit goes on with its own one only.
            folder = run / f"fit-lr{lr:g}-alpha{alpha:g}-{digest(net.state_dict())[:8]}"
            result = abnn.fit(
                bnn,
                batches,
                validation=[validation],
                run=folder,
                snapshots=10,
                progress=False,
                checkpoint_seconds=1,
                epochs=size.fit_epochs,
                lr=lr,
                schedule="polynomial",
                batch_size=50,
                seed=seed,
            )
            assert result.whole is not None  # there was validation data
            fitted.append((bnn, folder))
            candidates.append(Candidate(lr, alpha, result.whole.nll, result.seconds))
            note = f"lr {lr:g}, alpha {alpha:g}: validation NLL {result.whole.nll:.3f}"
            bar.update(len(fitted), note)
    best = min(range(len(settings)), key=lambda index: candidates[index].nll)
    bnn, folder = fitted[best]
    return bnn, candidates, folder


def _evaluated(
    methods: dict[str, tuple[Method, float]], data: Data, folder: Path
) -> dict[str, Row]:
    """A row for every method, given with the seconds its training took; its record in a folder."""
    rows: dict[str, Row] = {}
    x, y = data.test
    test = list(zip(x.split(100), y.split(100), strict=True))
    ood = {"unseen": data.unseen.split(100), "photos": data.photos.split(100)}
    with Progress(len(methods), "evaluate") as bar:
        for name, (method, seconds) in methods.items():
            classes = [f"a {digit}" for digit in range(8)]
            record = abnn.Record(folder / name, TITLES.get(name, name), classes)
            evaluation = abnn.evaluate(method, test, ood, record=record, progress=False)
            few = {"samples": 2} if isinstance(method, abnn.ABNN) else {}  # it is many images
            corrupted = abnn.robustness(
                method, test, CORRUPTIONS, SEVERITIES, mean=MEAN, std=STD, progress=False, **few
            )
            abnn.Recorded(folder / name).add(corrupted)
            times = [_seconds(method, test) for _ in range(3)]
            milliseconds = 1000 * min(times) * 1000 / len(x)  # of a thousand images
            rows[name] = Row(evaluation, method.num_added_parameters, seconds, milliseconds)
            bar.update(len(rows), name)
    return rows


def _seconds(method: Method, batches: list[Labelled]) -> float:
    started = time.perf_counter()
    for images, _ in batches:
        method.predict(images)
    return time.perf_counter() - started


def _claim(folder: Path, data: Data, seed: int, size: Size) -> Path:
    """The directory in which this very run is kept; other data or settings have another one."""
    runs = folder / "demo-runs"
    if folder.is_dir() and any(folder.iterdir()) and not runs.is_dir():
        raise FileExistsError(f"{folder} holds other files")
    tensors = {str(i): tensor for i, tensor in enumerate((*data.train, *data.validation))}
    settings = f"{abnn.__version__} {size} {digest(tensors)}"
    run = runs / f"seed-{seed}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"
    run.mkdir(parents=True, exist_ok=True)
    return run


def _json(demo: Demo, seed: int, quick: bool) -> str:
    methods = {
        name: json.loads(row.evaluation.to_json())
        | {
            "added_parameters": row.parameters,
            "training_seconds": row.seconds,
            "milliseconds_per_1000_predictions": row.milliseconds,
        }
        for name, row in demo.rows.items()
    }
    settings = {"abnn": abnn.__version__, "seed": seed, "quick": quick}
    fits = [candidate._asdict() for candidate in demo.candidates]
    return json.dumps(settings | {"fits": fits, "methods": methods}, indent=2) + "\n"


@contextmanager
def _one_thread() -> Iterator[None]:
    """A network this small gains nothing from threads, and loses much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
