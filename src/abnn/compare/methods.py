"""How every method is made in a comparison: from one recipe, one seed, and the same networks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import abnn
from abnn import baselines
from abnn.baselines import SWAG, Method
from abnn.builders import nearest
from abnn.compare.trial import Setting, Trial, count_of
from abnn.evaluate import Predictor

Build = Callable[[Any, Setting], Method]


@dataclass(frozen=True)
class Entry:
    """One row of the table.

    Args:
        title: what the table calls it.
        make: gives the method of one seed, trained and ready to predict.
        networks: how many networks that are trained as they are it starts from; None: as many as
            an ensemble has members.
        predict: arguments of its predictions, as a function of the setting.
        after: a method that it shares trainings with, and which has to be done before.
    """

    title: str
    make: Callable[[Trial], Predictor]
    networks: int | None = 0
    predict: Callable[[Setting], dict[str, Any]] = field(default=lambda _: {})
    after: str = ""

    def starts_from(self, setting: Setting) -> int:
        """How many trained networks it starts from."""
        return setting.members if self.networks is None else self.networks


def _samples(setting: Setting) -> dict[str, Any]:
    return {"samples": setting.samples}


def _samples_each(setting: Setting) -> dict[str, Any]:
    return {"samples": setting.samples_each}


def _from_scratch(name: str, build: Build) -> Callable[[Trial], Method]:
    """Built from a network with random weights, and trained as a whole."""

    def make(trial: Trial) -> Method:
        return trial.trained(name, lambda: build(trial.fresh(), trial.setting))

    return make


def _afterwards(name: str, build: Build) -> Callable[[Trial], Method]:
    """Built from a trained network, and saved; nothing is trained."""

    def make(trial: Trial) -> Method:
        return trial.keep(name, build(trial.base(), trial.setting))

    return make


def _abnn(trial: Trial) -> Predictor:
    setting = trial.setting
    chosen = setting.fit
    names = ("alpha", "noise", "stats")
    more = {n: getattr(chosen, n) for n in names if getattr(chosen, n) is not None}
    bnn = abnn.convert(trial.base(), modes=setting.members, **more, **setting.network)
    seed = trial.recipe().seed
    abnn.fit(
        bnn,
        setting.train,
        chosen.with_(seed=seed, modes=setting.members),
        run=trial.method("abnn"),
        ignore_index=setting.ignore_index,
    )
    return bnn


def _temperature(net: Any, setting: Setting) -> Method:
    scaled = baselines.TemperatureScaling(net, **setting.network)
    return scaled.fit(setting.validation, setting.ignore_index)


def _augmentation(net: Any, setting: Setting) -> Method:
    # A mirrored letter is another thing, and a network that never saw one is not asked about it.
    flip = "hflip" in setting.recipe.augmentation
    return baselines.TestTimeAugmentation(net, flip=flip, **setting.network)


def _deep_ensemble(trial: Trial) -> Method:
    M, network = trial.setting.members, trial.setting.network
    nets = [trial.base(member) for member in range(M)]
    more = trial.base_seconds(M) - trial.base_seconds(1)
    ensemble = baselines.DeepEnsemble(nets, **network, fit_seconds=more)
    return trial.keep("deep_ensemble", ensemble)


def _vi(trial: Trial) -> Method:
    setting = trial.setting
    examples = count_of(setting.train, setting.ignore_index)
    # Under SGD the standard deviations hardly move, as their gradients are as small as they are.
    return trial.trained(
        "vi",
        lambda: baselines.VIBNN(trial.fresh(), examples=examples, **setting.network),
        optimizer="adamw",
        lr=setting.recipe.lr / 100,
    )


def _swag(trial: Trial, member: int) -> SWAG:
    """A network goes on for a quarter of its training at a constant rate, around which SWAG looks.

    Both are the SWAG paper's ways: to start from a trained network, and a rate well below the
    first one, that of the middle of a training.
    """
    setting = trial.setting
    given = setting.recipe

    def build() -> Method:
        more = {"members": setting.samples, "seed": trial.seed, **setting.network}
        # A few thousand examples tell the statistics of a norm as well as all of them.
        return SWAG(trial.base(member), start=0.0, refresh=32, **more)

    length = {"epochs": given.epochs / 4}
    if given.steps is not None:
        length = {"steps": max(2, given.steps // 4)}
    name, rate = f"swag-{member}" if member else "swag", given.lr / 5
    trained = trial.trained(name, build, member, lr=rate, schedule="constant", **length)
    assert isinstance(trained, SWAG)
    return trained


def _multi_swag(trial: Trial) -> Method:
    setting = trial.setting
    swags = [_swag(trial, member) for member in range(setting.members)]
    mixture = baselines.MultiSWAG(swags)
    others = trial.base_seconds(setting.members) - trial.base_seconds(1)
    if mixture.fit_seconds is not None:
        mixture.fit_seconds += others
    return trial.keep("multi_swag", mixture)


def _laplace(name: str, **choices: Any) -> Callable[[Trial], Method]:
    """Over the last layer, as the ABNN paper has it."""

    def build(net: Any, setting: Setting) -> Method:
        laplace = baselines.Laplace(net, **choices, **setting.network)
        return laplace.fit(setting.train, setting.ignore_index)

    return _afterwards(name, build)


def _mimo(rho: float) -> Build:
    return lambda net, s: baselines.MIMO(net, s.members, rho=rho, **s.network)


def _noise(std: float) -> Entry:
    name = f"latent_noise_{std:g}"
    build: Build = lambda net, s: baselines.LatentNoise(net, std, **s.network)  # noqa: E731
    return Entry(f"Latent noise {std:g}", _afterwards(name, build), networks=1, predict=_samples)


# In the order of the table.
ENTRIES: dict[str, Entry] = {
    "single": Entry(
        "Single model",
        _afterwards("single", lambda net, s: baselines.Single(net, **s.network)),
        networks=1,
    ),
    "temperature": Entry(
        "Temperature scaling", _afterwards("temperature", _temperature), networks=1
    ),
    "augmentation": Entry(
        "Test-time augmentation",
        _afterwards("augmentation", _augmentation),
        networks=1,
        predict=_samples,
    ),
    **{f"latent_noise_{std:g}": _noise(std) for std in (0.01, 0.1, 1.0)},
    "laplace": Entry("Laplace (Kronecker)", _laplace("laplace"), networks=1),
    "laplace_diag": Entry(
        "Laplace (diagonal)",
        _laplace("laplace_diag", structure="diag", predictive="sampling"),
        networks=1,
        predict=_samples,
    ),
    "vi": Entry("VI-BNN", _vi, predict=_samples),
    "mc_dropout": Entry(
        "MC Dropout",
        _from_scratch("mc_dropout", lambda net, s: baselines.MCDropout(net, **s.network)),
        predict=_samples,
    ),
    "tradi": Entry(
        "TRADI",
        _from_scratch("tradi", lambda net, s: baselines.TRADI(net, **s.network)),
        predict=_samples,
    ),
    "swag": Entry("SWAG", lambda trial: _swag(trial, 0), networks=1),
    "multi_swag": Entry(
        "MultiSWAG", _multi_swag, networks=None, predict=_samples_each, after="swag"
    ),
    "batch_ensemble": Entry(
        "BatchEnsemble",
        _from_scratch(
            "batch_ensemble", lambda net, s: baselines.BatchEnsemble(net, s.members, **s.network)
        ),
    ),
    "lp_bnn": Entry(
        "LP-BNN",
        _from_scratch("lp_bnn", lambda net, s: baselines.LPBNN(net, s.members, **s.network)),
        predict=_samples_each,
    ),
    "masksembles": Entry(
        "Masksembles",
        _from_scratch(
            "masksembles", lambda net, s: baselines.Masksembles(net, s.members, **s.network)
        ),
    ),
    "mimo": Entry("MIMO (rho=0)", _from_scratch("mimo", _mimo(rho=0.0))),
    "mimo_rho1": Entry("MIMO (rho=1)", _from_scratch("mimo_rho1", _mimo(rho=1.0))),
    "packed_ensembles": Entry(
        "Packed-Ensembles",
        _from_scratch(
            "packed_ensembles",
            lambda net, s: baselines.PackedEnsembles(net, s.members, **s.network),
        ),
    ),
    "deep_ensemble": Entry("Deep Ensembles", _deep_ensemble, networks=None),
    "abnn": Entry("ABNN", _abnn, networks=1, predict=_samples_each),
}


def chosen(names: Sequence[str] | str) -> dict[str, Entry]:
    """The methods of these names, in the order of the table; "all" are all.

    >>> list(chosen(["abnn", "single"]))
    ['single', 'abnn']
    """
    if isinstance(names, str):
        names = list(ENTRIES) if names == "all" else [names]
    if not names:
        raise ValueError(f'There is no method to compare; give names, or "all" of {_known()}.')
    for name in names:
        if name not in ENTRIES:
            raise ValueError(
                f"There is no method {name!r}; {nearest(name, ENTRIES)} There are {_known()}."
            )
    return {name: entry for name, entry in ENTRIES.items() if name in names}


def _known() -> str:
    return ", ".join(ENTRIES)
