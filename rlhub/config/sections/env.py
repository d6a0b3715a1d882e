"""Section `env`: simulators that act in lock-step, in which a vision-language-action policy is trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from rlhub.config.schema import NonNegativeInt, PositiveInt, PositiveUnitFloat


@dataclass(slots=True, kw_only=True)
class SRPOConfig:
    encoder: Literal["pixels", "vjepa2"] = "pixels"
    """Embedding in which episodes are compared. pixels: where their pictures are bright, along each axis; vjepa2: the features
    of the video model in `path`, one copy on each rank that has simulators."""
    path: str | None = None
    """Folder of a V-JEPA 2 model, for encoder=vjepa2."""
    task: Literal["scene", "instruction"] = "scene"
    """Successes with which a failure is compared. scene: those that began in the same state; instruction: all that were told the
    same."""
    quantile: PositiveUnitFloat = 0.9
    """Quantile of the distances from successes to their nearest neighbours; a failure that is so far from the nearest centre of
    successes has the reward 0.3."""
    bank: NonNegativeInt = 64
    """Newest successes of a task that are kept for the comparisons of later steps."""


@dataclass(slots=True, kw_only=True)
class EnvConfig:
    name: str | None = None
    """Simulator whose episodes train the policy (model.vla): reach_color, gymnasium_vector, module:name or path/to/file.py:name;
    null: the policy answers the prompts of data.train_files. A step has data.train_batch_size scenes, with rollout.n episodes
    from each."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the simulator, by its own names."""
    manager: dict[str, Any] = field(default_factory=dict)
    """How the processes of the simulators run, by the names of EnvManagerOptions (rlhub/envs/vector/manager.py), for example
    {processes: 4, timeout_s: 60, python: /path/to/python, affinity: cores}."""
    reward: Literal["simulator", "success", "srpo"] = "simulator"
    """simulator: the simulator's own rewards. success: 1 for the call that solves the task, and a time-out ends an episode like
    a failure. srpo: the same, and a failure has a reward from 0 to 0.6 by its likeness to successes (rlhub/rewards/srpo.py)."""
    srpo: SRPOConfig = field(default_factory=SRPOConfig)
    """How reward=srpo compares failures with successes."""
    num_envs: PositiveInt | None = None
    """Environments of each rank; further episodes begin where others have ended. null: one for each of its episodes."""
    stages: PositiveInt = 1
    """Parts of a rank's environments; with 2, one part is simulated while the policy chooses the actions of the other."""
    scenes: Literal["seeds", "fixed"] = "seeds"
    """Starts of training episodes: seeds drawn from data.seed, or the environment's own fixed initial states."""
    num_scenes: PositiveInt = 65536
    """Number of these starts, which make an epoch."""
    val_scenes: NonNegativeInt = 0
    """Fixed initial states, from the first, on which the policy is validated with rollout.val_kwargs (greedy unless said
    otherwise); 0: no validation."""
