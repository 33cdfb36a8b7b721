"""Load a method that was saved, onto the network that it was built from."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from abnn.baselines.augmentation import TestTimeAugmentation
from abnn.baselines.batch_ensemble import BatchEnsemble
from abnn.baselines.conformal import Conformal
from abnn.baselines.ensemble import DeepEnsemble
from abnn.baselines.laplace import Laplace
from abnn.baselines.latent_noise import LatentNoise
from abnn.baselines.lp_bnn import LPBNN
from abnn.baselines.masksembles import Masksembles
from abnn.baselines.mc_dropout import MCDropout
from abnn.baselines.method import KIND, TENSORS, Method
from abnn.baselines.mimo import MIMO
from abnn.baselines.multi_swag import MultiSWAG
from abnn.baselines.packed_ensembles import PackedEnsembles
from abnn.baselines.single import Single
from abnn.baselines.swag import SWAG
from abnn.baselines.temperature import TemperatureScaling
from abnn.baselines.tradi import TRADI
from abnn.baselines.vi import VIBNN
from abnn.outputs import Output
from abnn.store import ArtifactError, read_artifact

METHODS: dict[str, type[Method]] = {
    method.__name__: method
    for method in (
        BatchEnsemble,
        Conformal,
        DeepEnsemble,
        LPBNN,
        Laplace,
        LatentNoise,
        MCDropout,
        MIMO,
        Masksembles,
        MultiSWAG,
        PackedEnsembles,
        SWAG,
        Single,
        TRADI,
        TemperatureScaling,
        TestTimeAugmentation,
        VIBNN,
    )
}


def load(path: str | PathLike[str], net: Any, *, output: Output | None = None) -> Method:
    """Load what `save` of a method of `abnn.baselines` wrote; the network is not changed.

    Args:
        path: the directory.
        net: the network that the method was built from. Of a method that was trained as a whole,
            its weights do not matter; any other needs those that it had then.
        output: the `output=` function of the method, if there was one; code is never saved.

    >>> import tempfile
    >>> from abnn.baselines import BatchEnsemble
    >>> net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(1, 4)
    >>> ensemble = BatchEnsemble(net)
    >>> with tempfile.TemporaryDirectory() as run:
    ...     ensemble.save(run)
    ...     bool((load(run, net).predict(x).probs == ensemble.predict(x).probs).all())
    True
    """
    folder = Path(path)
    config, tensors = read_artifact(folder, KIND, TENSORS, "saved method: its save")
    if config["method"] not in METHODS:
        raise ArtifactError(
            f"{folder} holds a {config['method']}, which this abnn does not know; use the abnn "
            "that wrote it."
        )
    if config["custom_output"] and output is None:
        raise ArtifactError(
            f"{folder} was built with an output= function; pass it to load(..., output=) too."
        )
    try:
        method = METHODS[config["method"]].rebuild(net, output, config["arguments"])
    except (ValueError, TypeError) as error:
        raise ArtifactError(f"{folder} was made from another network: {error}") from error
    here = method.network_state()
    for part, difference in (("structure", "layers, shapes or dtypes"), ("values", "weights")):
        if config["network"].get(part) != here.get(part):
            raise ArtifactError(
                f"{folder} was made from a network with other {difference}; give the one that the "
                f"{config['method']} was built from."
            )
    expected = method.own_state()
    odd = sorted(expected.keys() ^ tensors.keys())
    if odd:
        raise ArtifactError(f"{folder / TENSORS} does not fit its method: see {odd[0]!r}.")
    try:
        method.load_state_dict(tensors, strict=False)
    except RuntimeError as error:  # of another shape
        raise ArtifactError(f"{folder / TENSORS} does not fit its method: {error}.") from error
    method.fit_seconds = config["fit_seconds"]
    return method
