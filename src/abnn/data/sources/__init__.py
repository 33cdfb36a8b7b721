"""Where data is from: one file a source, all of one shape.

A source is a function of what follows the colon that says which parts there are: "train",
"validation" and "test", or "whole" where nothing is divided. Each part is a function that reads it.
"""

from abnn.data.sources import cifar, dtd, folder, hf, imagenet, module, npz, svhn
from abnn.data.sources.source import Parts, Source

SOURCES: dict[str, Source] = {
    "npz": npz.SOURCE,
    "folder": folder.SOURCE,
    "cifar10": cifar.CIFAR10,
    "cifar100": cifar.CIFAR100,
    "svhn": svhn.SOURCE,
    "imagenet": imagenet.SOURCE,
    "dtd": dtd.SOURCE,
    "hf": hf.SOURCE,
    "module": module.SOURCE,
}

__all__ = ["SOURCES", "Parts", "Source"]
