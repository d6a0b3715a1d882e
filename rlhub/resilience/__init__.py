"""What keeps a run alive or ends it well: stop signals, restart policy, and fault plans that prove it."""

from rlhub.resilience.faults import Fault, FaultInjector, InjectedFaultError, parse_fault_plan
from rlhub.resilience.restart import RestartPolicy
from rlhub.resilience.signals import StopSignals

__all__ = ["Fault", "FaultInjector", "InjectedFaultError", "RestartPolicy", "StopSignals", "parse_fault_plan"]
