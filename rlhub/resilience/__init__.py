"""What ends a run well: stop signals."""

from rlhub.resilience.signals import StopSignals

__all__ = ["StopSignals"]
