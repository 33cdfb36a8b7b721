"""Turn any pre-trained PyTorch network into a Bayesian one, and know when to trust it."""

from abnn.artifact import ArtifactError, load
from abnn.convert import Inspection, convert, inspect
from abnn.curve import SamplesCurve
from abnn.draws import Draw
from abnn.evaluate import Evaluation, evaluate
from abnn.fit import fit
from abnn.loader import predict_loader
from abnn.model import ABNN
from abnn.plan import Plan
from abnn.prediction import Prediction
from abnn.prior import RandomPrior
from abnn.recipe import Recipe
from abnn.results import Predictions, load_predictions
from abnn.validation import FitResult

__version__ = "0.1.0"
__all__ = [
    "ABNN",
    "ArtifactError",
    "Draw",
    "Evaluation",
    "FitResult",
    "Inspection",
    "Plan",
    "Prediction",
    "Predictions",
    "RandomPrior",
    "Recipe",
    "SamplesCurve",
    "__version__",
    "convert",
    "evaluate",
    "fit",
    "inspect",
    "load",
    "load_predictions",
    "predict_loader",
]
