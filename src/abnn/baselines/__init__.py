"""What to compare with: other ways to a `Prediction`, all of one shape.

Each is a module with `predict(x)`, whose call gives the log of the mean probabilities (a drop-in
for logits), and with `num_added_parameters`, its size beyond the one original network. Some are
companions of another predictor: these are fitted on held-out data by `fit(loader)`, and hand what
else `predict` is given, such as `samples=8`, on to that predictor.
"""

from abnn.baselines.conformal import Conformal
from abnn.baselines.ensemble import DeepEnsemble
from abnn.baselines.single import Single
from abnn.baselines.temperature import TemperatureScaling

__all__ = [
    "Conformal",
    "DeepEnsemble",
    "Single",
    "TemperatureScaling",
]
