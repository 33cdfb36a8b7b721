"""Where the modes go during a fit: their answers to some inputs, snapshot by snapshot.

The paper's picture of diversity is a t-SNE of the logits of all modes over the epochs. A t-SNE
keeps neighbours together and nothing else, so figures that mean something stand beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor

from abnn.artifact import bank_tensors, fingerprint, load_banks
from abnn.batches import device_of
from abnn.draws import Draw, whole_number
from abnn.folding import clone
from abnn.metrics.diversity import disagreement
from abnn.model import ABNN
from abnn.outputs import Inputs, call, logits_of
from abnn.prefetch import batches
from abnn.progress import Progress
from abnn.snapshots import Snapshot, snapshots_of

# What t-SNE gets to see, as is usual: the rest is mostly noise, and costs time.
_COMPONENTS = 20


@dataclass(frozen=True)
class Trajectory:
    """The way of every mode through a fit, T snapshots of M modes, without noise.

    Args:
        steps: how many steps were done at each snapshot.
        modes: number of modes, M.
        points: t-SNE coordinates of the logits, `[T][M][2]`. They show which answers are alike;
            distances between groups, their sizes and the axes mean nothing.
        pca: the first two principal components of the logits, `[T][M][2]`. Distances here are
            those of the logits, as far as two dimensions go.
        distance: mean total variation distance between the probabilities of two modes: over all
            pairs of modes and all inputs, from 0 to 1, at each snapshot.
        disagreement: share of the inputs that two modes label differently, over all pairs.
        from_start: share of the inputs that a mode labels differently than the original network,
            over all modes.

    >>> still = [[[0.0, 0.0]], [[1.0, 0.0]]]
    >>> one = Trajectory([0, 9], 1, still, still, [0.0, 0.0], [0.0, 0.0], [0.0, 0.25])
    >>> print(one)
    steps done  distance  disagree %  from start %
             0    0.0000        0.00          0.00
             9    0.0000        0.00         25.00
    >>> Trajectory.from_json(one.to_json()) == one
    True
    """

    steps: list[int]
    modes: int
    points: list[list[list[float]]]
    pca: list[list[list[float]]]
    distance: list[float]
    disagreement: list[float]
    from_start: list[float]

    def to_json(self) -> str:
        """The trajectory as a JSON object."""
        return json.dumps(asdict(self), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Trajectory:
        """Read what `to_json` wrote."""
        try:
            result = cls(**json.loads(text))
            result._check()
        except (ValueError, TypeError) as error:
            raise ValueError(
                "The text is not a Trajectory in JSON; give what Trajectory.to_json wrote."
            ) from error
        return result

    def _check(self) -> None:
        T, M = len(self.steps), self.modes
        whole = [whole_number("steps", step, least=0) for step in self.steps]
        whole_number("modes", M, least=1)
        if T == 0 or whole != sorted(set(whole)):
            raise ValueError("steps are numbers that grow")
        figures: tuple[int, ...] = (T,)
        shapes = dict.fromkeys(("distance", "disagreement", "from_start"), figures)
        shapes |= {"points": (T, M, 2), "pca": (T, M, 2)}
        for name, shape in shapes.items():
            array = np.asarray(getattr(self, name))
            if array.shape != shape or array.dtype.kind not in "if" or not np.isfinite(array).all():
                raise ValueError(f"{name} are finite numbers of shape {shape}")

    def __str__(self) -> str:
        """One row for each snapshot."""
        rows = zip(self.steps, self.distance, self.disagreement, self.from_start, strict=True)
        return "\n".join(
            ["steps done  distance  disagree %  from start %"]
            + [f"{s:10}  {d:8.4f}  {100 * a:10.2f}  {100 * f:12.2f}" for s, d, a, f in rows]
        )

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the ways and the figures to a file, as "trajectory.png"; needs matplotlib."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("Plots need matplotlib: pip install 'abnn[plot]'.") from error
        picture = Figure(figsize=(11, 3.6), layout="constrained")
        panels = picture.subplots(1, 3)
        ways = {"t-SNE of the logits": self.points, "principal components": self.pca}
        for panel, (title, way) in zip(panels, ways.items(), strict=False):
            places = np.asarray(way)
            for mode in range(self.modes):
                x, y = places[:, mode].T
                (line,) = panel.plot(x, y, linewidth=0.8, alpha=0.5)
                sizes = np.linspace(8, 40, len(self.steps))  # later is larger
                panel.scatter(x, y, sizes, color=line.get_color(), label=f"mode {mode}")
            start = places[0].mean(0)
            panel.plot(*start, marker="x", color="black", linestyle="none", label="start")
            panel.set_title(title)
        panels[0].set_xticks([])  # the axes of a t-SNE mean nothing
        panels[0].set_yticks([])
        if self.modes <= 10:
            panels[0].legend(fontsize="small")
        for name in ("distance", "disagreement", "from_start"):
            panels[2].plot(
                self.steps, getattr(self, name), marker="o", label=name.replace("_", " ")
            )
        panels[2].set_xlabel("steps")
        panels[2].set_title("between modes, and from the start")
        panels[2].legend(fontsize="small")
        picture.savefig(path)


def trajectory(
    bnn: ABNN,
    run: str | PathLike[str],
    inputs: Inputs | Iterable[Any],
    *,
    seed: int = 0,
    progress: bool | None = None,
) -> Trajectory:
    """Follow the modes through the snapshots of a fit, by their answers to some inputs.

    The answers are logits without noise, in eval mode; the ABNN itself is not touched. A few
    hundred inputs are enough (the paper: 384): the logits of all snapshots and modes are held in
    memory, and t-SNE takes time with the square of their number. Needs scikit-learn.

    Args:
        bnn: an ABNN of the fit's network and number of modes, fitted or not.
        run: the directory of `abnn.fit(..., run=run, snapshots=10)`.
        inputs: a loader, or one batch: a tensor, a tuple `(x, y)` or `(x1, x2, ..., y)`, or a
            mapping. Labels do not matter.
        seed: of t-SNE.
        progress: show a line of progress; default: on a terminal.

    >>> import tempfile
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    >>> loader = [(torch.randn(16, 4), torch.randint(3, (16,))) for _ in range(5)]
    >>> bnn = abnn.convert(net, modes=2)
    >>> with tempfile.TemporaryDirectory() as run:
    ...     result = abnn.fit(bnn, loader, epochs=2, lr=0.1, run=run, snapshots=5)
    ...     way = trajectory(bnn, run, torch.randn(20, 4))
    >>> way.steps, way.modes, way.distance[0], way.distance[-1] > 0
    ([0, 2, 4, 6, 8, 10], 2, 0.0, True)
    """
    seed, tsne = whole_number("seed", seed), _tsne()
    snapshots = snapshots_of(run)
    _check(bnn, snapshots, run)
    net = _apart(bnn)
    one = isinstance(inputs, Tensor | Mapping | tuple)
    with closing(batches([inputs] if one else inputs, device_of(bnn))) as feed:
        given = [batch.inputs for batch in feed]
    if not given:
        raise ValueError("There are no inputs; give at least one batch.")
    rows: list[Tensor] = []
    figures: dict[str, list[float]] = {"distance": [], "disagreement": [], "from_start": []}
    with torch.no_grad(), Progress(len(snapshots), "trajectory", progress) as bar:
        original = torch.cat([_flat(_original(net, x)[None]) for x in given], 1)[0].argmax(1)
        for done, snapshot in enumerate(snapshots, start=1):
            load_banks(net, snapshot.tensors)
            logits = torch.cat([_flat(_logits(net, x)) for x in given], 1)  # [M, N, K]
            if not logits.isfinite().all():
                raise ValueError(
                    f"The logits at step {snapshot.step} are not finite; check the inputs."
                )
            rows.append(logits.flatten(1))
            figures["distance"].append(_distance(logits.double().softmax(2)))
            figures["disagreement"].append(disagreement(logits).double().mean().item())
            changed = (logits.argmax(2) != original).double()
            figures["from_start"].append(changed.mean().item())
            bar.update(done)
    T, M = len(snapshots), bnn.modes
    components = principal_components(torch.cat(rows), _COMPONENTS)
    points = _embedded(tsne, components, seed)
    return Trajectory(
        steps=[snapshot.step for snapshot in snapshots],
        modes=M,
        points=points.view(T, M, 2).tolist(),
        pca=components[:, :2].view(T, M, 2).tolist(),
        **figures,
    )


def principal_components(rows: Tensor, most: int) -> Tensor:
    """Coordinates of the rows along their principal components, the largest variance first.

    A component has no sign of its own: it gets the one by which the row farthest out is positive.

    >>> rows = torch.tensor([[0.0, 0.0], [9.0, 12.0], [0.0, 0.0]])
    >>> principal_components(rows, 1).flatten().round(decimals=6).tolist()
    [-5.0, 10.0, -5.0]
    """
    if (rows == rows[0]).all():  # else rounding would be told apart
        return torch.zeros(len(rows), 2, dtype=torch.float64)
    centred = rows.double() - rows.double().mean(0)
    u, s, _ = torch.linalg.svd(centred, full_matrices=False)
    scores = (u * s)[:, :most]
    farthest = scores.abs().argmax(0, keepdim=True)
    result: Tensor = scores * scores.gather(0, farthest).sign()
    return result


def _embedded(tsne: Any, components: Tensor, seed: int) -> Tensor:
    """t-SNE coordinates, `[n, 2]`."""
    n = len(components)
    if not components.any():  # all at one place: there is nothing to tell apart
        return torch.zeros(n, 2)
    # A few hundred points need no approximation.
    perplexity = min(30.0, (n - 1) / 3)
    method = tsne(perplexity=perplexity, init="pca", method="exact", random_state=seed % 2**32)
    return torch.from_numpy(method.fit_transform(components.numpy()))


def _tsne() -> Any:
    try:
        from sklearn.manifold import TSNE
    except ImportError as error:
        raise ImportError("A trajectory needs scikit-learn: pip install 'abnn[demo]'.") from error
    return TSNE


def _check(bnn: ABNN, snapshots: list[Snapshot], run: str | PathLike[str]) -> None:
    """Refuse snapshots of another network."""
    if not isinstance(bnn, ABNN):
        raise TypeError(f"trajectory takes an ABNN, not a {type(bnn).__name__}.")
    here, there = (
        {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
        for tensors in (bank_tensors(bnn), snapshots[0].tensors)
    )
    if here != there:
        odd = sorted(name for name in here | there if here.get(name) != there.get(name))[0]
        raise ValueError(
            f"The snapshots in {run} are of another ABNN: see {odd!r}; convert the network as for "
            "that fit, with as many modes and the same stats=."
        )
    if snapshots[0].network != fingerprint(bnn)["values"]:
        raise ValueError(
            f"The snapshots in {run} are of a network with other weights; load the checkpoint "
            "that it was converted from first."
        )


def _apart(bnn: ABNN) -> ABNN:
    """A twin without noise whose modes have memory of their own, so that `bnn` stays as it is."""
    net = bnn._twin().eval()
    net.alpha, net.noise = 0.0, "channel"  # no number is drawn for noise per example
    for layer in net.bayes_layers.values():
        own = {name: tensor.clone() for name, tensor in layer.bank.state_dict().items()}
        layer.bank.load_state_dict(own, assign=True)
    return net


def _logits(net: ABNN, inputs: Inputs) -> Tensor:
    """Logits of all modes, `[M, B, K, ...]`; one by one, so that equal modes have equal bits."""
    return torch.cat([net.logits(inputs, [Draw(0, mode, 0)]) for mode in range(net.modes)])


def _original(net: ABNN, inputs: Inputs) -> Tensor:
    """Logits of the original network, `[B, K, ...]`."""
    # A network that writes to its inputs would change what the next one sees.
    return logits_of(call(net.backbone, clone(inputs)), net.output, net.class_dim)


def _flat(logits: Tensor) -> Tensor:
    """`[S, B, K, ...]` to `[S, N, K]`: pixels count as examples of their own."""
    return logits.movedim(2, -1).flatten(1, -2).float().cpu()


def _distance(probs: Tensor) -> float:
    """Mean total variation distance of two modes, of probabilities `[M, N, K]`."""
    M, N, _ = probs.shape
    if M == 1:
        return 0.0
    # Half of the sum of the absolute differences.
    return torch.pdist(probs.flatten(1), p=1).mean().item() / (2 * N)
