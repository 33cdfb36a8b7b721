"""Data that a command line names, and images on their way to a network. See docs/data.md."""

from abnn.data.augmentation import MIXING
from abnn.data.dataset import Images, Rows, classes_of, notes_of
from abnn.data.loader import training_loader
from abnn.data.ood import open_ood
from abnn.data.opening import has_test, open_data, parts_of, pictures
from abnn.data.sources import SOURCES
from abnn.data.sources.source import Part
from abnn.data.splits import held_out_split, train_and_validation
from abnn.data.stored import BrokenImageError
from abnn.data.view import AUGMENTATIONS, View

__all__ = [
    "AUGMENTATIONS",
    "MIXING",
    "SOURCES",
    "BrokenImageError",
    "Images",
    "Part",
    "Rows",
    "View",
    "classes_of",
    "has_test",
    "held_out_split",
    "notes_of",
    "open_data",
    "open_ood",
    "parts_of",
    "pictures",
    "train_and_validation",
    "training_loader",
]
