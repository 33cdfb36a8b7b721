"""How sure the figures themselves are: over the examples of a test set, and over seeds.

Examples are taken as independent; the pixels of one image are not, and their intervals come out
too narrow.
"""

from abnn.statistics.examples import Examples
from abnn.statistics.resampling import bootstrap, compare, figures_of
from abnn.statistics.seeds import compare_seeds, over_seeds
from abnn.statistics.table import Comparison, Figures, Interval, Spread
from abnn.statistics.verdicts import HIGHER_IS_BETTER

__all__ = [
    "HIGHER_IS_BETTER",
    "Comparison",
    "Examples",
    "Figures",
    "Interval",
    "Spread",
    "bootstrap",
    "compare",
    "compare_seeds",
    "figures_of",
    "over_seeds",
]
