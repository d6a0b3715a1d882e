"""From configuration to a reward manager whose function is loaded."""

from __future__ import annotations

from pathlib import Path

from rlhub.config.sections.reward import CustomRewardConfig, RewardModelConfig
from rlhub.errors import ConfigError, LoadError
from rlhub.registry import knobs_for
from rlhub.rewards.base import Decoder, ManagerParts, RewardManager
from rlhub.rewards.pool import RewardPool
from rlhub.rewards.registry import REWARD_MANAGERS

DEFAULT_TARGET = "rlhub.rewards.registry:compute_score"


def build_reward_manager(
    reward_model: RewardModelConfig, custom: CustomRewardConfig, tokenizer: Decoder, max_response_length: int
) -> RewardManager:
    """Builds the configured manager.  Starts a child process and loads the reward function in it; `close()` ends it.

    Raises ConfigError for an unknown manager or knob and for a function that cannot be loaded.
    """
    name = reward_model.reward_manager
    where = "reward_model.reward_kwargs"
    knobs = knobs_for(REWARD_MANAGERS.knobs_class(name), reward_model, reward_model.reward_kwargs, where=where)
    pool = RewardPool(
        reward_target(custom),
        num_workers=reward_model.num_workers,
        timeout_s=reward_model.timeout_s,
        memory_gb=reward_model.memory_gb,
        env=custom.env,
    )
    parts = ManagerParts(
        pool=pool,
        tokenizer=tokenizer,
        max_response_length=max_response_length,
        on_error=reward_model.on_error,
        max_error_rate=reward_model.max_error_rate,
    )
    try:
        manager: RewardManager = REWARD_MANAGERS.get(name)(parts, knobs)
        pool.start()
    except ConfigError:  # the pool's, which names its setting
        raise
    except LoadError as error:
        raise ConfigError(f"custom_reward_function: {error}" if custom.path else str(error)) from error
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    return manager


def reward_target(custom: CustomRewardConfig) -> str:
    """Returns the function's name for the pool; a relative path counts from the working directory.  ConfigError: no such file."""
    if custom.path is None:
        return DEFAULT_TARGET
    path = Path(custom.path).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"custom_reward_function.path={custom.path}: no such file ({path})")
    return f"{path}:{custom.name}"
