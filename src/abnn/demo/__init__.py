"""The demo: handwritten digits, a network that learns them, and what it should be unsure of."""

from abnn.demo.data import load_data
from abnn.demo.run import SEED, Demo, run_demo
from abnn.demo.training import network

__all__ = ["SEED", "Demo", "load_data", "network", "run_demo"]
