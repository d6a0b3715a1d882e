"""Which trackers there are; rows load on first use.  `requires` names the Python packages a tracker needs.

metrics.jsonl and report.html are no trackers: every run has them.
"""

from __future__ import annotations

from rlhub.registry import Registry
from rlhub.tracking.tracker import Tracker

TRACKERS: Registry[type[Tracker]] = Registry("tracker")
TRACKERS.add_lazy("console", "rlhub.tracking.console:ConsoleTracker", requires=("rich",))
TRACKERS.add_lazy("tensorboard", "rlhub.tracking.tensorboard:TensorboardTracker", requires=("tensorboard",))
TRACKERS.add_lazy("wandb", "rlhub.tracking.wandb:WandbTracker", requires=("wandb",))
