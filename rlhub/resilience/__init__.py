"""What ends a run well: stop signals, and fault plans that prove what happens when processes die."""

from rlhub.resilience.faults import Fault, FaultInjector, InjectedFaultError, parse_fault_plan
from rlhub.resilience.signals import StopSignals

__all__ = ["Fault", "FaultInjector", "InjectedFaultError", "StopSignals", "parse_fault_plan"]
