"""Turn any pre-trained PyTorch network into a Bayesian one, and know when to trust it."""

from abnn.artifact import ArtifactError, load
from abnn.convert import Inspection, convert, inspect
from abnn.draws import Draw
from abnn.evaluate import Evaluation, evaluate
from abnn.fit import fit
from abnn.model import ABNN
from abnn.plan import Plan
from abnn.prediction import Prediction
from abnn.prior import RandomPrior
from abnn.recipe import Recipe
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
    "RandomPrior",
    "Recipe",
    "__version__",
    "convert",
    "evaluate",
    "fit",
    "inspect",
    "load",
]
