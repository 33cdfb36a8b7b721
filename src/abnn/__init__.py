"""Turn any pre-trained PyTorch network into a Bayesian one, and know when to trust it."""

__version__ = "0.1.0"
