"""What to compare with: other ways to a `Prediction`, all of one shape.

Each is a `Method`: a module with `predict(x)`, whose call gives the log of the mean probabilities
(a drop-in for logits), with `num_added_parameters`, its size beyond the one original network, and
with `save(path)`; `load(path, net)` brings it back. It is built from a network. Most are then
trained by `abnn.train`, all by the same loop. Some are companions of a trained network or of
another predictor: these are fitted by `fit(loader)`.
"""

from abnn.baselines.augmentation import TestTimeAugmentation
from abnn.baselines.batch_ensemble import BatchEnsemble
from abnn.baselines.conformal import Conformal
from abnn.baselines.ensemble import DeepEnsemble
from abnn.baselines.laplace import Laplace
from abnn.baselines.latent_noise import LatentNoise
from abnn.baselines.loading import METHODS, load
from abnn.baselines.lp_bnn import LPBNN
from abnn.baselines.masksembles import Masksembles
from abnn.baselines.mc_dropout import MCDropout
from abnn.baselines.method import Method
from abnn.baselines.mimo import MIMO
from abnn.baselines.multi_swag import MultiSWAG
from abnn.baselines.packed_ensembles import PackedEnsembles
from abnn.baselines.single import Single
from abnn.baselines.swag import SWAG
from abnn.baselines.temperature import TemperatureScaling
from abnn.baselines.tradi import TRADI
from abnn.baselines.vi import VIBNN
from abnn.store import ArtifactError

__all__ = [
    "LPBNN",
    "METHODS",
    "MIMO",
    "SWAG",
    "TRADI",
    "VIBNN",
    "ArtifactError",
    "BatchEnsemble",
    "Conformal",
    "DeepEnsemble",
    "Laplace",
    "LatentNoise",
    "MCDropout",
    "Masksembles",
    "Method",
    "MultiSWAG",
    "PackedEnsembles",
    "Single",
    "TemperatureScaling",
    "TestTimeAugmentation",
    "load",
]
