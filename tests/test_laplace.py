"""The Laplace approximation: its Gaussian, its predictions, and what it leaves alone."""

from __future__ import annotations

import copy
import importlib
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from abnn.baselines import METHODS, Single, load
from abnn.baselines.curvature import powered
from abnn.baselines.laplace import Laplace
from fitting import data
from nets import Answers, cnn, mlp

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    reference: Any = importlib.import_module("laplace")

STRUCTURES: tuple[Any, ...] = ("kron", "diag", "full")
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3))


def precision(method: Laplace) -> Tensor:
    return powered(torch.eye(method._size), method._blocks(), method.prior, 1.0)


def jacobian(net: nn.Module, names: list[str], x: Tensor) -> Tensor:
    """The derivatives of all logits with respect to the named parameters, `[B, K, P]`."""
    named = dict(net.eval().named_parameters())

    def logits(*tensors: Tensor) -> Any:
        return functional_call(net, dict(zip(names, tensors, strict=True)), x)

    parts: Any = torch.autograd.functional.jacobian(logits, tuple(named[name] for name in names))
    return torch.cat([part.flatten(2) for part in parts], 2)


@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_the_full_precision_of_a_linear_model_is_its_hessian(subset: Any) -> None:
    net, loader = nn.Sequential(nn.Linear(4, 3)), data()
    x, y = (torch.cat(parts) for parts in zip(*loader, strict=True))
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])

    def energy(w: Tensor) -> Tensor:
        logits = x @ w[:12].view(3, 4).T + w[12:]
        loss = nn.functional.cross_entropy(logits, y, reduction="sum")
        return loss + 0.7 * w.square().sum() / 2

    hessian: Any = torch.autograd.functional.hessian(energy, weights)
    fitted = Laplace(net, subset, "full", prior_precision=0.7).fit(loader)
    assert torch.allclose(precision(fitted), hessian, rtol=1e-4, atol=1e-3)


def test_the_prior_precision_is_the_most_likely_one() -> None:
    net, loader = nn.Sequential(nn.Linear(4, 3)), data()
    H = precision(Laplace(net, structure="full", prior_precision=1.0).fit(loader)) - torch.eye(15)
    deltas = torch.logspace(-2, 3, 2000)
    scatter = sum(p.detach().square().sum() for p in net.parameters())
    determinants = (torch.linalg.eigvalsh(H) + deltas.unsqueeze(1)).log().sum(1)
    evidence = 15 * deltas.log() - determinants - deltas * scatter  # twice, and a constant
    tuned = Laplace(net, structure="full").fit(loader)
    assert tuned.prior.item() == pytest.approx(deltas[evidence.argmax()].item(), rel=0.02)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("prior_precision", [None, 3.0])
def test_it_predicts_what_laplace_torch_predicts(
    subset: Any, structure: Any, prior_precision: float | None
) -> None:
    net = mlp() if subset == "last_layer" else plain()
    x, y = (torch.cat(parts) for parts in zip(*data(), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = reference.Laplace(copy.deepcopy(net), "classification", subset, structure)
        theirs.fit(DataLoader(TensorDataset(x, y), batch_size=16))
        if prior_precision is None:
            theirs.optimize_prior_precision(method="marglik")
        else:
            theirs.prior_precision = prior_precision
        expected = theirs(X, link_approx="probit")
    ours = Laplace(net, subset, structure, prior_precision=prior_precision).fit(data())
    assert torch.allclose(ours.prior, theirs.prior_precision, rtol=1e-3)
    assert torch.allclose(ours.predict(X).probs, expected, atol=1e-4)


def test_convolutions_too_are_those_of_laplace_torch() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3))
    x, y = torch.randn(12, 1, 3, 3), torch.randint(3, (12,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = reference.Laplace(copy.deepcopy(net), "classification", "all", "kron")
        theirs.fit(DataLoader(TensorDataset(x, y), batch_size=12))
        expected = theirs(x, link_approx="probit")
    ours = Laplace(net, "all", prior_precision=1.0).fit([(x[:7], y[:7]), (x[7:], y[7:])])
    assert torch.allclose(ours.predict(x).probs, expected, atol=1e-4)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_probit_divides_by_the_spread_of_the_logits(subset: Any, structure: Any) -> None:
    net = normed()
    fitted = Laplace(net, subset, structure, prior_precision=2.0).fit(data())
    layers = ("3",) if subset == "last_layer" else ("0", "3")
    J = jacobian(net, [f"{layer}.{name}" for layer in layers for name in ("weight", "bias")], X)
    variance = (J @ precision(fitted).inverse() @ J.mT).diagonal(dim1=1, dim2=2)
    assert variance.min() > 0.05
    expected = (net(X) / (1 + math.pi / 8 * variance).sqrt()).softmax(1)
    prediction = fitted.predict(X)
    assert torch.allclose(prediction.probs, expected, atol=1e-4)
    assert prediction.samples_used == 1
    assert prediction.epistemic.max() < 1e-6


@pytest.mark.parametrize("structure", STRUCTURES)
def test_draws_have_the_covariance_of_the_gaussian(structure: Any) -> None:
    fitted = Laplace(plain(), "all", structure, prior_precision=2.0).fit(data())
    root = powered(torch.eye(fitted._size), fitted._blocks(), fitted.prior, -0.5)
    identity = root @ root.T @ precision(fitted)
    assert torch.allclose(identity, torch.eye(fitted._size), atol=1e-4)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_sampling_is_linear_in_the_draw_and_nn_is_not(structure: Any) -> None:
    net = normed()
    linear = Laplace(net, "all", structure, "sampling", prior_precision=2.0).fit(data())
    net_draws = Laplace(net, "all", structure, "nn", prior_precision=2.0).fit(data())
    change = linear._change(seed=3, index=1)
    J = jacobian(net, list(change), X)
    expected = net(X) + J @ torch.cat([part.flatten() for part in change.values()])
    assert torch.allclose(draws(linear, 3)[1], expected, atol=1e-4)
    moved = {name: dict(net.named_parameters())[name] + part for name, part in change.items()}
    assert torch.allclose(draws(net_draws, 3)[1], functional_call(net, moved, X), atol=1e-4)
    assert not torch.allclose(draws(net_draws, 3)[1], expected, atol=1e-2)


def draws(method: Laplace, seed: int, samples: int = 2) -> Tensor:
    with torch.no_grad():
        return torch.cat(list(method.eval().member_logits(X, samples, seed)))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_of_the_last_layer_all_ways_to_draw_agree(structure: Any) -> None:
    net = nn.Sequential(nn.Linear(4, 3))  # whose last layer is all layers
    ways: list[Any] = [("last_layer", "sampling"), ("last_layer", "nn"), ("all", "nn")]
    drawn = [
        draws(Laplace(net, subset, structure, predictive, 1.0).fit(data()), seed=0)
        for subset, predictive in ways
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert torch.allclose(drawn[0], drawn[2], atol=1e-3)


def test_one_example_has_a_curvature_that_is_a_kronecker_product() -> None:
    net, loader = nn.Sequential(nn.Linear(4, 3, bias=False)), [(X[:1], torch.tensor([1]))]
    found = {
        s: precision(Laplace(net, structure=s, prior_precision=1.0).fit(loader)) for s in STRUCTURES
    }
    assert torch.allclose(found["kron"], found["full"], atol=1e-5)
    assert torch.allclose(found["diag"], found["full"].diag().diag(), atol=1e-5)


@pytest.mark.parametrize("subset", ["last_layer", "all"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_how_the_data_is_cut_into_batches_does_not_matter(subset: Any, structure: Any) -> None:
    x, y = (torch.cat(parts) for parts in zip(*data(), strict=True))
    marked = torch.cat([y, torch.full((5,), 9)])
    whole = Laplace(plain(), subset, structure, prior_precision=1.0).fit([(x, y)])
    parts = zip(torch.cat([x, X]).split(7), marked.split(7), strict=True)
    cut = Laplace(plain(), subset, structure, prior_precision=1.0).fit(parts, ignore_index=9)
    assert torch.allclose(precision(whole), precision(cut), rtol=1e-4, atol=1e-4)


def test_the_users_network_and_random_state_are_left_alone() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3)).train()
    net[1].eval()
    net[0].weight.requires_grad_(False)
    net[3].weight.grad = torch.ones(3, 6)
    before, loader = copy.deepcopy(net), data()
    state = torch.random.get_rng_state()
    for subset in ("last_layer", "all"):
        for structure in STRUCTURES:
            fitted = Laplace(net, subset, structure, "sampling")
            fitted.fit(loader).predict(X, samples=2)
    assert torch.equal(torch.random.get_rng_state(), state)
    for part, old in zip(net.modules(), before.modules(), strict=True):
        assert type(part) is type(old)
        assert vars(part).keys() == vars(old).keys()
        assert part.training == old.training
        assert not part._forward_hooks
        assert not part._forward_pre_hooks
    for p, old_p in zip(net.parameters(), before.parameters(), strict=True):
        assert torch.equal(p, old_p)
        assert p.requires_grad == old_p.requires_grad
    assert [p.grad is None for p in net.parameters()] == [True, True, True, True, False, True]
    assert torch.equal(net[3].weight.grad, torch.ones(3, 6))
    assert all(torch.equal(b, c) for b, c in zip(net.buffers(), before.buffers(), strict=True))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_what_is_loaded_predicts_the_same_without_the_package(
    subset: Any, structure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "Laplace", Laplace)
    net = plain()
    fitted = Laplace(net, subset, structure, "sampling").fit(data())
    fitted.save(tmp_path)
    monkeypatch.setitem(sys.modules, "laplace", None)
    again = load(tmp_path, net)
    assert torch.equal(again.predict(X).probs, fitted.predict(X).probs)
    assert again.network_state() == fitted.network_state()
    assert again.fit_seconds == fitted.fit_seconds


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "laplace", None)
    with pytest.raises(ImportError, match=r'pip install "abnn\[laplace\]"'):
        Laplace(plain()).fit(data())


@pytest.mark.parametrize("kind", ["tensor", "tuple", "nested", "out", "logits", "model_output"])
def test_outputs_of_every_kind_are_understood(kind: str) -> None:
    fitted = Laplace(Answers(kind), prior_precision=1.0).fit(data())
    expected = Laplace(mlp(), prior_precision=1.0).fit(data())
    assert torch.allclose(fitted.predict(X).probs, expected.predict(X).probs)


def test_inputs_may_be_mappings() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = plain()

        def forward(self, a: Tensor, b: Tensor) -> Any:
            return {"scores": self.net(a + b)}

    loader = [{"a": x, "b": 0 * x, "labels": y} for x, y in data()]
    fitted = Laplace(Two(), prior_precision=1.0, output=lambda r: r["scores"]).fit(loader)
    expected = Laplace(plain(), prior_precision=1.0).fit(data())
    found = fitted.predict({"a": X, "b": 0 * X}).probs
    assert torch.allclose(found, expected.predict(X).probs)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("predictive", ["probit", "sampling"])
def test_every_token_is_an_example(structure: Any, predictive: Any) -> None:
    x, y = (torch.cat(parts) for parts in zip(*data(), strict=True))
    tokens = Laplace(plain(), "last_layer", structure, predictive, 1.0, class_dim=-1)
    tokens.fit([(x.view(-1, 8, 4), y.view(-1, 8))])
    alone = Laplace(plain(), "last_layer", structure, predictive, 1.0).fit([(x, y)])
    found = tokens.predict(X.unsqueeze(1).expand(5, 2, 4)).probs
    assert found.shape == (5, 3, 2)
    assert torch.allclose(found[:, :, 1], alone.predict(X).probs, atol=1e-5)


@pytest.mark.parametrize("predictive", ["probit", "sampling"])
def test_attention_is_linearised_too(predictive: Any) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    net = nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3)).eval()
    x = torch.randn(6, 3, 4)
    fitted = Laplace(net, "all", "kron", predictive, 1.0).fit([(x, torch.arange(6) % 3)])
    one = torch.cat([fitted.predict(x[i : i + 1], samples=2).probs for i in range(6)])
    assert torch.allclose(fitted.predict(x, samples=2).probs, one, atol=1e-5)


def test_a_shape_without_uncertainty_predicts_as_the_network() -> None:
    predictives: tuple[Any, ...] = ("probit", "sampling", "nn")
    for predictive in predictives:
        sure = Laplace(plain(), "all", "diag", predictive, 1e12).fit(data())
        assert torch.allclose(sure.predict(X).probs, Single(plain()).predict(X).probs, atol=1e-4)


def test_what_it_adds_is_what_is_kept_of_the_curvature() -> None:
    fitted = Laplace(plain(), prior_precision=1.0)
    assert fitted.num_added_parameters == 0
    assert fitted.fit_seconds is None
    fitted.fit(data())
    # The prior; eigenvalues and eigenvectors of 3 x 3 and 6 x 6 of the weight, 3 x 3 of the bias.
    assert fitted.num_added_parameters == 1 + (3 + 9) + (6 + 36) + (3 + 9)
    assert fitted.num_added_bytes == 4 * fitted.num_added_parameters


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"subset": "first"}, "subset='first' must be 'last_layer' or 'all'"),
        ({"structure": "lowrank"}, "structure='lowrank' must be 'kron', 'diag' or 'full'"),
        ({"predictive": "glm"}, "predictive='glm' must be 'probit', 'sampling' or 'nn'"),
        ({"prior_precision": 0.0}, "prior_precision=0.0 is not a number above 0"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Laplace(plain(), **arguments)


def test_networks_that_do_not_fit_are_refused() -> None:
    pixels = nn.Sequential(nn.Conv2d(3, 3, 1))
    with pytest.raises(ValueError, match="are not the output of an nn.Linear.* take subset='all'"):
        Laplace(pixels)
    scaled = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    with pytest.raises(ValueError, match="The logits of the Sequential are not the output of an"):
        Laplace(scaled).fit(data())
    hot = nn.Sequential(nn.Linear(4, 3), nn.Hardtanh(-0.1, 0.1, inplace=True))
    with pytest.raises(ValueError, match="The logits of the Sequential are not the output of an"):
        Laplace(hot).fit(data())
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    normed_weight = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)))
    for odd in (tied, normed_weight):
        with pytest.raises(ValueError, match="groups, parametrisation or shared weights, but"):
            Laplace(odd, "all")
        assert Laplace(odd, "all", "diag").fit(data()).predict(X).probs.isfinite().all()
    idle = plain()
    idle[1].unused = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="layers that run, but '1.unused.weight' does nothing"):
        Laplace(idle, "all").fit(data())
    with pytest.raises(ValueError, match="takes inputs of one tensor, each with one label"):
        Laplace(pixels, "all").fit([(torch.randn(1, 3, 2, 2), torch.zeros(1, 2, 2).long())])
    with pytest.raises(ValueError, match="structure='kron' .* but '0' is Conv1d"):
        Laplace(nn.Sequential(nn.Conv1d(3, 3, 1)), "all")
    with pytest.raises(ValueError, match="structure='kron' .* but '0' is Conv2d"):
        Laplace(nn.Sequential(nn.Conv2d(4, 4, 1, groups=2)), "all")
    with pytest.raises(ValueError, match="matrix of 20202 x 20202 numbers; take 'kron' or 'diag'"):
        Laplace(nn.Linear(10_100, 2), structure="full").fit(
            [(torch.zeros(1, 10_100), X[:1, 0] > 9)]
        )


def test_data_that_does_not_fit_is_refused() -> None:
    for subset in ("last_layer", "all"):
        fresh = Laplace(plain(), subset)
        with pytest.raises(RuntimeError, match=r"not fitted yet; call fit\(loader\)"):
            fresh.predict(X)
        with pytest.raises(ValueError, match="no labelled examples"):
            fresh.fit([(X, torch.full((5,), -100))])
        with pytest.raises(
            ValueError, match="Labels go from 3 to 3, but the network has 3 classes"
        ):
            fresh.fit([(X, torch.full((5,), 3))])
        with pytest.raises(ValueError, match="contain NaN"):
            fresh.fit([(X * math.nan, torch.zeros(5).long())])
        with pytest.raises(ValueError, match="samples=0"):
            fresh.fit(data()).predict(X, samples=0)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", ["last_layer", "all"])
def test_half_precision_has_nearly_the_curvature_of_single(subset: Any, structure: Any) -> None:
    half = normed().bfloat16()
    batches = [(x.bfloat16(), y) for x, y in data()]
    found = Laplace(half, subset, structure, "sampling").fit(batches)
    wide = [(x.float(), y) for x, y in batches]
    single = Laplace(copy.deepcopy(half).float(), subset, structure, "sampling").fit(wide)
    assert found.values.dtype == torch.float32
    torch.testing.assert_close(found.values, single.values, rtol=0.1, atol=0.1)
    probit = Laplace(half, subset, structure).fit(batches)
    for method in (found, probit):
        assert method.predict(X.bfloat16(), samples=2).probs.isfinite().all()


def test_a_curvature_without_eigenvalues_does_not_end_the_program() -> None:
    loader = [(1e25 * x, y) for x, y in data()]
    net = nn.Sequential(nn.Linear(4, 3))
    nn.init.zeros_(net[0].weight)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no eigenvalues that can be computed; check"):
        Laplace(net).fit(loader)


def test_a_loader_that_runs_out_is_refused() -> None:
    class Once:
        def __init__(self) -> None:
            self.batches = iter(data())

        def __iter__(self) -> Any:
            return self.batches

    Laplace(plain(), "last_layer").fit(Once())
    with pytest.raises(ValueError, match="gave 48 labelled examples, and then 0; give one that"):
        Laplace(plain(), "all").fit(Once())


def test_batch_norms_are_fixed_while_the_curvature_is_computed() -> None:
    net = cnn()
    x, y = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 0])
    alone = Laplace(net.train(), "all", "diag", prior_precision=1.0).fit(
        [(x[i : i + 1], y[i : i + 1]) for i in range(4)]
    )
    together = Laplace(net.eval(), "all", "diag", prior_precision=1.0).fit([(x, y)])
    assert torch.allclose(alone.values, together.values, atol=1e-4)
