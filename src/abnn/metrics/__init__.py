"""The paper's metrics and more: pure functions that give plain fractions, never percentages.

Three states, `Counts`, `Bins` and `Mean`, take examples batch by batch where they do not fit into
memory.
"""

from abnn.metrics.calibration import (
    Bins,
    Reliability,
    adaptive_ece,
    classwise_ece,
    ece,
    reliability,
)
from abnn.metrics.classification import (
    accuracy,
    brier,
    label_rank,
    log_likelihood,
    nll,
    squared_error,
    top_k_accuracy,
)
from abnn.metrics.counts import Counts
from abnn.metrics.detection import (
    Detection,
    aupr,
    auroc,
    auroc_bound,
    detect,
    detect_counts,
    fpr_at_recall,
)
from abnn.metrics.diversity import disagreement, disagreement_matrix
from abnn.metrics.mean import Mean
from abnn.metrics.selective import (
    accuracy_at_coverage,
    augrc,
    aurc,
    coverage_at_risk,
    risk_coverage,
)
from abnn.metrics.sets import set_coverage, set_size

__all__ = [
    "Bins",
    "Counts",
    "Detection",
    "Mean",
    "Reliability",
    "accuracy",
    "accuracy_at_coverage",
    "adaptive_ece",
    "augrc",
    "aupr",
    "aurc",
    "auroc",
    "auroc_bound",
    "brier",
    "classwise_ece",
    "coverage_at_risk",
    "detect",
    "detect_counts",
    "disagreement",
    "disagreement_matrix",
    "ece",
    "fpr_at_recall",
    "label_rank",
    "log_likelihood",
    "nll",
    "reliability",
    "risk_coverage",
    "set_coverage",
    "set_size",
    "squared_error",
    "top_k_accuracy",
]
