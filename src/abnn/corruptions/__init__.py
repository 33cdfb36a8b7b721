"""Common corruptions of images, each in five severities, as functions of (seed, place).

They are those of Hendrycks and Dietterich (2019) that need no pictures of their own, with the
published severities: of CIFAR-10-C for small images, of ImageNet-C for large ones. As the random
numbers are not theirs, and values are not rounded to 8 bits, images are alike and not equal to the
published ones.
"""

from abnn.corruptions.functions import CORRUPTIONS, SEVERITIES, Corruption, corrupt, require
from abnn.corruptions.loader import Corrupted

__all__ = [
    "CORRUPTIONS",
    "SEVERITIES",
    "Corrupted",
    "Corruption",
    "corrupt",
    "require",
]
