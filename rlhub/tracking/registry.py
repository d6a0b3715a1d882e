"""Which trackers there are; rows load on first use.  `requires` names the Python packages a tracker needs.  A companion
`login` says what its account lacks on this machine, or asks the user for it: () -> sentences.  It is called before a run starts.

metrics.jsonl and report.html are no trackers: every run has them.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlhub.registry import Registry
from rlhub.tracking.tracker import Tracker

TRACKERS: Registry[type[Tracker]] = Registry("tracker")
TRACKERS.add_lazy("console", "rlhub.tracking.console:ConsoleTracker", requires=("rich",))
TRACKERS.add_lazy("tensorboard", "rlhub.tracking.tensorboard:TensorboardTracker", requires=("tensorboard",))
TRACKERS.add_lazy(
    "wandb", "rlhub.tracking.wandb:WandbTracker", requires=("wandb",), companions={"login": "rlhub.tracking.wandb:login_problems"}
)


def login_problems(names: Iterable[str]) -> list[str]:
    """What keeps the named trackers from starting on this machine, beyond what is installed."""
    logins = [TRACKERS.companion(name, "login") for name in dict.fromkeys(names)]
    return [problem for login in logins if login is not None for problem in login()]
