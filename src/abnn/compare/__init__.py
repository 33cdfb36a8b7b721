"""Compare methods on the same data, networks and seeds: the paper's table."""

from abnn.compare.methods import ENTRIES, Entry
from abnn.compare.run import Comparison, compare
from abnn.compare.table import ComparisonTable, table_of
from abnn.compare.trial import Setting, Trial

__all__ = [
    "ENTRIES",
    "Comparison",
    "ComparisonTable",
    "Entry",
    "Setting",
    "Trial",
    "compare",
    "table_of",
]
