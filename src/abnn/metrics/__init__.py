"""The paper's metrics: pure functions on tensors that give plain fractions, never percentages."""

from abnn.metrics.calibration import ece
from abnn.metrics.classification import accuracy, brier, log_likelihood, nll, squared_error
from abnn.metrics.detection import Detection, aupr, auroc, detect, fpr_at_recall

__all__ = [
    "Detection",
    "accuracy",
    "aupr",
    "auroc",
    "brier",
    "detect",
    "ece",
    "fpr_at_recall",
    "log_likelihood",
    "nll",
    "squared_error",
]
