"""Turn any pre-trained PyTorch network into a Bayesian one, and know when to trust it."""

from abnn.artifact import load
from abnn.convert import Inspection, convert, inspect
from abnn.curve import SamplesCurve
from abnn.draws import Draw
from abnn.evaluate import evaluate
from abnn.evaluation import Evaluation
from abnn.fit import fit
from abnn.loader import predict_loader
from abnn.model import ABNN
from abnn.plan import Plan
from abnn.prediction import Prediction
from abnn.prior import RandomPrior
from abnn.recipe import Recipe
from abnn.record import Record, Recorded
from abnn.results import Predictions, load_predictions
from abnn.robustness import Robustness, robustness
from abnn.store import ArtifactError
from abnn.train import train
from abnn.trainresult import TrainResult
from abnn.trajectory import Trajectory, trajectory
from abnn.tune import TuneResult, tune
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
    "Record",
    "Recorded",
    "Robustness",
    "SamplesCurve",
    "TrainResult",
    "Trajectory",
    "TuneResult",
    "__version__",
    "convert",
    "evaluate",
    "fit",
    "inspect",
    "load",
    "load_predictions",
    "predict_loader",
    "robustness",
    "train",
    "trajectory",
    "tune",
]
