"""Which trackers there are; rows load on first use.  `requires` names the Python packages a tracker needs; those of rlhub are
installed by the extra of the tracker's name.  A companion `login` says what its account lacks on this machine, or asks the user
for it: () -> sentences.  It is called before a run starts.

metrics.jsonl and report.html are no trackers: every run has them.
"""

from __future__ import annotations

from collections.abc import Iterable

from rlhub.registry import Registry
from rlhub.tracking.tracker import Tracker, is_installed

TRACKERS: Registry[type[Tracker]] = Registry("tracker")
TRACKERS.add_lazy("console", "rlhub.tracking.console:ConsoleTracker", requires=("rich",))
TRACKERS.add_lazy("mlflow", "rlhub.tracking.mlflow:MlflowTracker", requires=("mlflow",))
TRACKERS.add_lazy(
    "swanlab",
    "rlhub.tracking.swanlab:SwanlabTracker",
    requires=("swanlab",),
    companions={"login": "rlhub.tracking.swanlab:login_problems"},
)
TRACKERS.add_lazy("tensorboard", "rlhub.tracking.tensorboard:TensorboardTracker", requires=("tensorboard",))
TRACKERS.add_lazy("trackio", "rlhub.tracking.trackio:TrackioTracker", requires=("trackio",))
TRACKERS.add_lazy(
    "wandb", "rlhub.tracking.wandb:WandbTracker", requires=("wandb",), companions={"login": "rlhub.tracking.wandb:login_problems"}
)
EXTRAS = frozenset(TRACKERS.names()) - {"console"}
"""Trackers whose packages an extra of rlhub installs; the console's come with rlhub."""


def package_problems(names: Iterable[str]) -> list[str]:
    """Returns which packages of the named trackers are not installed, and the command that installs those of rlhub's extras."""
    found = []
    for name in dict.fromkeys(name for name in names if name in TRACKERS):
        missing = [package for package in sorted(TRACKERS.row(name).requires) if not is_installed(package)]
        advice = f"; run: pip install 'rlhub[{name}]'" if name in EXTRAS else ""
        if missing:
            found.append(f"trainer.logger: {name} needs the package {', '.join(missing)}, which is not installed{advice}")
    return found


def login_problems(names: Iterable[str]) -> list[str]:
    """Returns what keeps the named trackers from starting on this machine, beyond what is installed."""
    logins = [TRACKERS.companion(name, "login") for name in dict.fromkeys(names)]
    return [problem for login in logins if login is not None for problem in login()]
