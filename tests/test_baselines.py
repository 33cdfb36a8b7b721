"""The baselines: what they predict, what they cost, and that they leave a network alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import abnn
from abnn import Prediction
from abnn.baselines import Conformal, DeepEnsemble, Single, TemperatureScaling
from abnn.baselines.temperature import best_temperature, tempered
from abnn.evaluate import Predictor
from abnn.metrics import nll


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))


def inputs(seed: int = 0, n: int = 6) -> Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))


def held_out(seed: int, scale: float = 3.0, K: int = 5) -> tuple[Tensor, Tensor]:
    """Logits `scale` times too large for the labels that are drawn from them."""
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(400, K, generator=g)
    return scale * logits, torch.multinomial(logits.softmax(1), 1, generator=g).squeeze(1)


BASELINES: dict[str, Callable[[nn.Module], Single | TemperatureScaling | DeepEnsemble]] = {
    "single": Single,
    "temperature": TemperatureScaling,
    "ensemble": lambda net: DeepEnsemble([net, network(1)]),
}


@pytest.mark.parametrize("name", BASELINES)
def test_predicting_changes_neither_mode_nor_state(name: str) -> None:
    net = network().train()
    net[1].eval()
    before = copy.deepcopy(net.state_dict())
    prediction = BASELINES[name](net).predict(inputs())
    assert [part.training for part in net] == [True, False, True, True]
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert not prediction.log_probs.requires_grad


@pytest.mark.parametrize("name", BASELINES)
def test_the_mode_is_restored_after_an_error(name: str) -> None:
    net = network().train()
    with pytest.raises(RuntimeError):
        BASELINES[name](net).predict(torch.zeros(2, 99))
    assert all(part.training for part in net.modules())


@pytest.mark.parametrize("name", BASELINES)
def test_a_call_gives_the_log_of_the_mean_probabilities(name: str) -> None:
    baseline = BASELINES[name](network())
    assert torch.equal(baseline(inputs()), baseline.predict(inputs()).log_probs)


@pytest.mark.parametrize("name", BASELINES)
def test_tuples_mappings_and_other_outputs_are_understood(name: str) -> None:
    class Tokens(nn.Module):
        def forward(self, first: Tensor, second: Tensor) -> dict[str, Tensor]:
            return {"scores": first + second}

    class_last = {"output": lambda result: result["scores"], "class_dim": -1}
    nets = [Tokens(), Tokens()]
    kinds = {"single": Single, "temperature": TemperatureScaling, "ensemble": DeepEnsemble}
    baseline = kinds[name](nets if name == "ensemble" else nets[0], **class_last)
    x = torch.randn(2, 7, 3)
    from_tuple, from_mapping = baseline.predict((x, x)), baseline.predict({"first": x, "second": x})
    assert from_tuple.probs.shape == (2, 3, 7)
    assert torch.allclose(from_tuple.probs, (2 * x).softmax(-1).movedim(-1, 1))
    assert torch.equal(from_tuple.probs, from_mapping.probs)


def test_a_single_network_predicts_its_softmax() -> None:
    net = network().eval()
    prediction = Single(net).predict(inputs())
    assert torch.equal(prediction.log_probs, net(inputs()).log_softmax(1))
    assert prediction.samples_used == 1
    assert Single(net).num_added_parameters == 0


@pytest.mark.parametrize("M", [1, 2, 5])
def test_an_ensemble_averages_probabilities(M: int) -> None:
    nets = [network(seed).eval() for seed in range(M)]
    prediction = DeepEnsemble(nets).predict(inputs())
    mean = torch.stack([net(inputs()).softmax(1) for net in nets]).mean(0)
    assert torch.allclose(prediction.probs, mean, atol=1e-6)
    assert prediction.samples_used == M


def test_an_ensemble_costs_its_other_networks() -> None:
    size = sum(parameter.numel() for parameter in network().parameters())
    assert DeepEnsemble([network(seed) for seed in range(4)]).num_added_parameters == 3 * size


def test_an_ensemble_keeps_its_members_when_asked() -> None:
    nets = [network(seed).eval() for seed in range(3)]
    members = DeepEnsemble(nets).predict(inputs(), keep_members=True).members
    assert members is not None
    assert torch.allclose(members[2], nets[2](inputs()).softmax(1))


def test_impossible_ensembles_are_refused() -> None:
    net = network()
    with pytest.raises(ValueError, match="has no networks"):
        DeepEnsemble([])
    with pytest.raises(ValueError, match="same network twice"):
        DeepEnsemble([net, net])
    with pytest.raises(ValueError, match=r"differ in shape \(\(6, 2\) and \(6, 3\)\)"):
        DeepEnsemble([net, nn.Linear(4, 2)]).predict(inputs())


@pytest.mark.parametrize("seed", range(5))
def test_the_temperature_is_where_the_slope_of_the_nll_is_zero(seed: int) -> None:
    logits, labels = held_out(seed)
    b = torch.tensor(1 / best_temperature(logits, labels), dtype=torch.float64, requires_grad=True)
    loss = nn.functional.cross_entropy(logits.double() * b, labels)
    (slope,) = torch.autograd.grad(loss, b)
    assert abs(slope.item()) < 1e-11


@pytest.mark.parametrize("scale", [1e-20, 0.1, 1, 10, 1e20])
def test_the_temperature_undoes_any_scale(scale: float) -> None:
    logits, labels = held_out(0, 1.0)
    expected = best_temperature(logits.double(), labels)
    assert expected == pytest.approx(1, abs=0.2)
    assert best_temperature(logits.double() * scale, labels) == pytest.approx(scale * expected)


def test_a_fitted_temperature_lowers_the_nll_and_keeps_the_labels() -> None:
    logits, labels = held_out(1)
    scaled = TemperatureScaling(nn.Identity()).fit([(logits[:100], labels[:100])])
    before, after = Single(nn.Identity()).predict(logits), scaled.predict(logits)
    assert scaled.temperature.item() == pytest.approx(3, rel=0.3)
    assert nll(after.log_probs, labels) < nll(before.log_probs, labels) - 0.1
    assert torch.equal(after.label, before.label)
    assert scaled.num_added_parameters == 1


def test_the_temperature_does_not_depend_on_the_batches() -> None:
    logits, labels = held_out(2)
    whole = TemperatureScaling(nn.Identity()).fit([(logits, labels)])
    parts = zip(torch.split(logits, 37), torch.split(labels, 37), strict=True)
    assert TemperatureScaling(nn.Identity()).fit(parts).temperature == whole.temperature


def test_ignored_labels_do_not_count_towards_the_temperature() -> None:
    logits, labels = held_out(3)
    image = logits.reshape(4, 100, 5).movedim(-1, 1)
    void = labels.clone().index_fill_(0, torch.arange(0, 400, 3), 255)
    fitted = TemperatureScaling(nn.Identity()).fit([(image, void.reshape(4, 100))], 255)
    expected = best_temperature(logits[void != 255], labels[void != 255])
    assert fitted.temperature.item() == pytest.approx(expected, rel=1e-6)


def test_a_temperature_is_saved_with_the_module() -> None:
    fitted = TemperatureScaling(nn.Identity()).fit([held_out(0)])
    copied = TemperatureScaling(nn.Identity())
    copied.load_state_dict(fitted.state_dict())
    assert copied.temperature == fitted.temperature


def test_a_predictor_can_be_temperature_scaled() -> None:
    ensemble = DeepEnsemble([network(0), network(1)])
    scaled = TemperatureScaling(ensemble)
    scaled.temperature.fill_(2.0)
    expected = (ensemble.predict(inputs()).log_probs / 2).log_softmax(1)
    assert torch.allclose(scaled(inputs()), expected)
    assert scaled.num_added_parameters == 1 + ensemble.num_added_parameters


# Companions of a predictor


class Members(nn.Module):
    """The predictor of an ensemble whose members' logits, `[B, S, K, ...]`, are its inputs."""

    def predict(self, logits: Tensor, first: int | None = None) -> Prediction:
        return Prediction.from_logits(logits[:, :first].movedim(1, 0))


def disagreeing(seed: int, n: int = 400) -> tuple[Tensor, Tensor]:
    """Four members that are too sure of different things, and labels from a milder mean."""
    g = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(n, 1, 5, generator=g) + 2 * torch.randn(n, 4, 5, generator=g)
    milder = tempered(Members().predict(logits), 2.5).probs
    return logits, torch.multinomial(milder, 1, generator=g).squeeze(1)


@pytest.mark.parametrize("seed", range(5))
def test_the_temperature_of_a_predictor_is_found(seed: int) -> None:
    scaled = TemperatureScaling(Members()).fit([disagreeing(seed, 4000)])
    assert scaled.temperature.item() == pytest.approx(2.5, rel=0.1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n", [20, 400])
def test_a_predictor_is_never_worse_on_the_data_it_is_fitted_on(seed: int, n: int) -> None:
    logits, labels = disagreeing(seed, n)
    before = Members().predict(logits)
    after = TemperatureScaling(Members()).fit([(logits, labels)]).predict(logits)
    assert nll(after.log_probs, labels) <= nll(before.log_probs, labels)
    assert torch.equal(after.label, before.label)


def test_a_temperature_of_one_changes_nothing() -> None:
    logits, _ = disagreeing(0)
    before, after = Members().predict(logits), TemperatureScaling(Members()).predict(logits)
    for name in ("log_probs", "total", "aleatoric", "epistemic"):
        torch.testing.assert_close(getattr(after, name), getattr(before, name))


@pytest.mark.parametrize("T", [0.01, 0.5, 3.0, 1000.0])
def test_tempered_uncertainty_adds_up_in_the_proportion_it_had(T: float) -> None:
    before = Members().predict(disagreeing(0)[0].double())
    after = tempered(before, T)
    assert (after.aleatoric >= 0).all()
    torch.testing.assert_close(after.aleatoric + after.epistemic, after.total)
    torch.testing.assert_close(after.epistemic * before.total, before.epistemic * after.total)


def test_a_sure_prediction_has_no_uncertainty_to_split() -> None:
    sure = Prediction.from_logits(torch.tensor([[[1000.0, 0.0]]] * 2))
    assert tempered(sure, 2.0).aleatoric.item() == tempered(sure, 2.0).epistemic.item() == 0


def test_what_speaks_of_members_has_no_temperature() -> None:
    ensemble = DeepEnsemble([network(0), network(1)])
    scaled = TemperatureScaling(ensemble)
    scaled.temperature.fill_(2.0)
    before, after = (p.predict(inputs(), keep_members=True) for p in (ensemble, scaled))
    for name in ("variation_ratio", "max_logit", "energy", "members"):
        assert torch.equal(getattr(after, name), getattr(before, name)), name
    assert after.samples_used == 2


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 3, 2)])
def test_one_member_is_tempered_as_its_network(shape: tuple[int, ...]) -> None:
    net, single = (TemperatureScaling(n) for n in (nn.Identity(), Single(nn.Identity())))
    net.temperature.fill_(3.0)
    single.temperature.fill_(3.0)
    x = 4 * torch.randn(shape)
    for name in ("log_probs", "aleatoric", "epistemic"):
        torch.testing.assert_close(
            getattr(single.predict(x), name), getattr(net.predict(x), name), atol=1e-6, rtol=1e-5
        )


COMPANIONS: dict[str, Callable[[Predictor], TemperatureScaling | Conformal]] = {
    "temperature": TemperatureScaling,
    "conformal": lambda predictor: Conformal(predictor, 0.5),
    "both": lambda predictor: Conformal(TemperatureScaling(predictor), 0.5),
}


@pytest.mark.parametrize("name", COMPANIONS)
def test_arguments_are_passed_on_to_the_predictor(name: str) -> None:
    logits, labels = disagreeing(0)
    companion = COMPANIONS[name](Members()).fit([(logits, labels)], first=3)
    assert companion.predict(logits, first=3).samples_used == 3
    fewer = COMPANIONS[name](Members()).fit([(logits[:, :3], labels)])
    for key, value in fewer.state_dict().items():
        assert torch.equal(companion.state_dict()[key], value)


@pytest.mark.parametrize("name", COMPANIONS)
def test_companions_of_an_abnn_are_evaluated_like_any_predictor(name: str) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))
    bnn = abnn.convert(net, modes=2)
    batches = [(inputs(seed), torch.arange(6) % 3) for seed in range(4)]
    companion = COMPANIONS[name](bnn)
    before = abnn.evaluate(bnn, batches, ood={"far": [9 * inputs()]}, samples=2, seed=1)
    if isinstance(companion, Conformal):
        companion.fit(batches, samples=2, seed=1)
    after = abnn.evaluate(companion, batches, ood={"far": [9 * inputs()]}, samples=2, seed=1)
    assert after.accuracy == before.accuracy
    assert after.nll == pytest.approx(before.nll, rel=1e-5)
    assert companion.num_added_parameters > bnn.num_added_parameters
    assert torch.equal(companion(inputs()), companion.predict(inputs()).log_probs)


def test_a_predictor_need_not_be_a_module() -> None:
    class Own:
        def predict(self, x: Tensor) -> Prediction:
            return Prediction.from_logits(x.unsqueeze(0))

    logits, labels = held_out(0)
    own = TemperatureScaling(Own()).fit([(logits, labels)])
    network = TemperatureScaling(nn.Identity()).fit([(logits, labels)])
    assert own.temperature.item() == pytest.approx(network.temperature.item(), rel=1e-4)
    assert own.num_added_parameters == 1


@pytest.mark.parametrize("name", COMPANIONS)
def test_what_predicts_something_else_is_refused(name: str) -> None:
    class Classifier(nn.Linear):
        def predict(self, x: Tensor) -> Tensor:
            return self.forward(x).argmax(1)

    with pytest.raises(TypeError, match=r"a tensor of torch.int64, not a Prediction; wrap"):
        COMPANIONS[name](Classifier(4, 3)).fit([(inputs(), torch.zeros(6).long())])  # type: ignore[arg-type]


def test_arguments_that_nothing_takes_are_refused() -> None:
    with pytest.raises(TypeError, match=r"A Sequential has no predict\(x\) to take samples"):
        TemperatureScaling(network()).predict(inputs(), samples=8)
    with pytest.raises(ValueError, match="output= finds the logits of a plain network"):
        TemperatureScaling(Single(network()), output=lambda result: result)


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (torch.eye(3), torch.tensor([0, 1, 2]), "classified correctly"),
        (torch.eye(3), torch.tensor([1, 2, 0]), "no better than chance"),
        (torch.zeros(3, 3), torch.tensor([0, 1, 2]), "no better than chance"),
        (torch.eye(3), torch.tensor([0, 1, 3]), "run from 0 to 3, but there are 3 classes"),
        (torch.eye(3) * math.nan, torch.tensor([0, 1, 2]), "batch 1 contain NaN"),
        (torch.eye(3).log(), torch.tensor([0, 1, 2]), "NaN or infinity"),
        (torch.eye(3), torch.tensor([0, 1]), "one label per prediction"),
        (torch.eye(3), torch.full((3,), -100), "no labelled examples"),
    ],
)
def test_data_without_a_best_temperature_is_refused(
    logits: Tensor, labels: Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TemperatureScaling(nn.Identity()).fit([(logits, labels)])


def test_an_empty_loader_fits_no_temperature() -> None:
    with pytest.raises(ValueError, match="no labelled examples"):
        TemperatureScaling(nn.Identity()).fit([])
