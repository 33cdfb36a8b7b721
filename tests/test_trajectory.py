"""The way of the modes through a fit: known cases, invariants, and what is refused."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.decomposition import PCA
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import abnn
from abnn.artifact import fingerprint
from abnn.metrics.diversity import disagreement
from abnn.snapshots import write_snapshot
from abnn.trajectory import Trajectory, principal_components, trajectory
from fitting import banks, data, equal
from nets import cnn, mlp

X = torch.cat([x for x, _ in data()])


def fitted(run: Path, modes: int = 3, **arguments: Any) -> abnn.ABNN:
    bnn = abnn.convert(mlp(), modes=modes)
    abnn.fit(bnn, data(), run=run, **{"epochs": 2, "lr": 0.1, "snapshots": 4} | arguments)
    return bnn


def write(run: Path, bnn: abnn.ABNN, step: int = 0) -> None:
    """A snapshot of an ABNN as it is."""
    network = fingerprint(bnn)["values"]
    write_snapshot(run / "snapshots", bnn, range(bnn.modes), step, network)


# What the figures are


def test_two_modes_whose_logits_are_known(tmp_path: Path) -> None:
    """The logits of mode 0 are the inputs, those of mode 1 have 0.15 more for class 0."""
    bnn = abnn.convert(nn.Sequential(nn.BatchNorm1d(2, eps=0)).eval(), modes=2)
    beta = bnn.bayes_layers["0"].bank.beta
    assert beta is not None
    write(tmp_path, bnn)
    beta.data[1, 0] = 0.15
    write(tmp_path, bnn, step=7)
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.1], [0.0, 0.2]])
    way = trajectory(bnn, tmp_path, x)

    def first(gap: float) -> float:
        """The probability of class 0."""
        return 1 / (1 + math.exp(-gap))

    gaps = (1.0, -1.0, -0.1, -0.2)
    apart = [abs(first(gap + 0.15) - first(gap)) for gap in gaps]
    assert (way.steps, way.modes) == ([0, 7], 2)
    assert way.distance == pytest.approx([0, sum(apart) / 4])
    assert way.disagreement == [0, 1 / 4]  # on the third input
    assert way.from_start == [0, 1 / 8]  # mode 1 differs there, mode 0 nowhere
    for step, expected in ((0, 0.0), (1, math.sqrt(4 * 0.15**2))):
        assert math.dist(*way.pca[step]) == pytest.approx(expected, abs=1e-6)


def test_at_the_start_all_modes_are_the_original_network(tmp_path: Path) -> None:
    fitted(tmp_path)
    way = trajectory(abnn.convert(mlp(), modes=3, alpha=0.5), tmp_path, X)
    assert way.distance[0] == way.disagreement[0] == way.from_start[0] == 0
    assert way.pca[0] == [pytest.approx(way.pca[0][0])] * 3
    assert all(later > 0 for later in way.distance[1:])
    assert torch.tensor(way.points).shape == (5, 3, 2)
    assert torch.tensor(way.points).isfinite().all()


def test_at_the_end_the_modes_are_the_fitted_ones(tmp_path: Path) -> None:
    bnn = fitted(tmp_path)
    way = trajectory(bnn, tmp_path, X)
    still = abnn.convert(mlp(), modes=3, alpha=0)
    still.load_state_dict(bnn.state_dict())
    logits = still.logits(X, [abnn.Draw(0, mode, 0) for mode in range(3)])
    assert way.disagreement[-1] == pytest.approx(disagreement(logits).mean().item())
    changed = (logits.argmax(2) != mlp()(X).argmax(1)).float().mean().item()
    assert way.from_start[-1] == pytest.approx(changed)


@pytest.mark.parametrize("noise", ["channel", "example", "element"])
def test_noise_has_no_part_in_it(tmp_path: Path, noise: Any) -> None:
    fitted(tmp_path)
    loud, quiet = (abnn.convert(mlp(), modes=3, alpha=a, noise=noise) for a in (0.9, 0.0))
    assert trajectory(loud, tmp_path, X) == trajectory(quiet, tmp_path, X)


def test_principal_components_are_those_of_scikit_learn_up_to_sign() -> None:
    rows = torch.randn(12, 40) * torch.linspace(1, 5, 40)
    ours, theirs = principal_components(rows, 5), PCA(5, svd_solver="full").fit_transform(rows)
    torch.testing.assert_close(ours.abs(), torch.from_numpy(theirs).double().abs())
    assert (ours.amax(0) == ours.abs().amax(0)).all()  # the row farthest out is positive


def test_principal_components_keep_distances() -> None:
    rows = torch.randn(6, 30, dtype=torch.float64)
    kept = principal_components(rows, 20)
    assert kept.shape == (6, 6)
    torch.testing.assert_close(torch.pdist(kept), torch.pdist(rows))


def test_one_mode_has_nobody_to_differ_from(tmp_path: Path) -> None:
    way = trajectory(fitted(tmp_path, modes=1, lr=1.0), tmp_path, X)
    assert way.distance == way.disagreement == [0] * 5
    assert way.from_start[-1] > 0


def test_a_single_snapshot_is_a_single_point(tmp_path: Path) -> None:
    bnn = abnn.convert(mlp(), modes=2)
    write(tmp_path, bnn)
    way = trajectory(bnn, tmp_path, X)
    assert way.points == way.pca == [[[0.0, 0.0]] * 2]


@pytest.mark.parametrize("modes", [1, 2])
def test_few_points_that_are_alike_but_for_one_do_not_break_it(tmp_path: Path, modes: int) -> None:
    bnn = abnn.convert(mlp(), modes=modes)
    write(tmp_path, bnn)
    bnn.bayes_layers["1"].bank.gamma.data[0] += 1
    write(tmp_path, bnn, step=1)
    way = trajectory(bnn, tmp_path, X)
    assert torch.tensor(way.points).isfinite().all()
    assert math.dist(way.pca[0][0], way.pca[1][0]) > 0.1


def test_the_same_seed_gives_the_same_points(tmp_path: Path) -> None:
    bnn = fitted(tmp_path)
    states = torch.get_rng_state()
    ways = [trajectory(bnn, tmp_path, X, seed=-3) for _ in range(2)]
    assert ways[0] == ways[1]
    assert torch.equal(torch.get_rng_state(), states)


def test_inputs_come_as_a_batch_or_from_a_loader(tmp_path: Path) -> None:
    bnn, y = fitted(tmp_path), torch.zeros(len(X), dtype=torch.long)
    whole = trajectory(bnn, tmp_path, X)
    for same in ((X, y), {"input": X, "labels": y}, [X], [(X, y)]):
        assert trajectory(bnn, tmp_path, same) == whole
    for parts in (X.split(7), DataLoader(TensorDataset(X, y), 7)):
        way = trajectory(bnn, tmp_path, list(parts))
        assert way.distance == pytest.approx(whole.distance, abs=1e-6)
        assert way.disagreement == whole.disagreement


def test_a_loader_that_shuffles_is_asked_once(tmp_path: Path) -> None:
    bnn = fitted(tmp_path)
    loader = DataLoader(TensorDataset(X, torch.zeros(len(X))), 7, shuffle=True)
    assert trajectory(bnn, tmp_path, loader).from_start[0] == 0


def test_pixels_count_as_inputs_of_their_own(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1)).eval()
    bnn = abnn.convert(net, modes=2)
    abnn.fit(
        bnn, [(torch.randn(4, 2, 5, 5), torch.randint(3, (4, 5, 5)))], steps=4, lr=0.5,
        run=tmp_path, snapshots=2,
    )  # fmt: skip
    images = torch.randn(3, 2, 5, 5)
    # A convolution of one pixel sees none of its neighbours.
    pixels = images.movedim(1, -1).reshape(-1, 2, 1, 1)
    a, b = (trajectory(bnn, tmp_path, x) for x in (images, pixels))
    assert a.distance == pytest.approx(b.distance, abs=1e-6)
    assert a.disagreement == b.disagreement
    sizes = trajectory(bnn, tmp_path, [images, images[:, :, :2, :3]])
    assert sizes.distance[0] == 0


def test_a_network_that_writes_to_its_input_is_given_a_fresh_one(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Hardtanh(inplace=True), *mlp())
    bnn = abnn.convert(net, modes=2)
    abnn.fit(bnn, data(), epochs=1, lr=0.1, run=tmp_path, snapshots=2)
    before = X.clone()
    way = trajectory(bnn, tmp_path, X)
    assert way.from_start[0] == 0
    assert torch.equal(X, before)


# What it leaves alone


class Breaks(nn.Module):
    """A network that fails on some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 7:
            raise MemoryError("out of memory")
        y: Tensor = self.net(x)
        return y


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("inputs", [X, X * torch.nan, X[:7]])
def test_the_abnn_is_as_it_was_bit_for_bit_also_after_errors(
    tmp_path: Path, training: bool, inputs: Tensor
) -> None:
    bnn = abnn.convert(Breaks(), modes=2)
    abnn.fit(bnn, data(), epochs=1, lr=0.1, run=tmp_path, snapshots=2)
    bnn.train(training)
    state = {name: tensor.clone() for name, tensor in bnn.state_dict().items()}
    places = [tensor.data_ptr() for tensor in bnn.state_dict().values()]
    before = bnn.predict(X).probs
    try:
        trajectory(bnn, tmp_path, inputs)
    except (ValueError, MemoryError):
        assert inputs is not X
    assert equal(dict(bnn.state_dict()), state)
    assert [tensor.data_ptr() for tensor in bnn.state_dict().values()] == places
    assert (bnn.training, bnn.alpha, bnn.noise) == (training, 0.01, "channel")
    assert all(parameter.requires_grad for parameter in bnn.trainable_parameters())
    assert torch.equal(bnn.predict(X).probs, before)


def test_it_needs_no_fitted_abnn(tmp_path: Path) -> None:
    bnn = fitted(tmp_path)
    fresh = abnn.convert(mlp(), modes=3)
    start = banks(fresh)
    assert trajectory(fresh, tmp_path, X) == trajectory(bnn, tmp_path, X)
    assert equal(banks(fresh), start)


# What is refused


def heavier() -> nn.Module:
    net = mlp()
    dict(net.named_parameters())["0.weight"].data[0] += 1
    return net


@pytest.mark.parametrize(
    ("bnn", "inputs", "error", "message"),
    [
        (mlp(), X, TypeError, "takes an ABNN, not a Sequential"),
        (abnn.convert(mlp(), modes=2), X, ValueError, "of another ABNN: see '1.batches'.*modes"),
        (abnn.convert(mlp(), modes=3, stats="frozen"), X, ValueError, "see '1.batches'.*stats="),
        (abnn.convert(cnn(), modes=3), X, ValueError, "of another ABNN: see '4.batches'"),
        (abnn.convert(heavier(), modes=3), X, ValueError, "other weights; load the checkpoint"),
        (abnn.convert(mlp(), modes=3), [], ValueError, "no inputs; give at least one batch"),
        (abnn.convert(mlp(), modes=3), X[:0], ValueError, "no example in it"),
        (abnn.convert(mlp(), modes=3), X * torch.inf, ValueError, "step 0 are not finite"),
    ],
)  # fmt: skip
def test_mistakes_are_explained(
    tmp_path: Path, bnn: Any, inputs: Any, error: type[Exception], message: str
) -> None:
    fitted(tmp_path)
    with pytest.raises(error, match=message):
        trajectory(bnn, tmp_path, inputs)


def test_without_scikit_learn_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    with pytest.raises(ImportError, match=r"abnn\[demo\]"):
        trajectory(abnn.convert(mlp()), "nowhere", X)


# The result

STILL = [[[0.0, 0.0], [1.0, 0.5]], [[1.0, 0.25], [0.0, 3.0]]]
WAY = Trajectory([0, 5], 2, STILL, STILL, [0.0, 0.5], [0.0, 0.25], [0.0, 0.1])


def test_json_round_trip(tmp_path: Path) -> None:
    assert Trajectory.from_json(WAY.to_json()) == WAY
    way = trajectory(fitted(tmp_path), tmp_path, X)
    assert Trajectory.from_json(way.to_json()) == way


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": [5, 0]},
        {"steps": [0, 1.5]},
        {"steps": [], "points": [], "pca": [], "distance": []},
        {"steps": 3},
        {"modes": 3},
        {"modes": 2.0},
        {"points": STILL[:1]},
        {"pca": [[[0.0, 0.0]], [[1.0, 0.25], [0.0, 3.0]]]},
        {"distance": [0.0, math.nan]},
        {"disagreement": ["0", "1"]},
        {"from_start": [False, True]},
        {"more": 1},
    ],
)
def test_what_is_no_trajectory_is_not_read_as_one(changes: dict[str, Any]) -> None:
    text = json.dumps(json.loads(WAY.to_json()) | changes)
    for wrong in (text, "[1, 2]", "{}", "nonsense"):
        with pytest.raises(ValueError, match="not a Trajectory in JSON; give what"):
            Trajectory.from_json(wrong)


def test_it_is_drawn_to_a_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    WAY.plot(tmp_path / "way.png")
    assert (tmp_path / "way.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"abnn\[plot\]"):
        WAY.plot("way.png")
