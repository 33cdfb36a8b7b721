"""Turn any pre-trained PyTorch network into a Bayesian one, and know when to trust it."""

from abnn.convert import Inspection, convert, inspect
from abnn.model import ABNN
from abnn.prediction import Prediction

__version__ = "0.1.0"
__all__ = ["ABNN", "Inspection", "Prediction", "__version__", "convert", "inspect"]
