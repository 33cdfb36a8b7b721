"""What holds for every method, on networks of every kind."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import abnn
from abnn import Recipe
from abnn.baselines import METHODS, ArtifactError, Method, load
from methods import DRAWN, KINDS, MAKERS, Kind

RECIPE = Recipe(steps=6, lr=0.05, prior=None)
EVERY = [
    pytest.param(name, kind, id=f"{name}-{kind}")
    for name in MAKERS
    for kind in KINDS
    if name not in KINDS[kind].refused_by
]
TRAINED = [
    param for param in EVERY if MAKERS[str(param.values[0])](KINDS["mlp"].build()).shared is None
]


def state(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def ready(name: str, kind: Kind, net: nn.Module | None = None) -> Method:
    """A method that was trained or fitted for a few steps."""
    torch.manual_seed(5)
    method = MAKERS[name](kind.build() if net is None else net)
    if method.shared is None:
        abnn.train(method, kind.batches(), RECIPE)
    elif hasattr(method, "fit"):
        fit(method, kind.batches())
    return method


def fit(method: Any, batches: Any) -> None:
    method.fit(batches)


def several(name: str) -> dict[str, Any]:
    return {"samples": 5, "seed": 3} if name in DRAWN else {}


def test_every_method_is_in_the_matrix() -> None:
    companions = {"TemperatureScaling", "Conformal", "DeepEnsemble", "MultiSWAG"}
    here = {type(make(KINDS["mlp"].build())).__name__ for make in MAKERS.values()}
    assert here == METHODS.keys() - companions


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_a_method_predicts_and_leaves_the_network_alone(name: str, kind: str) -> None:
    given = KINDS[kind]
    net = given.build()
    net[0].train() if isinstance(net, nn.Sequential) else net.train()
    before, modes = state(net), [part.training for part in net.modules()]
    wanted = [p.requires_grad for p in net.parameters()]
    method = ready(name, given, net)
    x = given.inputs(7)
    prediction = method.predict(x, **several(name))
    assert prediction.probs.shape == (7, 3, *given.pixels)
    torch.testing.assert_close(prediction.probs.sum(1), torch.ones(7, *given.pixels))
    assert not prediction.log_probs.requires_grad
    assert (prediction.epistemic >= 0).all()
    assert same(state(net), before)
    assert [part.training for part in net.modules()] == modes
    assert [p.requires_grad for p in net.parameters()] == wanted
    assert all(p.grad is None for p in net.parameters())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in net.modules())


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_a_prediction_is_a_function_of_input_and_seed(name: str, kind: str) -> None:
    method, x = ready(name, KINDS[kind]), KINDS[kind].inputs(5)
    torch.manual_seed(8)
    whole = method.predict(x, **several(name)).log_probs
    after = torch.rand(1)
    torch.manual_seed(8)
    assert torch.equal(torch.rand(1), after)  # nothing was taken from the global generator
    parts = [method.predict(x[rows], **several(name)).log_probs for rows in (slice(2), slice(2, 5))]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-5, rtol=1e-4)
    if name in DRAWN:
        other = method.predict(x, samples=5, seed=4).log_probs
        assert not torch.allclose(other, whole, atol=1e-6)


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_members_are_averaged_and_counted(name: str, kind: str) -> None:
    method, x = ready(name, KINDS[kind]), KINDS[kind].inputs(3)
    prediction = method.predict(x, keep_members=True, **several(name))
    assert prediction.members is not None
    assert len(prediction.members) == prediction.samples_used
    torch.testing.assert_close(prediction.members.mean(0), prediction.probs)
    torch.testing.assert_close(method(x), method.predict(x).log_probs)


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_a_saved_method_predicts_the_same(name: str, kind: str, tmp_path: Path) -> None:
    given = KINDS[kind]
    method, x = ready(name, given), given.inputs(3)
    method.save(tmp_path)
    loaded = load(tmp_path, given.build())
    assert type(loaded) is type(method)
    assert loaded.arguments == method.arguments
    assert loaded.num_added_parameters == method.num_added_parameters
    assert torch.equal(
        loaded.predict(x, **several(name)).log_probs, method.predict(x, **several(name)).log_probs
    )


@pytest.mark.parametrize("name", MAKERS)
def test_a_method_is_not_loaded_onto_another_network(name: str, tmp_path: Path) -> None:
    mlp = KINDS["mlp"]
    method = ready(name, mlp)
    method.save(tmp_path)
    with pytest.raises(ArtifactError, match="other layers, shapes|another network"):
        load(tmp_path, KINDS["cnn"].build())
    other = mlp.build()
    nn.init.zeros_(other.get_parameter("0.bias"))
    if method.shared is not None:
        with pytest.raises(ArtifactError, match="other weights"):
            load(tmp_path, other)
    else:
        load(tmp_path, other)
    (tmp_path / "method.safetensors").write_bytes(b"x")
    with pytest.raises(ArtifactError, match="damaged"):
        load(tmp_path, mlp.build())


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_a_copy_predicts_the_same(name: str, kind: str) -> None:
    method, x = ready(name, KINDS[kind]), KINDS[kind].inputs(3)
    again = copy.deepcopy(method).predict(x, **several(name)).log_probs
    assert torch.equal(again, method.predict(x, **several(name)).log_probs)


@pytest.mark.parametrize(("name", "kind"), TRAINED)
def test_a_killed_training_resumes_bit_identical(name: str, kind: str, tmp_path: Path) -> None:
    given = KINDS[kind]
    batches = given.batches()

    class Breaking:
        def __iter__(self) -> Iterator[Any]:
            yield from batches[:4]
            raise KeyboardInterrupt

    torch.manual_seed(5)
    start = MAKERS[name](given.build())
    whole, parts = copy.deepcopy(start), copy.deepcopy(start)
    abnn.train(whole, batches, RECIPE)
    with pytest.raises(KeyboardInterrupt):
        abnn.train(parts, Breaking(), RECIPE, run=tmp_path, checkpoint_seconds=0)
    assert same(state(parts), state(start))
    abnn.train(parts, batches, RECIPE, run=tmp_path)
    assert same(state(parts), state(whole))
    loaded = load(tmp_path, given.build())
    assert same(state(loaded), state(whole))


@pytest.mark.parametrize(("name", "kind"), TRAINED)
def test_training_a_method_makes_it_better(name: str, kind: str) -> None:
    given = KINDS[kind]
    torch.manual_seed(5)
    method = MAKERS[name](given.build())
    batches = given.batches(12, 16)
    abnn.train(method, batches, Recipe(epochs=12, lr=0.1, prior=None))
    scores = abnn.evaluate(method, given.batches(4, 16), **several(name))
    assert scores.accuracy > 60  # a third is chance


@pytest.mark.parametrize("name", MAKERS)
def test_a_method_takes_dictionaries_and_other_outputs(name: str) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = KINDS["mlp"].build()

        def forward(self, features: Tensor) -> dict[str, Tensor]:
            return {"logits": self.inner(features)}

    method, x = MAKERS[name](Odd()), KINDS["mlp"].inputs(4)
    batches = [{"features": x, "labels": y} for x, y in KINDS["mlp"].batches()]
    if method.shared is None:
        abnn.train(method, batches, RECIPE)
    elif hasattr(method, "fit"):
        fit(method, batches)
    mapping = method.predict({"features": x}, **several(name)).log_probs
    torch.testing.assert_close(mapping, method.predict(x, **several(name)).log_probs)


@pytest.mark.parametrize("name", MAKERS)
def test_a_network_in_double_precision_stays_so(name: str) -> None:
    mlp = KINDS["mlp"]
    method = MAKERS[name](mlp.build().double())
    batches = [(x.double(), y) for x, y in mlp.batches()]
    if method.shared is None:
        abnn.train(method, batches, RECIPE)
    elif hasattr(method, "fit"):
        fit(method, batches)
    assert method.predict(mlp.inputs(2).double(), **several(name)).probs.dtype == torch.float64


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for kind, given in KINDS.items() for name in sorted(given.refused_by)],
)
def test_what_a_method_can_not_do_is_refused(name: str, kind: str) -> None:
    with pytest.raises(ValueError, match=r"; |, so "):
        ready(name, KINDS[kind])


@pytest.mark.parametrize("name", sorted(MAKERS.keys() - {"single", "augmentation"}))
def test_a_network_without_weights_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="(?i)no (convolution|normalisation)"):
        MAKERS[name](nn.Sequential(nn.Flatten(), nn.ReLU()))


@pytest.mark.parametrize("name", MAKERS)
def test_what_building_reads_of_a_network_changes_nothing(name: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 3)).train()
    # Whose vectors go on by a step whenever its weight is read in training mode.
    nn.utils.parametrizations.spectral_norm(net[2])
    before = state(net)
    with suppress(ValueError):  # of those that a computed weight is too much for
        MAKERS[name](net)
    assert same(state(net), before)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("wrong", [None, "resnet18", {}, nn.Linear])
def test_what_is_no_network_is_refused(name: str, wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"A torch.nn.Module is needed, not a \w+; give"):
        MAKERS[name](wrong)


@pytest.mark.parametrize("name", MAKERS)
def test_a_network_that_is_not_initialised_is_refused(name: str) -> None:
    for lazy in (nn.LazyLinear(8), nn.LazyBatchNorm1d()):
        with pytest.raises(ValueError, match=r"Not initialised yet: '1.weight'; run the network"):
            MAKERS[name](nn.Sequential(nn.Linear(4, 8), lazy, nn.Linear(8, 3)))


@pytest.mark.parametrize(
    "name", sorted(METHODS.keys() - {"Conformal", "DeepEnsemble", "MultiSWAG"})
)
def test_where_the_logits_are_is_checked_when_a_method_is_built(name: str) -> None:
    net: Any = KINDS["mlp"].build()
    with pytest.raises(TypeError, match="output='logits' is no function; give"):
        METHODS[name](net, output="logits")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"class_dim='last' is not a whole number"):
        METHODS[name](net, class_dim="last")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["DeepEnsemble", "MultiSWAG"])
@pytest.mark.parametrize("wrong", [None, nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))])
def test_an_ensemble_is_made_of_a_list(name: str, wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"A list of \w+ is needed, not a"):
        METHODS[name](wrong)
    with pytest.raises(TypeError, match=r"is needed, not a NoneType; |not a NoneType; wrap"):
        METHODS[name]([None])


NUMBERS = [
    ("LPBNN", "latent_weight", 0.0),
    ("MIMO", "rho", 0.0),
    ("Masksembles", "scale", 1.0),
    ("MCDropout", "p", 0.0),
    ("PackedEnsembles", "alpha", 1e-9),
    ("VIBNN", "prior_std", 1e-9),
    ("VIBNN", "init_std", 1e-9),
    ("VIBNN", "kl_weight", 0.0),
    ("SWAG", "start", 0.0),
    ("SWAG", "scale", 0.0),
    ("TRADI", "lengthscale", 1e-9),
    ("TRADI", "mean_noise", 1e-9),
    ("TRADI", "variance_noise", 1e-9),
    ("TRADI", "measurement_noise", 1e-9),
    ("Laplace", "prior_precision", 1e-9),
    ("TestTimeAugmentation", "std", 0.0),
    ("LatentNoise", "std", 0.0),
]


@pytest.mark.parametrize(("name", "argument", "least"), NUMBERS)
def test_arguments_that_are_no_numbers_are_refused(name: str, argument: str, least: float) -> None:
    def build(value: Any) -> Method:
        net: Any = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Linear(16, 3))
        return METHODS[name](net, **{argument: value})

    assert getattr(build(least), argument) == least
    for wrong in (least - 1e-6, float("nan"), float("inf"), "1", True, torch.tensor(1.0), [0.5]):
        with pytest.raises(ValueError, match=rf"{argument}=.* is not a number"):
            build(wrong)
