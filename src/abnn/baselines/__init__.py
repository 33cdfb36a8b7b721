"""What to compare with: other ways to a `Prediction`, all of one shape.

Each is a module with `predict(x)`, whose call gives the log of the mean probabilities (a drop-in
for logits), and with `num_added_parameters`, its size beyond the one original network.
"""

from abnn.baselines.ensemble import DeepEnsemble
from abnn.baselines.single import Single
from abnn.baselines.temperature import TemperatureScaling

__all__ = ["DeepEnsemble", "Single", "TemperatureScaling"]
