"""A page about how far predictions can be trusted: `abnn report`, or `write_report` in Python."""

from abnn.report.write import write_report

__all__ = ["write_report"]
